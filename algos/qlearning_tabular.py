# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "gymnasium[toy-text]~=1.4.0",
#     "imageio[ffmpeg]~=2.37",
#     "matplotlib~=3.11",
#     "numpy~=2.4",
#     "tensorboard~=2.21",
#     "tqdm~=4.67",
#     "tyro~=1.0",
#     "wandb~=0.31",
# ]
# ///
"""Q-learning for finite states and actions.

Watkins, "Learning from Delayed Rewards", 1989; its convergence: Watkins and Dayan, "Q-learning", 1992. After
each step from s by action a to s', Q(s, a) moves to what the step says about it:

    Q(s, a) += alpha_n (r + gamma max_a' Q(s', a') - Q(s, a)),   alpha_n = alpha / n^decay,

without the max term where s' is terminal. n counts the updates of Q(s, a); decay 0 keeps alpha constant, and
above 1/2 the sums of alpha_n and of its square are such that Q converges. Whatever acts while learning (here:
epsilon-greedy), what is learned is the value of acting greedily.

    python qlearning_tabular.py --greedy                                     trains on FrozenLake-v1
    python qlearning_tabular.py --resume runs/RUN                            goes on from the last checkpoint
    python qlearning_tabular.py --evaluate runs/RUN --greedy                 plays

A run is a function of its arguments: at each checkpoint every generator is reseeded and the environment is
reset from (seed, global step), so that a run that was killed and resumed ends with the same bits as one that
was not. A run ended by Ctrl-C or SIGTERM saves where it stands: one such point more than an uninterrupted run
has.

There is no PyTorch here: checkpoint.npz and model.npz are NumPy archives, in which q[observation] are the values
of the actions, and no flag chooses a device or threads. For maps and for Blackjack, table.png shows the table.
"""

import csv
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Discrete, MultiDiscrete
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

SCRIPT = "qlearning_tabular"
PACKAGES = ("gymnasium", "numpy")


@dataclass
class Args:
    env_id: str = "FrozenLake-v1"
    """Gymnasium environment with Discrete actions whose observations are Discrete or a few such numbers"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 1_000_000
    """environment steps to train for"""
    run_dir: Path | None = None
    """folder of this run (default: runs/<env id>__qlearning_tabular__seed<seed>__<unix time>)"""
    resume: Path | None = None
    """run folder to go on with, under its own settings; flags given beside this one override them"""
    evaluate: Path | None = None
    """model.npz or run folder to play --eval-episodes with, instead of training"""
    greedy: bool = False
    """evaluate the greedy policy instead of the epsilon-greedy one with epsilon --end-e"""
    eval_interval: int = 100_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 1_000
    """episodes of one evaluation"""
    checkpoint_interval: int = 100_000
    """environment steps between checkpoints; part of what determines the run, see above"""
    stop_at_return: float | None = None
    """end training once the mean return of an evaluation reaches this"""
    capture_video: bool = False
    """record the first episode of each evaluation under videos/<run name>/"""
    track: bool = False
    """log to Weights & Biases as well"""
    wandb_project: str = "plainrl"
    """project of --track"""
    wandb_entity: str | None = None
    """user or team of --track"""

    map_name: Literal["4x4", "8x8"] | None = None
    """FrozenLake's map (this and the next four: the environment's own unless given)"""
    is_slippery: bool | None = None
    """FrozenLake, CliffWalking: two steps in three go to the side"""
    sab: bool | None = None
    """Blackjack: by Sutton and Barto's rules, where a natural beats any other 21"""
    natural: bool | None = None
    """Blackjack without --sab: winning with a natural pays 1.5"""
    max_episode_steps: int | None = None
    """time limit of an episode, in steps; 1,000 where the environment has none"""
    alpha: float = 1.0
    """step size, or with --alpha-decay the first one of each entry of the table"""
    alpha_decay: float = 0.8
    """power of the number of updates by which an entry's step size is divided (0: constant step size)"""
    gamma: float = 0.99
    """discount factor"""
    start_e: float = 1.0
    """probability of a random action in the first step"""
    end_e: float = 0.1
    """probability of a random action once exploration has fallen, linearly"""
    exploration_fraction: float = 0.5
    """part of --total-timesteps over which it falls"""
    initial_value: float = 0.0
    """entries of the new table; above what can be earned, untried actions look best (optimistic start)"""


