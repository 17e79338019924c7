"""Final evaluations of finished runs as a Markdown table.

    python benchmark/report.py benchmark/results/ppo_continuous/*/*

One row for each environment and script: the mean over seeds of the last evaluation's mean return, the
standard error of that mean over seeds, and the lowest and highest seed.
"""

import csv
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class Args:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """run folders, each with a config.json and an evaluations.csv"""


def last_evaluation(run: Path) -> tuple[int, list[float]]:
    """Step and returns of a run's last evaluation."""
    with (run / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    step = int(rows[-1]["global_step"])
    return step, [float(row["return"]) for row in rows if int(row["global_step"]) == step]


def table(runs: list[Path]) -> list[str]:
    """The table's lines, environments in alphabetical order."""
    groups = defaultdict(list)
    for run in runs:
        config = json.loads((run / "config.json").read_text())
        groups[config["env_id"], "greedy" if config["greedy"] else "sampled"].append(last_evaluation(run))
    lines = ["| environment | steps | seeds | episodes each | mean return | lowest to highest seed |"]
    lines.append("|---|---|---|---|---|---|")
    for (env_id, mode), evaluations in sorted(groups.items()):
        means = [statistics.mean(returns) for _, returns in evaluations]
        stderr = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        steps = max(step for step, _ in evaluations)
        lines.append(
            f"| {env_id} | {steps:,} | {len(means)} | {len(evaluations[0][1])} {mode} "
            f"| {statistics.mean(means):,.0f} ± {stderr:,.0f} | {min(means):,.0f} to {max(means):,.0f} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table(tyro.cli(Args).runs)))
