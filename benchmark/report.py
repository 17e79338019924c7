"""Figures and a Markdown page of finished runs.

    python benchmark/report.py benchmark/results --out benchmark/results    # this repository's page
    python benchmark/report.py runs/A runs/B --out report                   # any runs, CleanRL's too
    python benchmark/report.py benchmark/results/ppo --table                # the final returns, printed

It writes README.md and figures/, and the same in one file, report.html. What benchmark/grids/NAME.md says
of a grid goes under its figures.

RUNS are folders at or below which there are runs: the results of a grid as run.py keeps them (runs.jsonl,
evaluations.csv.gz, progress.csv.gz), run folders (config.json, evaluations.csv, TensorBoard events), or
events alone in a folder that CleanRL named, <env id>__<exp name>__<seed>__<unix time>. The runs of a grid, or
in one folder, make a section of the page, those on one environment a figure, those of one script with the
same settings, whatever their seed, a curve. Where one numeric setting has three values or more, the figure
shows what the runs end with against it. A grid whose file says `beside = ["ppo"]` has the curves of that
other grid in its figures too, over steps and over hours. One that says `differences_from = "ppo"` has a
figure of how far its runs end from those of that grid. One that says `aggregate = ["HalfCheetah-v4", ...]`
has a figure of what the curves with runs on all of these environments end with, over all of them together.

A run ends with its last evaluation, or without any with its last 100 episodes of training. references.toml
has the published returns that stand beside it.
"""

import base64
import contextlib
import io
import itertools
import json
import math
import re
import shlex
import sys
import textwrap
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import markdown
import matplotlib
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter
from rliable.library import get_interval_estimates
from rliable.metrics import probability_of_improvement
from scipy.stats import trim_mean

BENCHMARK = Path(__file__).resolve().parent
TAGS = ("charts/episodes", "charts/episodic_return", "charts/return_mean_100", "charts/SPS")
EPISODES, RETURN, RECENT, SPS = TAGS
AXES = {
    "steps": ("global_step", "environment steps"),
    "episodes": (EPISODES, "episodes of training"),
    "hours": ("hours", "hours of training, without evaluations"),
}
VERSIONS = ("python", "gymnasium", "mujoco", "ale-py", "numpy", "torch", "stable-baselines3")
# What config.json holds beside the settings that make one curve another.
NOT_SETTINGS = {"script", "env_id", "seed", "run_dir", "resume", "evaluate", "device", "torch_threads"}
NOT_SETTINGS |= {"eval_interval", "eval_episodes", "checkpoint_interval", "capture_video", "track"}
NOT_SETTINGS |= {"wandb_project", "wandb_entity", "git_commit", "cpu", "gpu", *VERSIONS}

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
LINES = ("-", "--", ":", "-.")  # of the first seven curves, the next seven, ...
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "grid.alpha": 0.3, "lines.linewidth": 1.4, "legend.frameon": False}
HEAD = """# Results

A section is a grid of runs, a figure one of its environments. Training: the returns of the episodes trained
on, averaged in 50 bins; the band is the standard error over seeds. Evaluation: episodes in environments of
their own; the band is the standard error over all episodes of all seeds or, about the interquartile mean of
the seeds' means, the 95% bootstrap interval over seeds (by rliable); a run that --stop-at-return ended stays
at its last one, while curves of training end with the first run that does. Dotted: published. In the tables,
mean and standard error are over seeds or, of a single one, over its episodes, and the time is that of
training, without evaluations; steps and time to a return are medians over the seeds that reached it. All of
it made by"""


@dataclass
class Args:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """run folders, or folders that hold some"""
    out: Path = Path("report")
    """folder that README.md, figures/ and report.html are written to"""
    table: bool = False
    """only print the table of what the runs end with"""
    x: Literal["auto", "steps", "episodes", "hours"] = "auto"
    """horizontal axis of learning curves (auto: episodes where --total-episodes limits a run, else steps)"""
    threshold: float | None = None
    """mean return to tell the time to (default: that of the environment in references.toml)"""


@dataclass
class Run:
    folder: Path
    config: dict
    evaluations: pd.DataFrame  # global_step, return: a row for each episode
    progress: pd.DataFrame  # global_step, hours and those of TAGS that were logged, with gaps

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


