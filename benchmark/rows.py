"""The tables and sentences of a report: rows of cells by the names of their columns."""

import itertools
from functools import partial

import numpy as np
import pandas as pd
from estimates import MEANS, bootstrap, interval, iqm, profile, versus
from records import EPISODES, Record, count, ends
from references import in_words, published
from rliable.metrics import probability_of_improvement
from scripts import ALGOS


def number(value: float, like: float) -> str:
    """With as many decimals as a return like the other one needs."""
    return "-" if np.isnan(value) else f"{value:,.{0 if abs(like) >= 100 else 1 if abs(like) >= 10 else 3}f}"


def duration(hours: list[float]) -> str:
    """The median of times, in a unit that fits."""
    median = np.median(hours) if hours else np.nan
    if np.isnan(median):
        return "-"
    return next(
        f"{median * n:.{d}f} {unit}"
        for n, d, unit in ((1, 1, "h"), (60, 1, "min"), (3600, 0, "s"))
        if median * n >= 1 or unit == "s"
    )


def mean_return(runs: list[Record]) -> str:
    """Mean and standard error over seeds or, of a single one, over the episodes of its last evaluation."""
    means, last = ends(runs), runs[0].evaluations
    episodes = last.loc[last["global_step"] == runs[0].mean_returns().index[-1], "return"]
    show, error = (
        partial(number, like=np.abs(means).max()),
        pd.Series(means if len(runs) > 1 else episodes).sem(),
    )
    return show(means.mean()) + ("" if np.isnan(error) else f" ± {show(error)}")


def last_steps(runs: list[Record]) -> list[int]:
    return [run.mean_returns().index[-1] for run in runs]


def step_range(runs: list[Record]) -> str:
    steps = last_steps(runs)
    return " to ".join(f"{step:,.0f}" for step in sorted({min(steps), max(steps)}))


def time_of(runs: list[Record]) -> str:
    return duration([run.at("hours", [step])[0] for run, step in zip(runs, last_steps(runs), strict=True)])


def final_row(name: str, runs: list[Record], full: bool) -> dict[str, str]:
    """What the runs of a curve end with; full: with time and interquartile mean."""
    means = ends(runs)
    show = partial(number, like=np.abs(means).max())
    episodes = (runs[0].evaluations["global_step"] == last_steps(runs)[0]).sum()
    mode = "greedy" if runs[0].config.get("greedy") else "sampled"
    row = {
        "environment": runs[0].env_id,
        "runs": name,
        "steps": step_range(runs),
        "seeds": f"{len(runs)}",
        "episodes each": f"{episodes} {mode}" if episodes else "100 in training",
        "mean return": mean_return(runs),
        "lowest to highest seed": f"{show(means.min())} to {show(means.max())}",
    }
    if full:
        middle, low, high = (show(x[0]) for x in interval(means[:, None], iqm))
        row["interquartile mean"] = f"{middle} ({low} to {high})" if len(runs) > 1 else ""
        row["time"] = time_of(runs)
    return row


def threshold_row(name: str, runs: list[Record], threshold: float) -> dict[str, str]:
    """How many runs reached a mean return, and when: medians over those that did."""
    means = [(run, run.mean_returns()) for run in runs]
    reached = [(run, m.index[m >= threshold][:1]) for run, m in means if (m >= threshold).any()]
    episodes = np.median([run.at(EPISODES, step) for run, step in reached]) if reached else np.nan
    return {
        "environment": runs[0].env_id,
        "runs": name,
        "mean return": f"{threshold:,g}",
        "reached by": f"{len(reached)} of {count(runs, 'seed')}",
        "after steps": f"{np.median([step[0] for _, step in reached]):,.0f}" if reached else "-",
        "after episodes": "-" if np.isnan(episodes) else f"{episodes:,.0f}",
        "after": duration([run.at("hours", step)[0] for run, step in reached]),
    }


