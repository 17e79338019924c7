"""Runs as a report knows them, and which of them belong together."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from results_store import PLACES

EPISODES, RETURN, RECENT, SPS = (
    f"charts/{name}" for name in ("episodes", "episodic_return", "return_mean_100", "SPS")
)
AXES = {
    "steps": ("global_step", "environment steps"),
    "episodes": (EPISODES, "episodes of training"),
    "hours": ("hours", "hours of training, without evaluations"),
}
VERSIONS = ("python", "gymnasium", "mujoco", "ale-py", "numpy", "torch", "stable-baselines3")
# What config.json holds beside the settings that make one curve another.
NOT_SETTINGS = {"script", "env_id", "seed", "device", "torch_threads", *PLACES}
NOT_SETTINGS |= {"eval_interval", "eval_episodes", "checkpoint_interval", "capture_video", "track"}
NOT_SETTINGS |= {"wandb_project", "wandb_entity", "git_commit", "cpu", "gpu", *VERSIONS}


@dataclass
class Record:
    folder: Path
    config: dict
    evaluations: pd.DataFrame  # global_step, return: a row for each episode
    progress: pd.DataFrame  # global_step, hours and the tags that were logged, with gaps

    @property
    def env_id(self) -> str:
        return self.config["env_id"]

    @property
    def script(self) -> str:
        return self.config["script"]

    def at(self, column: str, steps: np.ndarray) -> np.ndarray:
        """A column of progress, interpolated at environment steps; NaN where the run does not tell."""
        if column == "global_step":
            return steps
        if column not in self.progress:
            return np.full(len(steps), np.nan)
        known = self.progress.dropna(subset=[column])
        return np.interp(steps, known["global_step"], known[column])

    def mean_returns(self) -> pd.Series:
        """Mean returns by step: of each evaluation, or without any of the latest 100 episodes of training."""
        if not self.evaluations.empty:
            return self.evaluations.groupby("global_step")["return"].mean()
        training = self.progress.set_index("global_step")
        recent = training[RECENT] if RECENT in training else training[RETURN].dropna().rolling(100, 1).mean()
        return recent.dropna()

    def solved(self) -> bool:
        """Whether --stop-at-return ended it."""
        threshold = self.config.get("stop_at_return")
        return threshold is not None and self.mean_returns().iloc[-1] >= threshold


def count(things: list, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def ends(runs: list[Record]) -> np.ndarray:
    """The mean return that each run ends with, (runs,)."""
    return np.array([run.mean_returns().iloc[-1] for run in runs])


def group(runs: list[Record], names: list[str]) -> dict[tuple, list[Record]]:
    """Runs by their values of settings, in order of these."""
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(run.config.get(name) for name in names)].append(run)
    return dict(sorted(groups.items(), key=lambda item: [(str(type(value)), value) for value in item[0]]))


def differing(runs: list[Record]) -> list[str]:
    """The settings that are not the same in all runs of a script that have them; a newer script has more."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in NOT_SETTINGS)
    values = {name: {repr(run.config[name]) for run in runs if name in run.config} for name in names}
    return [name for name in names if len(values[name]) > 1]


def by_settings(runs: list[Record], names: list[str]) -> dict[str, list[Record]]:
    """Runs by their values of settings, in words: those values that most of the groups do not have.

    Of flags that as many groups have as have not, a group is told by those that it has, if it has one.
    """

    def words(name: str, value: Any) -> str:
        name = name.replace("_", " ")
        return name if value is True else f"no {name}" if value is False else f"{name} {value}"

    groups = group(runs, names)
    counts = [Counter(map(repr, values)) for values in zip(*groups, strict=True)]
    named = {}
    for values, seeds in groups.items():
        settings = list(zip(names, values, counts, strict=True))
        flagged = any(value is True and n["True"] == n["False"] for _, value, n in settings)
        told = (
            words(name, value)
            for name, value, n in settings
            if n[repr(value)] <= len(groups) / 2
            and not (flagged and value is False and n["True"] == n["False"])
        )
        named[", ".join(told)] = seeds
    return named


def curves(runs: list[Record]) -> dict[str, list[Record]]:
    """Runs on one environment by script and settings; a name says what the curves do not share."""
    scripts = group(runs, ["script"])
    return {
        ": ".join(filter(None, [script if len(scripts) > 1 or not settings else "", settings])): seeds
        for (script,), same in scripts.items()
        for settings, seeds in by_settings(same, differing(same)).items()
    }


def swept_setting(runs: list[Record]) -> str | None:
    """The one numeric setting with three values or more, all others the same, in the runs of a script."""
    names = differing(runs)

    def is_swept(name: str) -> bool:
        alike = group(runs, [other for other in names if other != name]).values()
        values = [{run.config.get(name) for run in same} for same in alike]
        return any(len(vs) > 2 and all(type(v) in (int, float) for v in vs) for vs in values)

    swept = [name for name in names if is_swept(name)]
    return swept[0] if len(swept) == 1 else None