def error(message: str) -> NoReturn:
    """Refuse bad input: one line on standard error, exit status 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def read_runs(paths: list[Path], out: Path) -> list[Run]:
    """The runs at or below the paths, each once."""
    found = {}
    for path in paths:
        grids = {file.parent for file in path.rglob("runs.jsonl")}
        files = [*path.rglob("config.json"), *path.rglob("events.out.tfevents*")]
        # A shell's RESULTS/*/ has the figures of the last report among the grids.
        if not (files or grids) and path.resolve() != (out / "figures").resolve():
            error(f"there is no run in {path}")
        for run in itertools.chain(map(read_run, {file.parent for file in files}), *map(read_results, grids)):
            found[run.folder.resolve()] = run
    return [found[folder] for folder in sorted(found)]


def read_results(grid: Path) -> list[Run]:
    """The runs of a grid, as run.py keeps them; each has the folder that it would have of its own."""
    try:
        lines = map(json.loads, (grid / "runs.jsonl").read_text().splitlines())
        configs = {config.pop("run"): config for config in lines}
        evaluations, progress = (
            dict(list(pd.read_csv(grid / f"{name}.csv.gz").groupby("run")))
            for name in ("evaluations", "progress")
        )
        return [
            make_run(grid / name, config, evaluations.get(name), progress.get(name))
            for name, config in configs.items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as exception:
        error(f"cannot read the results in {grid}: {type(exception).__name__}: {exception}")


def make_run(
    folder: Path,
    config: dict,
    evaluations: pd.DataFrame | None,
    progress: pd.DataFrame | None,
    own: bool = True,
) -> Run:
    """A run from its tables. own: its speed is that since the row before; CleanRL's is since the start."""
    config.setdefault("script", script_of(folder, config["env_id"]))
    none = pd.DataFrame(columns=["global_step", "return"])
    evaluations = (none if evaluations is None else evaluations)[["global_step", "return"]].astype(float)
    progress = none[["global_step"]] if progress is None else progress.drop(columns="run", errors="ignore")
    progress = progress.astype({"global_step": float}).reset_index(drop=True)
    if len(progress):  # a column of a grid that no row of this run fills
        progress = progress.dropna(axis="columns", how="all")
    if SPS in progress:
        steps, speed = progress["global_step"], progress[SPS].bfill().ffill()
        progress["hours"] = (steps.diff().fillna(steps) / speed).cumsum() if own else steps / speed
        progress["hours"] /= 3600
    if evaluations.empty and RETURN not in progress:
        error(f"{folder} holds neither an evaluation nor a return in training")
    return Run(folder, config, evaluations, progress)


def read_events(folder: Path) -> pd.DataFrame:
    """The scalars of a folder's TensorBoard events, those of one step averaged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    columns = {
        tag: pd.DataFrame(events.Scalars(tag)).groupby("step")["value"].mean()
        for tag in TAGS
        if tag in events.Tags()["scalars"]
    }
    return pd.DataFrame(columns).rename_axis("global_step").reset_index()


def read_run(folder: Path) -> Run:
    """A run folder of a script, of peers.py or of CleanRL."""
    names, evaluations, progress = folder.resolve().name.split("__"), None, None
    try:
        if own := (folder / "config.json").exists():
            config = json.loads((folder / "config.json").read_text())
        elif len(names) == 4:
            config = {"env_id": names[0], "script": names[1], "seed": int(names[2])}
        else:
            error(f"{folder} has no config.json, nor a name like <env id>__<exp name>__<seed>__<unix time>")
        if (folder / "evaluations.csv").exists():
            evaluations = pd.read_csv(folder / "evaluations.csv")
        if (folder / "progress.csv").exists():
            progress = pd.read_csv(folder / "progress.csv")
        elif any(folder.glob("events.out.tfevents*")):
            progress = read_events(folder)
        return make_run(folder, config, evaluations, progress, own)
    except (OSError, ValueError, KeyError, TypeError) as exception:
        error(f"cannot read the run {folder}: {type(exception).__name__}: {exception}")


def grid_of(folder: Path, env_id: str) -> Path:
    """The folder of the grid of a run: the first above it that is not named for the environment."""
    return folder.parent.parent if folder.resolve().parent.name == env_id else folder.parent


def script_of(folder: Path, env_id: str) -> str:
    """The script that a run folder is named for, or else its grid: for a config.json that does not tell."""
    names = folder.resolve().name.split("__")
    named = [name for name in names if name != env_id.replace("/", "-") and not name.startswith("seed")]
    return named[0] if len(names) > 1 and named else grid_of(folder, env_id).resolve().name


def group(runs: list[Run], names: list[str]) -> dict[tuple, list[Run]]:
    """Runs by their values of settings, in order of these."""
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(run.config.get(name) for name in names)].append(run)
    return dict(sorted(groups.items(), key=lambda item: [(str(type(value)), value) for value in item[0]]))


def differing(runs: list[Run]) -> list[str]:
    """The settings that are not the same in all runs of a script that have them; a newer script has more."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in NOT_SETTINGS)
    values = {name: {repr(run.config[name]) for run in runs if name in run.config} for name in names}
    return [name for name in names if len(values[name]) > 1]


