"""What runs say together: curves, intervals over seeds, and scores over environments."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from records import AXES, RETURN, Record, by_settings, curves, differing, ends, group
from references import references
from rliable.library import get_interval_estimates
from scipy.stats import trim_mean

MEANS = ("interquartile mean", "mean")
mean = partial(np.mean, axis=0)
iqm = partial(trim_mean, proportiontocut=0.25, axis=0)


def bootstrap(scores: np.ndarray | list[np.ndarray], statistic: Callable) -> tuple[np.ndarray, ...]:
    """A statistic, (n,), of scores (seeds, tasks) or of several independent ones; and its 95% interval."""
    np.random.seed(0)  # noqa: NPY002 - rliable 1.2 draws from here, whatever random_state it is given
    estimate, bounds = get_interval_estimates({"": scores}, statistic, reps=2000)
    return estimate[""], *bounds[""]


def interval(scores: np.ndarray, statistic: Callable) -> tuple[np.ndarray, ...]:
    """A statistic over seeds of scores (seeds, points), and its 95% bootstrap interval; each (points,)."""
    return bootstrap(scores[:, None], lambda sample: statistic(sample)[0])


def evaluation_curve(runs: list[Record], axis: str) -> pd.DataFrame:
    """mean and stderr over all evaluation episodes of all runs; iqm, low, high over the runs' means; by x.

    x goes as far as all runs that --stop-at-return did not end, or if it ended all, as the last. Where they
    were not evaluated at the same x, it is evenly spaced. Each run stands with its latest evaluation.
    """
    evaluations = [list(run.evaluations.groupby("global_step")["return"]) for run in runs]
    steps = [np.array([step for step, _ in evaluation]) for evaluation in evaluations]
    xs = [run.at(AXES[axis][0], s) for run, s in zip(runs, steps, strict=True)]
    going = [x[-1] for x, run in zip(xs, runs, strict=True) if not run.solved()]
    first, last = max(x[0] for x in xs), min(going) if going else max(x[-1] for x in xs)
    grid = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x in xs]))
    if len(grid) > max(map(len, xs)):
        grid = np.linspace(first, last, max(map(len, xs)))
    rows = []
    for x in grid:
        latest = [np.searchsorted(places, x, side="right") - 1 for places in xs]
        rows.append([evaluation[i][1].to_numpy() for evaluation, i in zip(evaluations, latest, strict=True)])
    episodes = [np.concatenate(row) for row in rows]
    columns = {"mean": [e.mean() for e in episodes], "stderr": [pd.Series(e).sem() for e in episodes]}
    if rows:
        bounds = interval(np.array([[returns.mean() for returns in row] for row in rows]).T, iqm)
        columns |= dict(zip(("iqm", "low", "high"), bounds, strict=True))
    return pd.DataFrame(columns, index=grid)


def training_curve(runs: list[Record], axis: str, bins: int = 50) -> pd.DataFrame:
    """mean and stderr over runs of the return in training, averaged in bins of x, as far as all go."""
    rows = [run.progress.dropna(subset=[RETURN]) for run in runs]
    steps = [row["global_step"].to_numpy() for row in rows]
    xs = [run.at(AXES[axis][0], s) for run, s in zip(runs, steps, strict=True)]
    edges = np.linspace(0, min(x[-1] for x in xs), bins + 1)
    binned = [
        row[RETURN].groupby(pd.cut(x, edges, labels=False)).mean() for row, x in zip(rows, xs, strict=True)
    ]
    filled = [means.reindex(range(bins)).interpolate(limit_area="inside") for means in binned]
    table = pd.DataFrame(filled).set_axis((edges[1:] + edges[:-1]) / 2, axis=1).dropna(axis=1)
    return pd.DataFrame({"mean": table.mean(), "stderr": table.sem()})


def sweep_curve(runs: list[Record], setting: str) -> pd.DataFrame:
    """What runs end with by a setting: mean over seeds, its 95% interval low to high, and number of seeds."""
    rows = {}
    for (value,), seeds in group(runs, [setting]).items():
        rows[value] = (*(x[0] for x in interval(ends(seeds)[:, None], mean)), len(seeds))
    return pd.DataFrame.from_dict(rows, "index", columns=["mean", "low", "high", "seeds"])


def versus(runs: list[Record], others: list[Record], statistic: Callable) -> list[float]:
    """A statistic of what runs and others end with, each (seeds, 1), and its 95% bootstrap interval."""
    both = [ends(seeds)[:, None] for seeds in (runs, others)]
    return [x[0] for x in bootstrap(both, lambda x, y: np.array([statistic(x, y)]))]


def differences_of(runs: list[Record], others: list[Record]) -> pd.DataFrame:
    """How far the mean final return of each curve lies from that of others, by environment and curve."""
    rows = {}
    for (env_id,), same in group(runs, ["env_id"]).items():
        scripts = {run.script for run in runs}
        on_it = [r for r in others if r.env_id == env_id and r.script in scripts]
        for name, seeds in curves(same).items() if on_it else ():
            difference = versus(seeds, on_it, lambda x, y: x.mean() - y.mean())
            level = abs(ends(on_it).mean())
            short = name.partition(": ")[2] or name
            rows[env_id, short] = (*difference, difference[0] / level, len(seeds), len(on_it))
    columns = ["difference", "low", "high", "relative", "seeds", "other seeds"]
    index = pd.MultiIndex.from_tuples(rows, names=["environment", "runs"])
    return pd.DataFrame(rows.values(), index, columns)


def scores_of(runs: list[Record], env_ids: list[str]) -> dict[str, list[np.ndarray]]:
    """By curve with runs on all of the environments: on each of these its scores, (seeds, 1).

    A score is the mean return over the environment's threshold in references.toml, of the evaluation that the
    shortest run on the environment ends with.
    """
    runs, thresholds = [run for run in runs if run.env_id in env_ids], references()["thresholds"]
    by_environment = group(runs, ["env_id"])
    steps = {
        env_id: min(run.mean_returns().index[-1] for run in on_it)
        for (env_id,), on_it in by_environment.items()
    }

    def score(run: Record) -> float:
        env_id = run.env_id
        return run.mean_returns().loc[: 1.01 * steps[env_id]].iloc[-1] / thresholds[env_id]

    found = {}
    for (script,), same in group(runs, ["script"]).items():
        # What differs between environments is tuned to them; what differs on one of them makes another curve.
        names = {name for on_it in group(same, ["env_id"]).values() for name in differing(on_it)}
        for settings, seeds in by_settings(same, sorted(names)).items():
            on_each = group(seeds, ["env_id"])
            if len(on_each) == len(env_ids):
                name = ": ".join(filter(None, [script, settings]))
                found[name] = [np.array([[score(run)] for run in on_it]) for on_it in on_each.values()]
    return found


def profile(*scores: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Of scores (seeds, 1) on each environment: interquartile mean, mean, and the shares above some values.

    Every environment has the same weight, however many its seeds.
    """
    common = math.lcm(*map(len, scores))
    pooled = np.concatenate([np.repeat(values, common // len(values)) for values in scores])
    return np.array([iqm(pooled), mean(pooled), *(pooled > above[:, None]).mean(axis=1)])