# What a number may be, where that is not anything above 0.
RANGES = dict.fromkeys(("seed", "eval_interval"), (0, 2**32)) | {"alpha": (1e-9, 1)}
RANGES |= dict.fromkeys(("alpha_decay", "gamma", "start_e", "end_e", "exploration_fraction"), (0, 1))
RANGES |= dict.fromkeys(("initial_value", "stop_at_return"), (-sys.float_info.max, sys.float_info.max))
LOG_INTERVAL = 10_000  # environment steps between points of TensorBoard's training curves
# Rows and columns that each action leads down and to the right, on environments that are maps.
MOVES = {"FrozenLake": ((0, -1), (1, 0), (0, 1), (-1, 0)), "CliffWalking": ((-1, 0), (0, 1), (1, 0), (0, -1))}

Table = list[list[float]]  # (states, actions); lists, because NumPy takes five times as long for one number


def exploration(step: int, args: Args) -> float:
    """Epsilon, the probability of a random action, in an environment step of the run."""
    duration = args.exploration_fraction * args.total_timesteps
    progress = step / duration if step < duration else 1.0
    return args.start_e + progress * (args.end_e - args.start_e)


def epsilon_greedy(values: list[float], epsilon: float, rng: random.Random) -> int:
    """An action given the values (actions,): random with probability epsilon, else best; ties at random."""
    if rng.random() < epsilon:
        return int(rng.random() * len(values))
    best = max(values)
    if values.count(best) == 1:
        return values.index(best)
    return rng.choice([action for action, value in enumerate(values) if value == best])


def step_size(visits: int, alpha: float, decay: float) -> float:
    """alpha_n of an entry's n-th update; with alpha 1 and decay 1 the entry is the mean of its targets.

    Even-Dar and Mansour, "Learning Rates for Q-learning", 2003: decays below 1 converge far sooner.
    """
    return alpha / visits**decay


def q_target(reward: float, next_values: list[float], terminated: bool, gamma: float) -> float:
    """r + gamma max_a' Q(s', a'); a terminal s' has no future. A truncation is no reason to forget it."""
    return reward if terminated else reward + gamma * max(next_values)


def error(message: str) -> NoReturn:
    """Refuse bad input: one line on standard error, exit status 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def check_ranges(args: Args) -> None:
    """Refuse numbers that are out of range."""
    for name, value in vars(args).items():
        low, high = RANGES.get(name, (sys.float_info.min, sys.float_info.max))
        if type(value) in (int, float) and not low <= value <= high:
            must = f"lie in [{low}, {high}]" if name in RANGES else "be above 0"
            error(f"--{name.replace('_', '-')} must {must}, not {value}")


def derive_seed(*entropy: int) -> int:
    """A seed that is a function of the numbers given, and unrelated to that of any other numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def make_env(args: Args, render: bool = False) -> gym.Env:
    """The environment, under a time limit."""
    names = ("map_name", "is_slippery", "sab", "natural", "max_episode_steps")
    kwargs = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    kwargs |= {"render_mode": "rgb_array"} if render else {}
    with warnings.catch_warnings(action="ignore"):
        try:
            env = gym.make(args.env_id, disable_env_checker=True, **kwargs)
            if render:
                env.reset()
                env.render()
        except Exception as exception:  # of any kind: the environment is the user's choice
            error(f"cannot make {'a video of ' if render else ''}--env-id {args.env_id}: {exception}")
    return env if env.spec.max_episode_steps else gym.wrappers.TimeLimit(env, 1000)


def discrete_parts(space: gym.Space) -> list[Discrete]:
    """The numbers that an observation consists of; none if they are not all from finite sets."""
    if isinstance(space, MultiDiscrete):
        return [Discrete(int(n), start=int(s)) for n, s in zip(space.nvec.flat, space.start.flat, strict=True)]
    parts = list(getattr(space, "spaces", [space]))
    return parts if all(isinstance(part, Discrete) for part in parts) else []


def make_index(space: gym.Space) -> Callable:
    """A function from observations to rows of the table."""
    parts = [(int(part.start), int(part.n)) for part in discrete_parts(space)]
    if isinstance(space, Discrete):
        return lambda obs: int(obs) - parts[0][0]

    def index(obs) -> int:
        row = 0
        for number, (start, n) in zip(obs, parts, strict=True):
            row = row * n + int(number) - start
        return row

    return index
