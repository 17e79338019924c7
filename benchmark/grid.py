"""From a TOML file, or from settings, to runs.

As a program, `python benchmark/grid.py SCRIPT`, it prints every setting of a script under each of the lists
of flags on standard input.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import results_store
from cli import error, parse
from scripts import SCRIPTS, load_script

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
FOR_THE_REPORT = ("beside", "differences_from", "aggregate")


@dataclass(eq=False)
class Run:
    name: str
    script: Path
    given: dict[str, Any]
    """what the grid says, by the names of the script's flags"""
    settings: dict[str, Any]
    """every setting of the script, as config.json has them"""
    run_dir: Path
    results: Path
    """folder of the grid's results"""
    exported: bool = False
    """whether it is in the results"""
    failures: int = 0
    process: Any = None
    """what runs it: subprocess.Popen, or what has its poll, send_signal, kill, returncode"""

    @property
    def threads(self) -> int:
        return self.settings.get("torch_threads", 1)

    def command(self) -> list[str]:
        """The script and its arguments, to start or to go on."""
        if results_store.is_resumable(self.run_dir):
            return [os.path.relpath(self.script), "--resume", str(self.run_dir)]
        return [os.path.relpath(self.script), *flags(self.given), "--run-dir", str(self.run_dir)]

    def fraction(self) -> float:
        """About which part of the run is done, by its evaluations."""
        steps = self.settings.get("total_timesteps", math.inf)
        return min(results_store.latest_step(self.run_dir) / steps, 1.0)


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as tyro reads them."""
    switches = {True: "--{}", False: "--no-{}"}
    return [
        switches[value].format(name) if isinstance(value, bool) else f"--{name}={value}"
        for name, value in settings.items()
    ]


def read_toml(path: Path, *others: str) -> tuple[dict, list[dict]]:
    """The defaults and the runs of a TOML file, names as those of flags; others are keys that it may have."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as exception:
        error(f"cannot read the grid {path}: {exception}")
    for key in others:
        content.pop(key, None)
    entries = content.pop("runs", [])
    tables = [content.pop("defaults", {}), *(entries if isinstance(entries, list) else [entries])]
    if content or not all(isinstance(table, dict) for table in tables):
        error(f"{path} must hold [defaults] and [[runs]], and nothing beside them")
    defaults, *entries = [{k.replace("_", "-"): v for k, v in table.items()} for table in tables]
    return defaults, entries


def find_script(name: Any, path: Path) -> Path:
    """A script by its name, or by its path from the folder of the file that names it."""
    if str(name).endswith(".py") and (path.parent / name).is_file():
        return (path.parent / name).resolve()
    if name not in SCRIPTS:
        near = get_close_matches(str(name), SCRIPTS) or sorted(SCRIPTS)
        error(f"{path}: there is no script {name!r}; there is {', '.join(near)}")
    return SCRIPTS[name]


def product(table: dict[str, Any], where: Path) -> list[dict[str, Any]]:
    """The settings of each run of a table: of a list, every value."""
    axes = {k: v if isinstance(v, list) else [v] for k, v in table.items()}
    for name, values in axes.items():
        if not values or not all(isinstance(value, str | int | float) for value in values):
            error(f"{where}: {name} must be a number, a string, a truth value or a list of those")
        if name.replace("-", "_") in results_store.PLACES:
            error(f"{where}: {name} is not the grid's to set")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def read_grid(path: Path, *others: str) -> list[dict[str, Any]]:
    """The settings of each run, script among them; names are those of flags. others: keys of no concern."""
    defaults, entries = read_toml(path, *FOR_THE_REPORT, *others)
    runs = [run for entry in entries for run in product(defaults | entry, path)]
    for run in runs:
        run["script"] = find_script(run.get("script"), path)
    if not runs:
        error(f"{path} holds no runs")
    return runs


