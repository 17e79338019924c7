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
same settings, whatever their seed, a curve. Where one numeric setting has three values or more, all others
being the same, the figure shows what the runs end with against it. Curves of several scripts are drawn over
hours, too. A grid whose file says `beside = ["ppo"]` has those of that other grid in its figures, over steps
and over hours. One that says `differences_from = "ppo"` has a figure of how far its runs end from those of
that grid. One that says `aggregate = ["HalfCheetah-v4", ...]` has a figure of what the curves with runs on
all of these environments end with, over all of them together.

A run ends with its last evaluation, or without any with its last 100 episodes of training. references.toml
has the published returns that stand beside it. The page begins with the headlines: of the curves of each
script on each environment, sweeps and differences left out, the one of most seeds and then of most steps.
"""

import re
import shlex
import textwrap
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import rows
import tyro
from cli import parse
from estimates import differences_of, scores_of, sweep_curve
from figures import aggregate_figure, difference_figure, learning_figure, sweep_figure
from page import Section, table, write_page
from records import VERSIONS, Record, by_settings, count, curves, differing, group, swept_setting
from references import references
from results_store import grid_of, read_runs
from scripts import BENCHMARK

TEXT = """\
A section is a grid of runs, a figure one of its environments. Training: the returns of the episodes trained
on, averaged in 50 bins; the band is the standard error over seeds. Evaluation: episodes in environments of
their own; the band is the standard error over all episodes of all seeds or, about the interquartile mean of
the seeds' means, the 95% bootstrap interval over seeds (by rliable); a run that --stop-at-return ended stays
at its last one, while curves of training end with the first run that does. Dotted: published. In the tables,
mean and standard error are over seeds or, of a single one, over its episodes, and the time is that of
training, without evaluations; steps and time to a return are medians over the seeds that reached it. The best
reference is the highest published or run here that took no more steps, if there is one; of the curves with
one name, the headlines have that of most seeds, then of most steps. All of it made by"""


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
class Grid:
    """What the file of a grid says, for its section."""

    name: str
    made: str = ""
    introduction: list[str] = field(default_factory=list)
    analysis: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    origin: str | None = None
    aggregate: list[str] = field(default_factory=list)


def read_grid(name: str) -> Grid:
    """A grid of benchmark/grids/ by its name; of another nothing is known."""
    path = BENCHMARK / "grids" / f"{name}.toml"
    if not path.exists():
        return Grid(name)
    lines, analysis = path.read_text().splitlines(), path.with_suffix(".md")
    comment = takewhile(lambda line: line.startswith("#"), lines)
    settings = tomllib.loads("\n".join(lines))
    return Grid(
        name,
        made=f", by python benchmark/run.py benchmark/grids/{name}.toml",
        introduction=[line.removeprefix("#").strip() for line in comment],
        analysis=analysis.read_text().splitlines() if analysis.exists() else [],
        beside=settings.get("beside", []),
        origin=settings.get("differences_from"),
        aggregate=sorted(settings.get("aggregate", [])),
    )


def facts(runs: list[Record]) -> list[str]:
    """The commits, machines and versions of runs."""
    said = []
    for name in ("git_commit", "cpu", "gpu", *VERSIONS):
        length = 7 if name == "git_commit" else None
        values = sorted({str(run.config[name])[:length] for run in runs if run.config.get(name)})
        said += [f"{name.removeprefix('git_')} {', '.join(values)}"] if values else []
    return said


def section(
    grid: Grid, grids: dict[str, list[Record]], args: Args
) -> tuple[Section, list[tuple[str, list[Record]]]]:
    """One of the grids; and its learning curves by their names."""
    runs, figures = grids[grid.name], {}
    others = [run for name in grid.beside for run in grids.get(name, [])]
    folders = ", ".join(sorted({str(grid_of(run.folder, run.env_id)) for run in runs}))
    names = ", ".join([*grid.beside, *filter(None, [grid.origin])])
    with_them = f"; beside: {names}" if names else ""
    sweeps, finals, times, improvements, citations, learned = [], [], [], [], [], []

    def footer(source: str) -> str:
        lines = f"runs: {source}{grid.made}{with_them}", f"figure: {command(args)}"
        return "\n".join(textwrap.shorten(line, 190) for line in lines)

    differences = differences_of(runs, grids.get(grid.origin, []))
    for (env_id,), same in group(runs, ["env_id"]).items():
        below = footer(f"{len(same)} in {folders}, {count(group(same, ['seed']), 'seed')}")
        slug = re.sub(r"[^\w.-]+", "-", f"{grid.name}-{env_id}")
        if env_id in differences.index.get_level_values("environment"):
            finals += [rows.final_row(name, seeds, full=True) for name, seeds in curves(same).items()]
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
            figures[f"{slug}-{script}-{setting}.png"] = sweep_figure(lines, of_script, setting, below)
            sweeps += [rows.sweep_line(name, curve, env_id, setting) for name, curve in lines.items()]
        if learning:
            named, near = curves(learning), [run for run in others if run.env_id == env_id]
            drawn = curves([*learning, *near])
            figures[f"{slug}.png"] = learning_figure(drawn, args.x, below)
            several = len({run.script for run in learning}) > 1
            if near or (several and all("hours" in run.progress for run in learning)):
                figures[f"{slug}-hours.png"] = learning_figure(drawn, "hours", below)
            learned += named.items()
            finals += [rows.final_row(name, seeds, full=True) for name, seeds in named.items()]
            improvements += rows.improvement_lines(named, env_id)
            citations += rows.published_line(learning, env_id)
            threshold = references()["thresholds"].get(env_id) if args.threshold is None else args.threshold
            if threshold is not None:
                times += [rows.threshold_row(name, seeds, threshold) for name, seeds in named.items()]
    scores = scores_of([*runs, *others], grid.aggregate)
    below = footer(f"{len(runs)} in {folders}")
    if len(differences):
        figures[f"{grid.name}.png"] = difference_figure(differences, grid.origin, below)
    if len(scores) > 1:
        figures[f"{grid.name}.png"] = aggregate_figure(scores, grid.aggregate, below)
    parts = [grid.analysis, rows.difference_rows(differences)]
    parts += [rows.aggregate_rows(scores, grid.aggregate) if len(scores) > 1 else []]
    parts += [sweeps, improvements, finals, citations, times]
    parts += [["; ".join([f"{count(runs, 'run')} in {folders}{grid.made}", *facts(runs)])]]
    return Section(grid.name, grid.introduction, figures, parts), learned


def headlines(learned: list[tuple[str, list[Record]]]) -> list[dict[str, str]]:
    """A row for each script and its settings on each environment, those of the peers beside."""
    best = {}
    for name, runs in learned:
        script = runs[0].script
        name = name if name.startswith(script) else f"{script}: {name}"
        others = best.setdefault((runs[0].env_id, name), runs)
        best[runs[0].env_id, name] = max(others, runs, key=lambda x: (len(x), max(rows.last_steps(x))))
    peers = {key: runs for key, runs in best.items() if runs[0].script.startswith("sb3_")}
    return [
        rows.headline_row(runs, key[1], {name: x for (env_id, name), x in peers.items() if env_id == key[0]})
        for key, runs in sorted(best.items())
        if key not in peers
    ]


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
        ends = [
            rows.final_row(name if told_apart else "", seeds, full=False)
            for on_one in named
            for name, seeds in on_one.items()
        ]
        print(table(ends), end="")
        return
    grids = defaultdict(list)
    for run in runs:
        grids[grid_of(run.folder, run.env_id).resolve().name].append(run)
    sections, learned = [], []
    for grid in sorted(grids):
        made, curves_of_it = section(read_grid(grid), grids, args)
        sections, learned = [*sections, made], [*learned, *curves_of_it]
    write_page(args.out, "Results", TEXT, command(args), headlines(learned), sections)
    figures = [name for made in sections for name in made.figures]
    print(f"{args.out / 'README.md'}: {count(runs, 'run')}, {count(figures, 'figure')}")


if __name__ == "__main__":
    main(parse(Args, __doc__))