def by_settings(runs: list[Run], names: list[str]) -> dict[str, list[Run]]:
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


def curves(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs on one environment by script and settings; a name says what the curves do not share."""
    scripts = group(runs, ["script"])
    return {
        ": ".join(filter(None, [script if len(scripts) > 1 or not settings else "", settings])): seeds
        for (script,), same in scripts.items()
        for settings, seeds in by_settings(same, differing(same)).items()
    }


def swept_setting(runs: list[Run]) -> str | None:
    """The one numeric setting with three values or more, if runs of one script have just one such."""
    values = {name: {run.config.get(name) for run in runs} for name in differing(runs)}
    swept = [n for n, vs in values.items() if len(vs) > 2 and all(type(v) in (int, float) for v in vs)]
    return swept[0] if len(swept) == 1 else None


def bootstrap(scores: np.ndarray | list[np.ndarray], statistic: Callable) -> tuple[np.ndarray, ...]:
    """A statistic, (n,), of scores (seeds, tasks) or of several independent ones; and its 95% interval."""
    np.random.seed(0)  # noqa: NPY002 - rliable 1.2 draws from here, whatever random_state it is given
    estimate, bounds = get_interval_estimates({"": scores}, statistic, reps=2000)
    return estimate[""], *bounds[""]


def interval(scores: np.ndarray, statistic: Callable) -> tuple[np.ndarray, ...]:
    """A statistic over seeds of scores (seeds, points), and its 95% bootstrap interval; each (points,)."""
    return bootstrap(scores[:, None], lambda sample: statistic(sample)[0])


MEANS = ("interquartile mean", "mean")
mean = partial(np.mean, axis=0)
iqm = partial(trim_mean, proportiontocut=0.25, axis=0)


def stderr(values: np.ndarray) -> float:
    """Standard error of the mean; NaN for a single value."""
    return np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan


def evaluation_curve(runs: list[Run], axis: str) -> pd.DataFrame:
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
    columns = {"mean": [e.mean() for e in episodes], "stderr": [stderr(e) for e in episodes]}
    if rows:
        bounds = interval(np.array([[returns.mean() for returns in row] for row in rows]).T, iqm)
        columns |= dict(zip(("iqm", "low", "high"), bounds, strict=True))
    return pd.DataFrame(columns, index=grid)


def training_curve(runs: list[Run], axis: str, bins: int = 50) -> pd.DataFrame:
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


def sweep_curve(runs: list[Run], setting: str) -> pd.DataFrame:
    """What runs end with by a setting: mean over seeds, its 95% interval low to high, and number of seeds."""
    rows = {}
    for (value,), seeds in group(runs, [setting]).items():
        ends = np.array([[run.mean_returns().iloc[-1]] for run in seeds])
        rows[value] = (*(x[0] for x in interval(ends, mean)), len(seeds))
    return pd.DataFrame.from_dict(rows, "index", columns=["mean", "low", "high", "seeds"])


@cache
def references() -> dict:
    return tomllib.loads((BENCHMARK / "references.toml").read_text())


def published(runs: list[Run]) -> list[dict]:
    """The references for the environment, algorithm and settings of any of the runs, lowest first."""

    def matches(known: dict, config: dict) -> bool:
        same = known["env_id"] == config["env_id"] and known["algorithm"] in config["script"].split("_")
        return same and all(str(config.get(k)) in values for k, values in known.get("settings", {}).items())

    known = [r for r in references()["reference"] if any(matches(r, run.config) for run in runs)]
    return sorted(known, key=lambda reference: reference["value"])


def published_line(runs: list[Run], env_id: str) -> list[str]:
    """The references for an environment in words, if there are any."""
    words = [
        f"{r['source']} {r['value']:,}"
        + (f" ± {r['spread']:,}" if "spread" in r else "")
        + (f" ({EngFormatter(sep='')(r['steps'])} steps)" if "steps" in r else "")
        for r in published(runs)
    ]
    return [f"- {env_id}, published: {'; '.join(words)}."] if words else []


def draw_references(ax: Axes, runs: list[Run]) -> None:
    """Published returns, each with a pattern of its own. Their names are in the legend, clear of curves."""
    patterns, known = ((1, 1), (4, 2), (1, 3), (6, 2, 1, 2)), published(runs)
    for reference, pattern in zip(known, itertools.cycle(patterns), strict=False):
        label = f"{reference['source']}: {reference['value']:,}"
        ax.axhline(reference["value"], color="0.3", lw=0.9, ls=(0, pattern), label=label)


def render(figure: Figure, title: str, footer: str) -> bytes:
    """The figure as PNG, with its legend, and the runs and commands behind it below."""
    legends = [ax.get_legend_handles_labels() for ax in figure.axes]
    lines = {
        label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)
    }
    columns = max(1, 150 // (max(map(len, lines)) + 10))
    style = {"alignment": "left", "title_fontproperties": {"weight": "bold"}}
    figure.legend(lines.values(), lines, loc="outside upper left", ncols=columns, title=title, **style)
    figure.supxlabel(footer, x=0.005, ha="left", fontsize=6.5, color="0.3")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def learning_figure(named: dict[str, list[Run]], axis: str, footer: str) -> bytes:
    """The curves of one environment: of training, of evaluations, and of these by the interquartile mean."""
    runs = [run for seeds in named.values() for run in seeds]
    if axis == "auto":
        limited = any("total_episodes" in run.config for run in runs)
        axis = "episodes" if limited and all(EPISODES in run.progress for run in runs) else "steps"
    column, label = AXES[axis]
    by = "steps" if axis == "hours" else axis
    told = {n: s for n, s in named.items() if all(column in run.progress for run in s) or axis == "steps"}
    training = {n: training_curve(s, by) for n, s in told.items() if all(RETURN in r.progress for r in s)}
    evaluated = {
        n: evaluation_curve(s, by) for n, s in told.items() if not any(r.evaluations.empty for r in s)
    }
    if axis == "hours":  # the median run's at each step: machines, and what else ran there, differ
        for name, curve in (*training.items(), *evaluated.items()):
            steps = curve.index.to_numpy()
            curve.index = np.median([run.at("hours", steps) for run in named[name]], axis=0)
    modes = {"greedy " if run.config.get("greedy") else "sampled " for run in runs}
    mode = modes.pop() if len(modes) == 1 else ""
    panels = [
        ("training\nmean ± standard error over seeds", training, "mean"),
        (f"{mode}evaluation\nmean ± standard error over all episodes", evaluated, "mean"),
        (f"{mode}evaluation\ninterquartile mean, 95% interval over seeds", evaluated, "iqm"),
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        error(f"{runs[0].folder} and the runs beside it do not tell of {column}, which --x {axis} needs")

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (title, drawn, centre) in zip(axes, panels, strict=True):
        for i, (name, curve) in enumerate((name, drawn.get(name)) for name in named):
            if curve is not None:
                line = {"color": COLOURS[i % 7], "ls": LINES[i // 7 % 4]}
                error_band = curve["mean"] - curve["stderr"], curve["mean"] + curve["stderr"]
                low, high = error_band if centre == "mean" else (curve["low"], curve["high"])
                one = {"marker": "o", "ms": 4} if len(curve) == 1 else {}  # no line shows a single evaluation
                ax.plot(
                    curve.index, curve[centre], label=f"{name}, {count(named[name], 'seed')}", **line, **one
                )
                ax.fill_between(curve.index, low, high, color=line["color"], alpha=0.2, lw=0)
        draw_references(ax, runs)
        ax.set_title(title)
        ax.set_xlabel(label)
        if axis == "hours":  # of one algorithm minutes, of another hours
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        else:
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].margins(y=0.1)
    axes[0].set_ylabel("return")
    axes[0].yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return render(figure, runs[0].config["env_id"], footer)


def sweep_figure(lines: dict[str, pd.DataFrame], runs: list[Run], setting: str, footer: str) -> bytes:
    """What runs end with against a setting, the best value marked; with a 0 among them, values lie evenly."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    values = sorted({value for curve in lines.values() for value in curve.index})
    place = float if values[0] > 0 else values.index
    for i, (name, curve) in enumerate(lines.items()):
        label = ", ".join(filter(None, [name, f"{curve['seeds'].min()} seeds for each value"]))
        x = [place(value) for value in curve.index]
        ax.plot(x, curve["mean"], marker="o", ms=3, color=COLOURS[i % 7], label=label)
        ax.fill_between(x, curve["low"], curve["high"], color=COLOURS[i % 7], alpha=0.2, lw=0)
        best = curve["mean"].idxmax()
        star = {"marker": "*", "ms": 11, "ls": "", "label": f"best: {best:g}"}
        ax.plot(place(best), curve["mean"][best], color=COLOURS[i % 7], **star)
    draw_references(ax, runs)
    if place is float:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        ax.set_xticks(range(len(values)), [f"{value:,g}" for value in values])
    ax.margins(y=0.15)
    ax.set(xlabel=setting.replace("_", " "), ylabel="final return", title="mean and 95% interval over seeds")
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return render(figure, runs[0].config["env_id"], footer)


def aggregate_figure(scores: dict[str, list[np.ndarray]], env_ids: list[str], footer: str) -> bytes:
    """Over several environments: means with 95% intervals, and how many of the runs end above each score."""
    label = "score: final return / the environment's threshold"
    above = np.linspace(0, max(values.max() for curve in scores.values() for values in curve), 101)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for i, (name, curve) in enumerate(scores.items()):
        style = {"color": COLOURS[i % 7], "label": f"{name}, {sum(map(len, curve))} runs"}
        middle, low, high = bootstrap(curve, partial(profile, above=above))
        errors = (middle[:2] - low[:2], high[:2] - middle[:2])
        left.errorbar(middle[:2], np.arange(2) + 0.15 * i, xerr=errors, fmt="o", ms=4, **style)
        right.plot(above, middle[2:], **style)
        right.fill_between(above, low[2:], high[2:], color=style["color"], alpha=0.2, lw=0)
    left.set(title="means, 95% interval over seeds", xlabel=label, ylim=(1.5, -0.5))
    left.set_yticks([0, 1], MEANS)
    right.set(
        title="performance profile, 95% interval over seeds", xlabel=label, ylabel="share of runs above"
    )
    return render(figure, ", ".join(env_ids), footer)


def difference_figure(differences: pd.DataFrame, origin: str, footer: str) -> bytes:
    """By environment, how far each curve ends from the runs of another grid; the worst on average on top."""
    order = differences["relative"].groupby("runs").mean().sort_values(ascending=False).index
    figure = Figure(figsize=(9, 1.4 + 0.25 * len(order)), layout="constrained")
    panels = differences.groupby("environment")
    seeds, others = (differences[column].min() for column in ("seeds", "other seeds"))
    label = f"{seeds} seeds of each change, {others} of {origin}: difference with its 95% interval"
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (env_id, drawn) in zip(axes, panels, strict=True):
        drawn = drawn.droplevel("environment").reindex(order)
        errors = drawn["difference"] - drawn["low"], drawn["high"] - drawn["difference"]
        ax.errorbar(drawn["difference"], order, xerr=errors, fmt="o", ms=4, color=COLOURS[0], label=label)
        ax.axvline(0, color="0.3", lw=0.9)
        ax.set(title=env_id, xlabel="difference in final return")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return render(figure, "", footer)


def count(things: list, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


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


def table(rows: list[dict[str, str]]) -> list[str]:
    """A table, without the columns in which nothing stands."""
    columns = [name for name in rows[0] if any(row[name] not in ("", "-") for row in rows)]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"] + [
        f"| {' | '.join(row[name] for name in columns)} |" for row in rows
    ]


def final_row(name: str, runs: list[Run], full: bool) -> dict[str, str]:
    """What the runs of a curve end with; full: with time and interquartile mean."""
    finals = [run.mean_returns() for run in runs]
    steps, means = ([f.index[-1] for f in finals], np.array([f.iloc[-1] for f in finals]))
    show = partial(number, like=np.abs(means).max())
    episodes = runs[0].evaluations.loc[runs[0].evaluations["global_step"] == steps[0], "return"]
    error_of_mean = stderr(means if len(runs) > 1 else episodes)
    mode = "greedy" if runs[0].config.get("greedy") else "sampled"
    row = {
        "environment": runs[0].config["env_id"],
        "runs": name,
        "steps": " to ".join(f"{step:,.0f}" for step in sorted({min(steps), max(steps)})),
        "seeds": f"{len(runs)}",
        "episodes each": f"{len(episodes)} {mode}" if len(episodes) else "100 in training",
        "mean return": show(means.mean()) + ("" if np.isnan(error_of_mean) else f" ± {show(error_of_mean)}"),
        "lowest to highest seed": f"{show(means.min())} to {show(means.max())}",
    }
    if full:
        middle, low, high = (show(x[0]) for x in interval(means[:, None], iqm))
        row["interquartile mean"] = f"{middle} ({low} to {high})" if len(runs) > 1 else ""
        row["time"] = duration([run.at("hours", [step])[0] for run, step in zip(runs, steps, strict=True)])
    return row


def threshold_row(name: str, runs: list[Run], threshold: float) -> dict[str, str]:
    """How many runs reached a mean return, and when: medians over those that did."""
    means = [(run, run.mean_returns()) for run in runs]
    reached = [(run, m.index[m >= threshold][:1]) for run, m in means if (m >= threshold).any()]
    episodes = np.median([run.at(EPISODES, step) for run, step in reached]) if reached else np.nan
    return {
        "environment": runs[0].config["env_id"],
        "runs": name,
        "mean return": f"{threshold:,g}",
        "reached by": f"{len(reached)} of {count(runs, 'seed')}",
        "after steps": f"{np.median([step[0] for _, step in reached]):,.0f}" if reached else "-",
        "after episodes": "-" if np.isnan(episodes) else f"{episodes:,.0f}",
        "after": duration([run.at("hours", step)[0] for run, step in reached]),
    }


def sweep_line(name: str, curve: pd.DataFrame, env_id: str, setting: str) -> str:
    """The best value, and the others that the data do not tell from it."""
    best = curve["mean"].idxmax()
    value, low, high = (
        number(x, curve["mean"].abs().max()) for x in curve.loc[best, ["mean", "low", "high"]]
    )
    near = [f"{other:g}" for other in curve.index[curve["high"] >= curve["low"][best]] if other != best]
    where, others = ", ".join(filter(None, [env_id, name])), f"those of {', '.join(near)}"
    return (
        f"- {where}: of {len(curve)} values of `{setting}` the best is **{best:g}**, with {value} "
        f"({low} to {high}). Its interval overlaps {others if near else 'no other'}."
    )


def versus(runs: list[Run], others: list[Run], statistic: Callable) -> list[float]:
    """A statistic of what runs and others end with, each (seeds, 1), and its 95% bootstrap interval."""
    ends = [np.array([[run.mean_returns().iloc[-1]] for run in seeds]) for seeds in (runs, others)]
    return [x[0] for x in bootstrap(ends, lambda x, y: np.array([statistic(x, y)]))]


def differences_of(runs: list[Run], others: list[Run]) -> pd.DataFrame:
    """How far the mean final return of each curve lies from that of others, by environment and curve."""
    rows = {}
    for (env_id,), same in group(runs, ["env_id"]).items():
        scripts = {run.config["script"] for run in runs}
        on_it = [r for r in others if r.config["env_id"] == env_id and r.config["script"] in scripts]
        for name, seeds in curves(same).items() if on_it else ():
            difference = versus(seeds, on_it, lambda x, y: x.mean() - y.mean())
            level = abs(np.mean([run.mean_returns().iloc[-1] for run in on_it]))
            short = name.partition(": ")[2] or name
            rows[env_id, short] = (*difference, difference[0] / level, len(seeds), len(on_it))
    columns = ["difference", "low", "high", "relative", "seeds", "other seeds"]
    index = pd.MultiIndex.from_tuples(rows, names=["environment", "runs"])
    return pd.DataFrame(rows.values(), index, columns)


def difference_table(differences: pd.DataFrame) -> list[str]:
    """The same as a table, the worst first."""
    rows = [
        {
            "environment": env_id,
            "runs": name,
            "difference (95% interval)": f"{row.difference:+,.0f} ({row.low:+,.0f} to {row.high:+,.0f})",
            "relative": f"{row.relative:+.0%}",
            "seeds": f"{row.seeds:.0f} and {row['other seeds']:.0f}",
        }
        for (env_id, name), row in differences.sort_values(["environment", "relative"]).iterrows()
    ]
    return table(rows)


def scores_of(runs: list[Run], env_ids: list[str]) -> dict[str, list[np.ndarray]]:
    """By curve with runs on all of the environments: on each of these its scores, (seeds, 1).

    A score is the mean return over the environment's threshold in references.toml, of the evaluation that the
    shortest run on the environment ends with.
    """
    runs, thresholds = [run for run in runs if run.config["env_id"] in env_ids], references()["thresholds"]
    by_environment = group(runs, ["env_id"])
    steps = {
        env_id: min(run.mean_returns().index[-1] for run in on_it)
        for (env_id,), on_it in by_environment.items()
    }

    def score(run: Run) -> float:
        env_id = run.config["env_id"]
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


def aggregate_table(scores: dict[str, list[np.ndarray]], env_ids: list[str]) -> list[str]:
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
    return table(rows)


def improvement_lines(named: dict[str, list[Run]], env_id: str) -> list[str]:
    """How probable it is that a run of somebody's own script ends above one of a script of algos/."""
    ours = {path.stem for path in BENCHMARK.parent.glob("algos/*.py")}
    lines = []
    for (name, runs), (other, references) in itertools.permutations(named.items(), 2):
        scripts = [seeds[0].config["script"] for seeds in (runs, references)]
        if scripts[1] in ours and scripts[0] not in ours and not scripts[0].startswith("sb3_"):
            estimate, low, high = versus(runs, references, probability_of_improvement)
            seeds = " and ".join(count(x, "seed") for x in (runs, references))
            lines.append(
                f"- {env_id}: a run of {name} ends above one of {other} with probability "
                f"**{estimate:.2f}** ({low:.2f} to {high:.2f}); {seeds}."
            )
    return lines


def section(grid: str, grids: dict[str, list[Run]], args: Args) -> tuple[list[str], dict[str, bytes]]:
    """The Markdown lines on one of the grids, and its figures by file name."""
    runs, toml = grids[grid], BENCHMARK / "grids" / f"{grid}.toml"
    text = toml.read_text().splitlines() if toml.exists() else []
    settings = tomllib.loads("\n".join(text))
    beside, origin = settings.get("beside", []), settings.get("differences_from")
    aggregated = sorted(settings.get("aggregate", []))
    others = [run for name in beside for run in grids.get(name, [])]
    introduction = [
        line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), text)
    ]
    folders = ", ".join(sorted({str(grid_of(run.folder, run.config["env_id"])) for run in runs}))
    made = f", by python benchmark/run.py benchmark/grids/{grid}.toml" if text else ""
    with_them = "".join(f"; those of {name} beside" for name in [*beside, *filter(None, [origin])])
    figures, sweeps, finals, times, improvements, citations = {}, [], [], [], [], []
    differences = differences_of(runs, grids.get(origin, []))
    for (env_id,), same in group(runs, ["env_id"]).items():
        seeds = group(same, ["seed"])
        source = f"runs: {len(same)} in {folders}, {count(seeds, 'seed')}{made}{with_them}"
        footer = "\n".join(textwrap.shorten(line, 190) for line in (source, f"figure: {command(args)}"))
        slug = re.sub(r"[^\w.-]+", "-", f"{grid}-{env_id}")
        if env_id in differences.index.get_level_values("environment"):
            finals += [final_row(name, seeds, full=True) for name, seeds in curves(same).items()]
            continue
        learning = []
        for (script,), of_script in group(same, ["script"]).items():
            setting = swept_setting(of_script)
            if setting is None:
                learning += of_script
                continue
            told_by = [name for name in differing(of_script) if name != setting]
            lines = {
                name: sweep_curve(line, setting) for name, line in by_settings(of_script, told_by).items()
            }
            figures[f"{slug}-{script}-{setting}.png"] = sweep_figure(lines, of_script, setting, footer)
            sweeps += [sweep_line(name, curve, env_id, setting) for name, curve in lines.items()]
        if learning:
            named = curves(learning)
            near = [run for run in others if run.config["env_id"] == env_id]
            drawn = curves([*learning, *near])
            figures[f"{slug}.png"] = learning_figure(drawn, args.x, footer)
            if near:
                figures[f"{slug}-hours.png"] = learning_figure(drawn, "hours", footer)
            finals += [final_row(name, seeds, full=True) for name, seeds in named.items()]
            improvements += improvement_lines(named, env_id)
            citations += published_line(learning, env_id)
            threshold = references()["thresholds"].get(env_id) if args.threshold is None else args.threshold
            if threshold is not None:
                times += [threshold_row(name, seeds, threshold) for name, seeds in named.items()]
    source = f"runs: {len(runs)} in {folders}{made}{with_them}"
    footer = "\n".join(textwrap.shorten(line, 190) for line in (source, f"figure: {command(args)}"))
    if len(differences):
        figures[f"{grid}.png"] = difference_figure(differences, origin, footer)
    scores = scores_of([*runs, *others], aggregated)
    if len(scores) > 1:
        figures[f"{grid}.png"] = aggregate_figure(scores, aggregated, footer)
    facts = []
    for name in ("git_commit", "cpu", "gpu", *VERSIONS):
        values = sorted(
            {
                str(run.config[name])[: 7 if name == "git_commit" else None]
                for run in runs
                if run.config.get(name)
            }
        )
        facts += [f"{name.removeprefix('git_')} {', '.join(values)}"] if values else []
    analysis = toml.with_suffix(".md")
    parts = [introduction, *([f"![{Path(name).stem}](figures/{name})"] for name in figures)]
    parts += [analysis.read_text().splitlines() if analysis.exists() else []]
    parts += [difference_table(differences) if len(differences) else []]
    parts += [aggregate_table(scores, aggregated) if len(scores) > 1 else []]
    parts += [sweeps, improvements, table(finals) if finals else [], citations]
    parts += [table(times) if times else []]
    parts += [["; ".join([f"{count(runs, 'run')} in {folders}{made}", *facts])]]
    return [f"## {grid}", "", *(line for part in parts if part for line in [*part, ""])], figures