def script_settings(script: Path) -> list[dict[str, Any]]:
    """Every setting of a script under each list of flags on standard input; refuses what the script does."""
    module, settings = load_script(script), []
    for command in json.load(sys.stdin):
        args = parse(module.Args, arguments=command)
        if hasattr(module, "check"):
            # Whether there is such an environment, or a GPU, is for the machine to say that runs it.
            module.make_envs = lambda *_: None
            module.check(replace(args, device="cpu", capture_video=False))
        settings.append(asdict(args))
    return settings


def all_settings(runs: list[dict[str, Any]], where: Path) -> list[tuple[Path, dict, dict]]:
    """Of each run its script, what is given, and every setting; in the order of their scripts."""
    by_script = defaultdict(list)
    for given in runs:
        by_script[given["script"]].append({k: v for k, v in given.items() if k != "script"})
    # In processes of their own: this one, which only waits, should not hold in memory what scripts import.
    children, settled = {}, []
    for script in by_script:
        command = [sys.executable, __file__, str(script)]
        env = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        children[script] = subprocess.Popen(command, **pipes, text=True, env=env)
    for script, child in children.items():
        output, complaint = child.communicate(json.dumps([flags(given) for given in by_script[script]]))
        if child.returncode:
            last = (complaint.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            error(f"{where}: {script.stem}: {last.removeprefix('error: ')}")
        for given, settings in zip(by_script[script], json.loads(output), strict=True):
            if "torch_threads" in settings:
                given.setdefault("torch-threads", 1)
                settings["torch_threads"] = given["torch-threads"]
            settled.append((script, given, settings))
    return settled


def make_runs(path: Path, results: Path) -> list[Run]:
    """The runs of a grid, checked, with their results in a folder of its name; nothing is created."""
    settled = all_settings(read_grid(path), path)
    runs = name_runs(settled, path, Path("runs", path.stem), results / path.stem)
    exported = results_store.read_configs(results / path.stem)
    for run in runs:
        run.exported = run.name in exported
        check_settings(run, f"{run.results}: {run.name}", exported.get(run.name, {}))
        check_settings(run, str(run.run_dir), results_store.read_config(run.run_dir))
    return runs


def name_runs(settled: list[tuple[Path, dict, dict]], path: Path, folder: Path, results: Path) -> list[Run]:
    """Runs in a folder, from what `all_settings` gives; their names say what is not the same in all."""
    groups, runs = defaultdict(list), {}
    for script, given, settings in settled:
        groups[script, settings["env_id"]].append((given, settings))
    for (script, env_id), group in groups.items():
        common = set.intersection(*({*flags(given)} for given, _ in group))
        for given, settings in group:
            unnamed = ("env-id", "seed", "torch-threads")  # what threads change is the time
            varying = {key: value for key, value in sorted(given.items()) if key not in unnamed}
            # A peer is what its algorithm is, as a script is, though all of them be the same.
            shown = (x[2:] for x in flags(varying) if x not in common or x.startswith("--algorithm="))
            parts = [script.stem, env_id, *shown]
            name = "__".join(re.sub(r"[^\w.+-]", "-", x) for x in (*parts, f"seed{settings['seed']}"))
            if name in runs:
                error(f"{path} holds the run {name} twice")
            runs[name] = Run(name, script, given, settings, folder / name, results)
    return list(runs.values())


def check_settings(run: Run, where: str, config: dict) -> None:
    """Refuse a run whose folder, or whose results, are of other settings.

    Unless the grid sets it, a setting that the script has gained since then is none, nor is the device.
    """
    config = config and {"torch_threads": 1} | config  # what has no such setting has one thread
    for name, value in run.settings.items() if config else ():
        given = name.replace("_", "-") in run.given
        old = config.get(name, None if given else value)
        if old != value and name not in results_store.PLACES and (given or name != "device"):
            way_out = "give the grid another name, or remove the folder"
            error(f"{where} has {name} {old}, the grid now {value}; {way_out}")


if __name__ == "__main__":
    print(json.dumps(script_settings(Path(sys.argv[1])), default=str))
