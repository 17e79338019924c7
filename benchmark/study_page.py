"""The page of a study: its best settings, what each searched one matters, and what the search cost."""

import json
import os
import shlex
import warnings
from collections import defaultdict
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from cli import error
from estimates import bootstrap, profile
from figures import COLOURS, render
from grid import FOR_THE_REPORT, read_toml
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial
from page import Section, write_page
from records import count
from rows import duration
from scripts import SCRIPTS
from study import Study

TEXT = """\
A trial is a setting on all environments and seeds of the study. Its score is the interquartile mean over
these runs, at the last rung that the trial came to, of the return over the environment's threshold; intervals
are 95% bootstrap intervals over the seeds of each environment or, of a single seed, over environments. The
best of many trials was lucky, too: only new seeds can tell what its setting is worth. Hours are those of a
core in training, without evaluations. Importances are those of PED-ANOVA (Watanabe et al. 2023, arXiv
2304.10255) for a place in the best quarter at the first rung, and sum to 1. All of it made by"""


def write_study(study: Study, results: Path) -> None:
    """Write the page of a study's trials.csv, and its best setting as a grid."""
    out = Path(os.path.relpath(results / study.name))  # for figures, whose machine is nobody else's business
    table = read_trials(out / "trials.csv", study)
    last = table.groupby("trial").last().sort_values(["steps", "score"], ascending=False)
    best, failed = last[last["failed"] == ""], last[last["failed"] != ""]
    if best.empty:
        error(f"{study.path}: no setting has a score; trial {failed.index[0]}: {failed['failed'].iloc[0]}")
    others = {name: results / name / "trials.csv" for name in study.plan.beside}
    spent = {study.name: table} | {name: pd.read_csv(path) for name, path in others.items() if path.exists()}
    command = shlex.join(["python", "benchmark/tune.py", str(study.path)])
    footer = f"trials: {out / 'trials.csv'}\nfigure: {command}"
    figures = {
        "search.png": search_figure(spent, footer),
        "importances.png": importance_figure(study, table, footer),
        "settings.png": settings_figure(study, best, footer),
    }
    came = ", ".join(f"{n} to {steps:,} steps" for steps, n in best["steps"].value_counts().items())
    cost = f"{count(last, 'trial')} in {duration([table['spent'].max()])}: {came}, {len(failed)} failed."
    rows = [best_row(study, number, trial) for number, trial in best.head(10).iterrows()]
    reasons = [{"trial": f"{number}", "failed": reason} for number, reason in failed["failed"].items()]
    grid = out / f"{study.name}_best.toml"
    grid.write_text(best_grid(study, best.iloc[0], f"{command}: trial {best.index[0]}", out))
    comment = takewhile(lambda line: line.startswith("#"), study.path.read_text().splitlines())
    introduction = [line.removeprefix("#").strip() for line in comment]
    analysis = study.path.with_suffix(".md")
    parts = [analysis.read_text().splitlines() if analysis.exists() else []]
    parts += [[cost, f"The best of them as a grid: [{grid.name}]({grid.name})."], rows, reasons]
    write_page(out, study.name, TEXT, command, [], [Section("Trials", introduction, figures, parts)])
    print(f"{cost} The best is trial {best.index[0]}: {grid}, {out / 'README.md'}")


def read_trials(path: Path, study: Study) -> pd.DataFrame:
    """trials.csv, the settings as Optuna drew them; refuses those of another study."""
    try:
        table = pd.read_csv(path, dtype=dict.fromkeys(study.space, str) | {"failed": str})
        for name, searched in study.space.items():
            table[name] = [read_value(searched, text) for text in table[name]]
        return table.fillna({"failed": ""})
    except (OSError, ValueError, KeyError, StopIteration) as exception:
        error(f"cannot read the trials in {path}: {type(exception).__name__}: {exception}")


def read_value(searched: BaseDistribution, text: str) -> Any:
    if isinstance(searched, CategoricalDistribution):
        return next(choice for choice in searched.choices if str(choice) == text)
    return int(text) if isinstance(searched, IntDistribution) else float(text)