def headline_row(curve: list[Record], name: str, peers: dict[str, list[Record]]) -> dict[str, str]:
    """A curve and the best that is known beside it: published, or of the peers with its algorithm.

    Of references, those that took no more steps count, if there are any.
    """
    steps = max(last_steps(curve))
    known = [(r["value"], r.get("steps", 0), in_words(r)) for r in published(curve)]
    for peer, runs in peers.items():
        if runs[0].env_id == curve[0].env_id and {*runs[0].script.split("_")} & {*curve[0].script.split("_")}:
            words = f"{peer}, run here, {mean_return(runs)} ({count(runs, 'seed')})"
            known.append((ends(runs).mean(), max(last_steps(runs)), words))
    fair = [reference for reference in known if reference[1] <= 1.1 * steps] or known
    return {
        "environment": curve[0].env_id,
        "script": name,
        "steps": step_range(curve),
        "seeds": f"{len(curve)}",
        "return": mean_return(curve),
        "best reference": max(fair)[2] if fair else "",
        "time": time_of(curve),
    }


def difference_rows(differences: pd.DataFrame) -> list[dict[str, str]]:
    """How far curves end from others, the worst first."""
    return [
        {
            "environment": env_id,
            "runs": name,
            "difference (95% interval)": f"{row.difference:+,.0f} ({row.low:+,.0f} to {row.high:+,.0f})",
            "relative": f"{row.relative:+.0%}",
            "seeds": f"{row.seeds:.0f} and {row['other seeds']:.0f}",
        }
        for (env_id, name), row in differences.sort_values(["environment", "relative"]).iterrows()
    ]


def aggregate_rows(scores: dict[str, list[np.ndarray]], env_ids: list[str]) -> list[dict[str, str]]:
    """The means over several environments."""
    rows = []
    for name, curve in scores.items():
        means = zip(*bootstrap(curve, partial(profile, above=np.empty(0))), strict=True)
        row = {
            "environments": ", ".join(env_ids),
            "runs": name,
            "seeds": ", ".join(str(len(x)) for x in curve),
        }
        row |= {
            f"score, {mean}": "{:.2f} ({:.2f} to {:.2f})".format(*m)
            for mean, m in zip(MEANS, means, strict=True)
        }
        rows.append(row)
    return rows


def sweep_line(name: str, curve: pd.DataFrame, env_id: str, setting: str) -> str:
    """The best value, and the others that the data do not tell from it."""
    best = curve["mean"].idxmax()
    value, low, high = (
        number(x, curve["mean"].abs().max()) for x in curve.loc[best, ["mean", "low", "high"]]
    )
    near = [f"{other:g}" for other in curve.index[curve["high"] >= curve["low"][best]] if other != best]
    where, others = ", ".join(filter(None, [env_id, name])), f"those of {', '.join(near)}"
    if len(curve) == 1:
        return f"- {where}: with `{setting}` **{best:g}** {value} ({low} to {high})."
    return (
        f"- {where}: of {len(curve)} values of `{setting}` the best is **{best:g}**, with {value} "
        f"({low} to {high}). Its interval overlaps {others if near else 'no other'}."
    )


def published_line(runs: list[Record], env_id: str) -> list[str]:
    """The references for an environment in words, if there are any."""
    words = [in_words(reference) for reference in published(runs)]
    return [f"- {env_id}, published: {'; '.join(words)}."] if words else []


def improvement_lines(named: dict[str, list[Record]], env_id: str) -> list[str]:
    """How probable it is that a run of somebody's own script ends above one of a script of algos/."""
    ours, lines = {path.stem for path in ALGOS.glob("*.py")}, []
    for (name, runs), (other, references) in itertools.permutations(named.items(), 2):
        scripts = [seeds[0].script for seeds in (runs, references)]
        if scripts[1] in ours and scripts[0] not in ours and not scripts[0].startswith("sb3_"):
            estimate, low, high = versus(runs, references, probability_of_improvement)
            seeds = " and ".join(count(x, "seed") for x in (runs, references))
            lines.append(
                f"- {env_id}: a run of {name} ends above one of {other} with probability "
                f"**{estimate:.2f}** ({low:.2f} to {high:.2f}); {seeds}."
            )
    return lines
