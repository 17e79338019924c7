"""Rules that hold for every script in algos/."""

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
MAY_DIFFER = {"Args", "train"}

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


def test_what_has_the_same_name_in_several_scripts_has_the_same_text():
    assert differing_definitions([script.read_text() for script in SCRIPTS]) == set()


def test_differing_text_is_found():
    """Even in a decorator; what only one script has, or what each must have of its own, is none."""
    first = "def save(): return 1\n@dataclass\nclass Batch: pass\nclass Args: pass\ndef only(): pass\n"
    second = "def save(): return 2\n@dataclass(frozen=True)\nclass Batch: pass\nclass Args: x = 1\n"
    assert differing_definitions([first, second]) == {"save", "Batch"}
    assert differing_definitions([first, first]) == set()
