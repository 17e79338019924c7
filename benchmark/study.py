"""From a TOML file to a study of settings: what is searched, on which runs, and what a setting scores."""

import tomllib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import results_store
from cli import error, parse
from grid import Run, all_settings, name_runs, read_grid
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

# What says how a setting is tried, or where the rungs are.
NOT_SEARCHED = {"script", "env_id", "seed", "total_timesteps", "eval_interval", "checkpoint_interval"}


@dataclass
class Plan:
    """The table [study]."""

    trials: int = 40
    rungs: list[int] = field(default_factory=list)
    reduction_factor: int = 3
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = 1
    thresholds: dict[str, float] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)


@dataclass
class Study:
    path: Path
    plan: Plan
    space: dict[str, BaseDistribution]
    """the searched flags"""
    runs: list[Run]
    """those of a setting, without what is searched"""

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def rungs(self) -> list[int]:
        """Steps after which a trial has a score; the last is the end of its runs."""
        return [*self.plan.rungs, max(run.settings.get("total_timesteps", 0) for run in self.runs)]

    @cached_property
    def thresholds(self) -> dict[str, float]:
        """What a return is divided by, by environment: 1 for a single one of which no threshold is known."""
        from references import references  # a second, which a refusal need not take

        known = references()["thresholds"] | self.plan.thresholds
        env_ids = sorted({run.settings["env_id"] for run in self.runs})
        unknown = [env_id for env_id in env_ids if env_id not in known]
        if unknown and len(env_ids) > 1:
            error(
                f"{self.path}: [study] must give thresholds of {', '.join(unknown)}: references.toml has none"
            )
        return {env_id: known.get(env_id, 1.0) for env_id in env_ids}

    def score(self, returns: dict[str, float]) -> float:
        from estimates import iqm  # this takes seconds

        return float(iqm(self.relative(returns)))

    def relative(self, returns: dict[str, float]) -> list[float]:
        """Returns by the names of runs, each over the threshold of its environment."""
        return [returns[run.name] / self.thresholds[run.settings["env_id"]] for run in self.runs]

    def definition(self) -> dict[str, Any]:
        """What the trials follow from; of more of them, or on other machines, it is the same study."""
        plan = {k: v for k, v in asdict(self.plan).items() if k not in ("trials", "beside")}
        space = {name: distribution_to_json(searched) for name, searched in self.space.items()}
        return plan | {"space": space, "runs": {run.name: run.given for run in self.runs}}


def read_study(path: Path) -> Study:
    """A study, checked; nothing is created."""
    entries = read_grid(path, "study", "search")
    content = tomllib.loads(path.read_text())
    search = content.get("search")
    if not isinstance(search, dict) or not search or len({entry["script"] for entry in entries}) > 1:
        error(f"{path} must have one script and a table [search]")
    plan = read_plan(content.get("study", {}), path)
    search = {name.replace("_", "-"): searched for name, searched in search.items()}
    ends = {name: ends_of(name, searched, entries, path) for name, searched in search.items()}
    probes = [entries[0] | {name: value} for name, values in ends.items() for value in values]
    settled = all_settings([*entries, *probes], path)
    runs, probed = name_runs(settled[: len(entries)], path, Path(), Path()), iter(settled[len(entries) :])
    space = {}
    for name, values in ends.items():
        read = [next(probed)[2][name.replace("-", "_")] for _ in values]
        space[name] = distribution(name, search[name], read, path)
    study = Study(path, plan, space, runs)
    for run in runs:
        for rung, above in pairwise(study.rungs):
            for name in ("eval_interval", "checkpoint_interval"):
                interval = run.settings.get(name, 0)
                if not interval or rung % interval:
                    error(f"{path}: the rung {rung} is no multiple of {name.replace('_', '-')} {interval}")
            if not 0 < rung < above or run.settings["total_timesteps"] != study.rungs[-1]:
                error(f"{path}: rungs must rise, and stay below the total-timesteps of all runs")
    _ = study.thresholds  # refuses what has none
    return study


def ends_of(name: str, searched: Any, entries: list[dict[str, Any]], path: Path) -> list[Any]:
    """Values of a searched flag which the script must take to take all: a range's ends, or the list."""
    if name.replace("-", "_") in {*NOT_SEARCHED, *results_store.PLACES}:
        error(f"{path}: {name} is not to be searched")
    if any(name in entry for entry in entries):
        error(f"{path}: {name} is both set and searched")
    if isinstance(searched, dict) and {"low", "high"} <= searched.keys() <= {"low", "high", "log", "step"}:
        searched = [searched["low"], searched["high"]]
    if not isinstance(searched, list) or not searched or any(isinstance(x, list | dict) for x in searched):
        error(f"{path}: {name} must be a list, or a range of low, high and if need be log or step")
    return searched


def distribution(name: str, searched: Any, ends: list[Any], path: Path) -> BaseDistribution:
    """What Optuna draws a flag from; ends as the script reads them."""
    if isinstance(searched, list):
        return CategoricalDistribution(searched)
    if not {*map(type, ends)} <= {int, float}:
        error(f"{path}: {name} is no number, so it needs a list in place of a range")
    try:
        return (IntDistribution if type(ends[0]) is int else FloatDistribution)(**searched)
    except (TypeError, ValueError) as exception:
        error(f"{path}: {name}: {exception}")


def read_plan(table: Any, path: Path) -> Plan:
    """The table [study], as tyro reads it."""
    arguments = []
    for name, value in table.items() if isinstance(table, dict) else [("study", table)]:
        values = value if isinstance(value, list) else [value]
        values = [x for pair in value.items() for x in pair] if isinstance(value, dict) else values
        arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    plan = parse(Plan, arguments=arguments)
    least = plan.reduction_factor ** len(plan.rungs)
    wrong = {
        "reduction-factor must be above 1": plan.reduction_factor < 2,
        "seed must not be below 0": plan.seed < 0,
        f"trials must be {max(least, 1)} or more, for one to pass all rungs": plan.trials < max(least, 1),
        "thresholds must be above 0": any(not value > 0 for value in plan.thresholds.values()),
    }
    for message in [message for message, holds in wrong.items() if holds]:
        error(f"{path}: [study]: {message}")
    return plan
