"""Rules that hold for every script in algos/. As a program this file sees to one of them:

python tests/test_repository.py algos/ppo_continuous.py    copies what is below the line into all others
"""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ALGOS, REPOSITORY, run_python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPTS = sorted(ALGOS.glob("*.py"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)

# A part of torch that needs a distribution of its own.
EXTRA_IMPORTS = {"torch.utils.tensorboard": "tensorboard"}
# What each script has of its own.
MAY_DIFFER = {"Args", "train", "make_envs", "make_agent", "make_policy"}
# Divides the algorithm from what every script shares.
LINE = "\n# ---- From here on, the text is the same in every script. ----\n"

# Gymnasium sets an environment variable of its own.
IMPORT = """
import os, random, signal, sys, threading
import gymnasium, numpy, torch
def state():
    return (
        sorted(os.listdir()),
        os.environ.copy(),
        random.getstate(),
        str(numpy.random.get_state()),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        [signal.getsignal(number) for number in signal.valid_signals()],
        threading.active_count(),
    )
before = state()
sys.path.insert(0, os.path.dirname(sys.argv[1]))
__import__(os.path.basename(sys.argv[1]).removesuffix(".py"))
assert state() == before
"""


def header(script: Path) -> dict:
    """The script's metadata, read as PEP 723 says."""
    block = re.search(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", script.read_text())
    return tomllib.loads(re.sub(r"(?m)^# ?", "", block["content"]))


def imported_modules(script: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def definitions(source: str) -> dict[str, str]:
    """Functions and classes at the top level, by name, with their whole text."""
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[min(n.lineno for n in (node, *node.decorator_list)) - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def differing_definitions(sources: list[str]) -> set[str]:
    """Names that are defined in several sources, and not with the same text."""
    texts = {}
    for source in sources:
        for name, text in definitions(source).items():
            texts.setdefault(name, set()).add(text)
    return {name for name, versions in texts.items() if len(versions) > 1} - MAY_DIFFER


def test_scripts_are_found():
    assert SCRIPTS


@each_script
def test_importing_a_script_has_no_side_effect(script, tmp_path):
    imported = run_python("-c", IMPORT, script, cwd=tmp_path)
    assert (imported.returncode, imported.stdout, imported.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@each_script
def test_header_lists_exactly_what_the_script_imports(script):
    """No distribution holds a module of this repository, so a script that imports one fails here."""
    installed, used, listed = importlib.metadata.packages_distributions(), set(), set()
    for module in imported_modules(script):
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names:
            used.add(frozenset(map(canonicalize_name, installed.get(top, [f"(module {module})"]))))
        if module in EXTRA_IMPORTS:
            used.add(frozenset([EXTRA_IMPORTS[module]]))
    listed = {canonicalize_name(Requirement(text).name) for text in header(script)["dependencies"]}
    assert [sorted(names) for names in used if not names & listed] == []
    assert listed - frozenset().union(*used) == set()


@each_script
def test_lock_satisfies_the_header(script):
    """The lock and the header must agree on Python, too."""
    lock = tomllib.loads((REPOSITORY / "poetry.lock").read_text())
    locked = {package["name"]: package for package in lock["package"]}
    for requirement in map(Requirement, header(script)["dependencies"]):
        package = locked.get(canonicalize_name(requirement.name))
        assert package, f"{requirement} is not locked"
        assert requirement.specifier.contains(package["version"]), requirement
        assert requirement.extras <= package.get("extras", {}).keys(), requirement
    assert header(script)["requires-python"] == lock["metadata"]["python-versions"]


def split(script: Path) -> tuple[str, str]:
    """The text above the line, and that below it."""
    above, *below = script.read_text().split(LINE)
    if len(below) != 1:
        sys.exit(f"error: {script} must have this line once: {LINE.strip()}")
    return above, below[0]


def copy_shared_part(source: Path) -> None:
    """Give all scripts beside this one the text that it has below the line."""
    texts = {script: split(script)[0] + LINE + split(source)[1] for script in source.parent.glob("*.py")}
    for script, text in texts.items():
        script.write_text(text)


def test_what_has_the_same_name_in_several_scripts_has_the_same_text():
    assert differing_definitions([split(script)[0] for script in SCRIPTS]) == set()


def test_differing_text_is_found():
    """Even in a decorator; what only one script has, or what each must have of its own, is none."""
    first = "def save(): return 1\n@dataclass\nclass Batch: pass\nclass Args: pass\ndef only(): pass\n"
    second = "def save(): return 2\n@dataclass(frozen=True)\nclass Batch: pass\nclass Args: x = 1\n"
    assert differing_definitions([first, second]) == {"save", "Batch"}
    assert differing_definitions([first, first]) == set()


def test_text_below_the_line_is_the_same_in_all_scripts():
    """`python tests/test_repository.py algos/SCRIPT.py` makes it that of the script."""
    shared = {script.name: split(script)[1] for script in SCRIPTS}
    assert {name for name, text in shared.items() if text != shared[SCRIPTS[0].name]} == set()


def test_the_command_copies_what_is_below_the_line(tmp_path):
    texts = {"a.py": f"A = 1\n{LINE}\nB = 2\n", "b.py": f"C = 3\n{LINE}\nB = 4\n", "c.py": f"{LINE}\nB = 2\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    command = (Path(__file__), tmp_path / "b.py")
    assert run_python(*command, cwd=tmp_path).returncode == 0
    copied = {name: (tmp_path / name).read_text() for name in texts}
    assert copied == {name: text.replace("B = 2", "B = 4") for name, text in texts.items()}
    (tmp_path / "d.py").write_text("D = 5\n")
    (tmp_path / "b.py").write_text(texts["a.py"])
    refused = run_python(*command, cwd=tmp_path)
    assert refused.returncode == 1
    assert "d.py must have this line once" in refused.stderr
    assert (tmp_path / "a.py").read_text() == copied["a.py"]


if __name__ == "__main__":
    copy_shared_part(Path(sys.argv[1]))
