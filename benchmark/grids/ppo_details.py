"""PPO without one detail of its implementation that has no flag, to measure what the detail is worth.

    python benchmark/grids/ppo_details.py --without observation-statistics --env-id HalfCheetah-v4

It is algos/ppo_continuous.py, with its flags and --without.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import ALGOS, load_script

ppo = load_script(ALGOS / "ppo_continuous.py")


@dataclass
class Args(ppo.Args):
    without: Literal["nothing", "observation-statistics", "reward-scaling", "bootstrap"] = "nothing"
    """observations as they are; rewards as they are, both clipped at 10; truncation taken for termination"""


ppo.Args, ppo.SCRIPT, check = Args, Path(__file__).stem, ppo.check


class UnitMoments(ppo.RunningMoments):
    """Mean 0 and variance 1, whatever comes."""

    def update(self, batch: Tensor) -> None:
        pass


def leave_out(detail: str) -> None:
    """Take a detail out of the script."""
    moments, gae = ppo.RunningMoments, ppo.gae
    if detail == "observation-statistics":
        ppo.RunningMoments = lambda shape: (UnitMoments if shape else moments)(shape)
    elif detail == "reward-scaling":
        ppo.RunningMoments = lambda shape: (moments if shape else UnitMoments)(shape)
    elif detail == "bootstrap":
        ppo.gae = lambda rewards, values, next_values, terminated, done, gamma, lam: gae(
            rewards, values, next_values, done, done, gamma, lam
        )


def main() -> None:
    train = ppo.train

    def train_without(args: Args) -> None:
        leave_out(args.without)
        train(args)

    ppo.train = train_without
    ppo.main()


if __name__ == "__main__":
    main()
