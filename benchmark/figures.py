"""The figures of a report, as PNG."""

import io
import itertools
import math
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
from cli import error
from estimates import MEANS, bootstrap, evaluation_curve, profile, training_curve
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter
from records import AXES, EPISODES, RETURN, Record, count
from references import published

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
LINES = ("-", "--", ":", "-.")  # of the first seven curves, the next seven, ...
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "grid.alpha": 0.3, "lines.linewidth": 1.4, "legend.frameon": False}
matplotlib.rcParams.update(STYLE)


def draw_references(ax: Axes, runs: list[Record]) -> None:
    """Published returns, each with a pattern of its own. Their names are in the legend, clear of curves."""
    known = [reference for reference in published(runs) if reference.get("drawn", True)]
    patterns = (1, 1), (4, 2), (1, 3), (6, 2, 1, 2), (9, 3), (3, 1, 1, 1), (6, 1), (9, 2, 1, 2, 1, 2)
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
    rows = math.ceil(len(lines) / columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, rows - 4))  # beside a long legend
    style = {"alignment": "left", "title_fontproperties": {"weight": "bold"}}
    figure.legend(lines.values(), lines, loc="outside upper left", ncols=columns, title=title, **style)
    figure.supxlabel(footer, x=0.005, ha="left", fontsize=6.5, color="0.3")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def learning_figure(named: dict[str, list[Record]], axis: str, footer: str) -> bytes:
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
    return render(figure, runs[0].env_id, footer)


def sweep_figure(lines: dict[str, pd.DataFrame], runs: list[Record], setting: str, footer: str) -> bytes:
    """What runs end with against a setting, the best value marked; with a 0 among them, values lie evenly."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    values = sorted({value for curve in lines.values() for value in curve.index})
    place = float if values[0] > 0 else values.index
    for i, (name, curve) in enumerate(lines.items()):
        label = ", ".join(filter(None, [name, f"seeds for each value: {curve['seeds'].min()}"]))
        x = [place(value) for value in curve.index]
        ax.plot(x, curve["mean"], marker="o", ms=3, color=COLOURS[i % 7], label=label)
        ax.fill_between(x, curve["low"], curve["high"], color=COLOURS[i % 7], alpha=0.2, lw=0)
        if len(curve) > 1:
            best = curve["mean"].idxmax()
            star = {"marker": "*", "ms": 11, "ls": "", "label": f"best: {best:g}"}
            ax.plot(place(best), curve["mean"][best], color=COLOURS[i % 7], **star)
    draw_references(ax, runs)
    if place is float:
        if values[-1] > 10 * values[0]:  # else a logarithmic axis would have one label or none
            ax.set_xscale("log")
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        ax.set_xticks(range(len(values)), [f"{value:,g}" for value in values])
    ax.margins(y=0.15)
    ax.set(xlabel=setting.replace("_", " "), ylabel="final return", title="mean and 95% interval over seeds")
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return render(figure, runs[0].env_id, footer)


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
    seeds, others = (differences[column].agg(["min", "max"]) for column in ("seeds", "other seeds"))
    seeds, others = (" to ".join(map(str, dict.fromkeys(ends))) for ends in (seeds, others))
    label = f"{seeds} seeds of each change, {others} of {origin}: difference with its 95% interval"
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (env_id, drawn) in zip(axes, panels, strict=True):
        drawn = drawn.droplevel("environment").reindex(order)
        middle, low, high = drawn[["difference", "low", "high"]].to_numpy().T
        errors = middle - low, high - middle
        ax.errorbar(middle, order, xerr=errors, fmt="o", ms=4, color=COLOURS[0], label=label)
        ax.axvline(0, color="0.3", lw=0.9)
        ax.set(title=env_id, xlabel="difference in final return")
        ax.xaxis.set_major_locator(MaxNLocator(3 if len(panels) > 2 else 5))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return render(figure, "", footer)
