"""The trials of a study, as Optuna keeps them: what they score, which goes on, and what is tried next.

User attributes of a trial: `goal`, the rung that it is on its way to or waits at; `failed`, the last words of
a run; and by rung, of the runs until then, `returns` by their names, `hours`, and `spent`, the hours of the
whole study.
"""

import contextlib
import csv
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from study import Study

SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}


def reports(trial: FrozenTrial) -> dict[int, dict]:
    """What is known of a trial by rung."""
    return {int(name): report for name, report in trial.user_attrs.items() if name.isdigit()}


def scores(trial: FrozenTrial) -> dict[int, float]:
    """By rung; -inf at the one that a trial which has failed was on its way to."""
    ends = {TrialState.FAIL: -math.inf, TrialState.COMPLETE: trial.value}
    last = {trial.user_attrs["goal"]: ends[trial.state]} if trial.state in ends else {}
    return trial.intermediate_values | last


def promotion(trials: list[FrozenTrial], rungs: list[int], reduction_factor: int) -> tuple[int, int] | None:
    """Number of the trial that is to go on, from the highest rung where one may, and the rung above."""
    for rung, above in reversed([*pairwise(rungs)]):
        there = sorted((t for t in trials if rung in scores(t)), key=lambda t: -scores(t)[rung])
        for trial in there[: len(there) // reduction_factor]:
            if trial.user_attrs["goal"] == rung and trial.state == TrialState.RUNNING:
                return trial.number, above
    return None


def propose(study: Study, trials: list[FrozenTrial]) -> dict[str, Any]:
    """The setting of the next trial, floats with four digits; the first is the script's own, if it may be."""
    if not trials:
        own = {name: study.runs[0].settings[name.replace("-", "_")] for name in study.space}
        with contextlib.suppress(ValueError):
            return create_trial(params=own, distributions=study.space, value=0.0).params
    seed = np.random.SeedSequence((study.plan.seed, len(trials))).generate_state(1)[0]
    seen = optuna.create_study(direction="maximize", sampler=SAMPLERS[study.plan.sampler](seed=int(seed)))
    for trial in trials:
        # A paused one is to Optuna a pruned one, ranked by its last rung and the score there; pruned without
        # a score is the worst.
        failed, state = trial.state == TrialState.FAIL, trial.state
        if failed or (state == TrialState.RUNNING and trial.intermediate_values):
            state = TrialState.PRUNED
        setting = {"params": trial.params, "distributions": trial.distributions, "value": trial.value}
        known = {} if failed else trial.intermediate_values
        seen.add_trial(create_trial(state=state, intermediate_values=known, **setting))
    params = seen.ask(study.space).params
    for name, searched in study.space.items():
        if isinstance(searched, FloatDistribution):
            params[name] = min(max(float(f"{params[name]:.4g}"), searched.low), searched.high)
    return params


def write_trials(path: Path, trials: list[FrozenTrial]) -> None:
    """A row for each trial and rung, in the order in which they were known; no file without any."""
    rows = []
    for trial in trials:
        for rung, score in scores(trial).items():
            report = {name: value for name, value in reports(trial)[rung].items() if name != "returns"}
            failed = trial.user_attrs.get("failed") if score == -math.inf else None
            row = {"trial": trial.number, "steps": rung, "score": score, **report, "failed": failed}
            rows.append(row | trial.params | reports(trial)[rung]["returns"])
    if not rows:
        return
    rows.sort(key=lambda row: row["spent"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, dict.fromkeys(name for row in rows for name in row), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