def best_row(study: Study, number: int, trial: pd.Series) -> dict[str, str]:
    """A row of the table, with the interval of the score."""
    by_environment = defaultdict(list)
    for run, score in zip(study.runs, study.relative(trial), strict=True):
        by_environment[run.settings["env_id"]].append([score])
    strata = [np.array(seeds) for seeds in by_environment.values()]
    if len(strata) == len(study.runs):
        strata = [np.concatenate(strata)]
    estimate, low, high = (x[0] for x in bootstrap(strata, partial(profile, above=np.empty(0))))
    row = {"trial": f"{number}", "steps": f"{trial['steps']:,}"}
    row["score"] = f"{estimate:.3f} ({low:.3f} to {high:.3f})" if len(study.runs) > 1 else f"{estimate:.3f}"
    return row | {name: shown(trial[name]) for name in study.space}


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def best_grid(study: Study, trial: pd.Series, origin: str, out: Path) -> str:
    """The study's grid with a setting that was found, as TOML."""
    defaults, entries = read_toml(study.path, "study", "search", *FOR_THE_REPORT)
    script = study.runs[0].script
    own = script if script.stem not in SCRIPTS or SCRIPTS[script.stem] != script else None
    found = {"script": os.path.relpath(own, out) if own else script.stem}
    found |= {name: trial[name] for name in study.space}
    tables = [("[defaults]", defaults | found)]
    tables += [("[[runs]]", {k: v for k, v in runs.items() if k != "script"}) for runs in entries]
    lines = [f"# Found by {origin}, score {trial['score']:.3f} after {trial['steps']:,} steps."]
    for head, table in tables:
        # JSON's strings, truth values, lists and finite numbers are TOML's; pandas has numbers of its own.
        settings = {name: json.dumps(value, default=np.generic.item) for name, value in table.items()}
        lines += ["", head, *(f"{name} = {text}" for name, text in settings.items())]
    return "\n".join(lines) + "\n"


def search_figure(tables: dict[str, pd.DataFrame], footer: str) -> bytes:
    """The best score of whole runs over the hours that the search had taken by then."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    for i, (name, table) in enumerate(tables.items()):
        steps = table["steps"].max()
        whole = table[(table["steps"] == steps) & np.isfinite(table["score"])].sort_values("spent")
        best = pd.Series([*whole["score"], -np.inf], [*whole["spent"], table["spent"].max()]).cummax()
        style = {"color": COLOURS[i % 7], "label": f"{name}: best trial of {steps:,} steps, and each of them"}
        ax.step(best.index, best.where(np.isfinite(best)), where="post", **style)
        ax.plot(whole["spent"], whole["score"], "o", ms=3, alpha=0.5, color=COLOURS[i % 7])
    ax.set(xlabel="hours of training of all trials", ylabel="score", xlim=(0, None))
    return render(figure, "What the search found", footer)


def importance_figure(study: Study, table: pd.DataFrame, footer: str) -> bytes:
    """How much each setting matters for being among the best quarter at the first rung."""
    first = table[(table["steps"] == study.rungs[0]) & np.isfinite(table["score"])]
    seen = optuna.create_study(direction="maximize")
    for _, row in first.iterrows():
        params = {name: row[name] for name in study.space}
        seen.add_trial(create_trial(params=params, distributions=study.space, value=row["score"]))
    with warnings.catch_warnings(action="ignore"):  # of few trials, which the figure says itself
        found = get_param_importances(seen, evaluator=PedAnovaImportanceEvaluator(target_quantile=0.25))
    figure = Figure(figsize=(9, 1.4 + 0.25 * len(found)), layout="constrained")
    ax = figure.subplots()
    label = f"{len(first)} trials after {study.rungs[0]:,} steps"
    ax.barh(list(found)[::-1], list(found.values())[::-1], color=COLOURS[0], label=label)
    ax.set(xlabel="importance")
    return render(figure, "What each setting matters", footer)


def settings_figure(study: Study, trials: pd.DataFrame, footer: str) -> bytes:
    """The score of each trial against each of its settings."""
    columns = min(4, len(study.space))
    rows = -(-len(study.space) // columns)
    figure = Figure(figsize=(9, 1 + 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for ax in axes[len(study.space) :]:
        ax.remove()
    for ax, (name, searched) in zip(axes, study.space.items(), strict=False):
        choices = getattr(searched, "choices", None)
        for i, (steps, there) in enumerate(trials.groupby("steps")):
            x = [choices.index(value) for value in there[name]] if choices else there[name]
            style = {"color": COLOURS[i % 7], "label": f"trials of {steps:,} steps"}
            ax.plot(x, there["score"], "o", ms=4, alpha=0.7, **style)
        if choices:
            ax.set_xticks(range(len(choices)), map(shown, choices))
        elif searched.log:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(name)
    for ax in axes[::columns]:
        ax.set_ylabel("score")
    return render(figure, "Settings and scores", footer)