def html(page: str, figures: dict[str, bytes]) -> str:
    """The page for a browser, its figures inside."""
    body = markdown.markdown(page, extensions=["fenced_code", "tables"])
    for name, png in figures.items():
        body = body.replace(f"figures/{name}", f"data:image/png;base64,{base64.b64encode(png).decode()}")
    style = "body { max-width: 70em; margin: auto; font: 15px/1.5 sans-serif } img { max-width: 100% }"
    style += " td, th { padding: 0.2em 0.8em; text-align: left; border-bottom: 1px solid #ddd }"
    head = f'<meta charset="utf-8"><title>Results</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def command(args: Args) -> str:
    """The command that makes this report."""
    options = ["--out", str(args.out)] + ([] if args.x == "auto" else ["--x", args.x])
    options += [] if args.threshold is None else ["--threshold", f"{args.threshold:g}"]
    return shlex.join(["python", "benchmark/report.py", *map(str, args.runs), *options])


def main(args: Args) -> None:
    runs = read_runs(args.runs, args.out)
    if args.table:
        named = [curves(same) for same in group(runs, ["env_id"]).values()]
        told_apart = any(len(on_one) > 1 for on_one in named)
        rows = [
            final_row(name if told_apart else "", seeds, full=False)
            for on_one in named
            for name, seeds in on_one.items()
        ]
        print("\n".join(table(rows)))
        return
    matplotlib.rcParams.update(STYLE)
    grids = defaultdict(list)
    for run in runs:
        grids[grid_of(run.folder, run.config["env_id"]).resolve().name].append(run)
    page, figures = [HEAD, "", "```sh", command(args), "```", ""], {}
    for grid in sorted(grids):
        lines, drawn = section(grid, grids, args)
        page, figures = page + lines, figures | drawn
    try:
        (args.out / "figures").mkdir(parents=True, exist_ok=True)
        for name, png in figures.items():
            (args.out / "figures" / name).write_bytes(png)
        (args.out / "README.md").write_text("\n".join(page))
        (args.out / "report.html").write_text(html("\n".join(page), figures))
    except OSError as exception:
        error(f"cannot write to {args.out}: {exception}")
    print(f"{args.out / 'README.md'}: {count(runs, 'run')}, {count(figures, 'figure')}")


def parse_args() -> Args:
    """The command line as Args. What tyro has to say of a bad one it puts in a box; here it is one line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(Args, description=__doc__)
    except SystemExit as stopped:
        if stopped.code:
            error(re.sub(r"[^ -~]+", " ", output.getvalue()))
        raise


if __name__ == "__main__":
    main(parse_args())
