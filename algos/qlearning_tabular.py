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

Watkins 1989, "Learning from delayed rewards". The return to expect from action a in state s, if the best
actions follow it, is the fixed point of Q(s, a) = E[r + gamma max_a' Q(s', a')], s' being the next state, and
without the second term where that is terminal. Each step moves the table's entry for its s and a:

    Q(s, a) += alpha_n (r + gamma max_a' Q(s', a') - Q(s, a)),   alpha_n = alpha / n^decay,

n counting the updates of the entry. It converges while every action goes on to be tried, if the alpha_n sum
to infinity and their squares do not (Watkins and Dayan 1992, "Q-learning"): 1/2 < decay <= 1. The actions to
learn from are epsilon-greedy: the best so far, or with probability epsilon any.

    python qlearning_tabular.py --greedy                                         trains, on FrozenLake-v1
    python qlearning_tabular.py --resume runs/RUN                                goes on from a checkpoint
    python qlearning_tabular.py --evaluate runs/RUN --greedy --capture-video     plays

The first command ends within 0.01 of the return of the exact solution for its gamma, 0.740, and so do those
for FrozenLake's larger map, 0.632, and for Blackjack, -0.043:

    python qlearning_tabular.py --greedy --map-name 8x8 --total-timesteps 4000000
    python qlearning_tabular.py --greedy --env-id Blackjack-v1 --gamma 1 --alpha-decay 0.8

A run is a function of its arguments: at each checkpoint every generator is reseeded and the environment is
reset from (seed, global step), so that a run that was killed and resumed ends with the same bits as one that
was not. A run ended by Ctrl-C or SIGTERM saves where it stands: one such point more than an uninterrupted run
has.

There is no PyTorch here: checkpoint.npz and model.npz are NumPy archives, q and visits in them have a row for
each observation and a column for each action, and no flag chooses a device or threads. The run folder of a
map or of Blackjack also holds a picture of the table, table.png.
"""

import contextlib
import csv
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Discrete, MultiDiscrete, Tuple
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
    """FrozenLake's map (this and the next four, unless given: as the environment is registered)"""
    is_slippery: bool | None = None
    """FrozenLake, CliffWalking: two moves in three go off to a side"""
    sab: bool | None = None
    """Blackjack by Sutton and Barto's rules: a natural beats any other 21"""
    natural: bool | None = None
    """Blackjack without --sab: a natural that wins pays 1.5"""
    max_episode_steps: int | None = None
    """time limit of an episode, in steps; 1,000 where the environment has none of its own"""
    alpha: float = 1.0
    """step size; under --alpha-decay that of an entry's first update"""
    alpha_decay: float = 0.6
    """power of an entry's number of updates by which its step size is divided (0: constant step size)"""
    gamma: float = 0.99
    """discount factor"""
    start_e: float = 1.0
    """probability of a random action in the first step"""
    end_e: float = 0.1
    """probability of a random action once it has fallen, linearly"""
    exploration_fraction: float = 0.5
    """part of --total-timesteps in which it falls"""
    initial_value: float = 0.0
    """entries of the new table; above what can be earned, untried actions look best (optimistic start)"""


# What a number may be, where that is not anything above 0.
RANGES = dict.fromkeys(("seed", "eval_interval"), (0, 2**32)) | {"alpha": (1e-9, 1)}
RANGES |= dict.fromkeys(("alpha_decay", "gamma", "start_e", "end_e", "exploration_fraction"), (0, 1))
RANGES |= dict.fromkeys(("initial_value", "stop_at_return"), (-sys.float_info.max, sys.float_info.max))
LOG_INTERVAL = 10_000  # environment steps between points of TensorBoard's training curves
# How far down and to the right each action leads, on environments that are maps.
MOVES = {"FrozenLake": ((0, -1), (1, 0), (0, 1), (-1, 0)), "CliffWalking": ((-1, 0), (0, 1), (1, 0), (0, -1))}
# For each observation a number for each action; one at a time, lists are several times as fast as NumPy.
Table = dict[int | tuple, list[float]]


def exploration(step: int, args: Args) -> float:
    """Epsilon, the probability of a random action, at an environment step of the run."""
    duration = args.exploration_fraction * args.total_timesteps
    progress = step / duration if step < duration else 1.0
    return (1 - progress) * args.start_e + progress * args.end_e


def epsilon_greedy(values: list[float], epsilon: float, rng: random.Random) -> int:
    """An action given the values (actions,): random with probability epsilon, else best; ties at random."""
    if rng.random() < epsilon:
        return int(rng.random() * len(values))
    best = max(values)
    if values.count(best) == 1:
        return values.index(best)
    return rng.choice([action for action, value in enumerate(values) if value == best])


def step_size(visits: int, alpha: float, decay: float) -> float:
    """alpha_n of an entry's n-th update (visits: n); alpha 1 and decay 1 give the mean of its targets.

    Even-Dar and Mansour, "Learning Rates for Q-learning", 2003: with decays below 1 it converges far sooner.
    """
    return alpha / visits**decay


def q_target(reward: float, next_values: list[float], terminated: bool, gamma: float) -> float:
    """r + gamma max_a' Q(s', a'). A terminated step has no future; a truncated one has, unseen as it is."""
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
    """The environment, under a time limit; its observations are numbers or tuples of them."""
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
    space = env.observation_space
    if isinstance(space, MultiDiscrete):
        parts = [Discrete(n, start=start) for n, start in zip(space.nvec.flat, space.start.flat, strict=True)]
        env = gym.wrappers.TransformObservation(env, lambda obs: tuple(obs.flat), Tuple(parts))
    return env if env.spec.max_episode_steps else gym.wrappers.TimeLimit(env, 1000)


def observations(space: gym.Space) -> Iterable[int | tuple]:
    """All observations, in the order of the table's rows; none if the space is not finite."""
    if isinstance(space, Discrete):
        return range(int(space.start), int(space.start + space.n))
    return product(*map(observations, space.spaces)) if isinstance(space, Tuple) else ()


def make_tables(args: Args, env: gym.Env, state: dict) -> tuple[Table, Table]:
    """Q and the number of updates of each entry: new ones, or those of a saved state."""
    keys, actions = list(observations(env.observation_space)), env.action_space
    if not keys or not isinstance(actions, Discrete):
        spaces = f"{env.observation_space} of observations and {actions} of actions"
        error(f"{SCRIPT} needs observations and actions that can be counted; {args.env_id} has {spaces}")
    shape = (len(keys), int(actions.n))
    q, visits = state.get("q", np.full(shape, args.initial_value)), state.get("visits", np.zeros(shape, int))
    if not q.shape == visits.shape == shape:
        error(f"the saved table, {q.shape}, is not of the shape of {args.env_id}, {shape}")
    return tuple(dict(zip(keys, table.tolist(), strict=True)) for table in (q, visits))


def play_episodes(
    q: Table, env: gym.Env, epsilon: float, episodes: int, seed: int, video: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, each (episodes,), of the epsilon-greedy policy; the first episode as an MP4."""
    rng, start, scores, frames = random.Random(seed), int(env.action_space.start), [], None
    if video:
        import imageio

        video.parent.mkdir(parents=True, exist_ok=True)
        frames = imageio.get_writer(video, fps=env.metadata.get("render_fps", 30), macro_block_size=2)
    for episode in range(episodes):
        obs, _ = env.reset(seed=None if episode else seed)
        episode_return, episode_length, done = 0.0, 0, False
        while not done:
            if frames and not frames.closed:
                frames.append_data(env.render())
            obs, reward, terminated, truncated, _ = env.step(epsilon_greedy(q[obs], epsilon, rng) + start)
            episode_return += float(reward)
            episode_length += 1
            done = terminated or truncated
        scores.append((episode_return, episode_length))
        if frames:
            frames.close()
    returns, lengths = np.array(scores).T
    return returns, lengths.astype(int)


def spread(returns: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard deviation and standard error of returns (episodes,)."""
    std = returns.std(ddof=1) if len(returns) > 1 else math.nan
    return returns.mean(), std, std / math.sqrt(len(returns))


def draw_table(q: Table, visits: Table, env: gym.Env, path: Path) -> None:
    """The table of a map or of Blackjack as a picture; what was never tried is grey."""
    from matplotlib.figure import Figure

    values, tried = np.array([*q.values()]), np.array([*visits.values()]).any(1)
    name, figure = env.spec.name.removesuffix("8x8").removesuffix("Slippery"), Figure(layout="constrained")
    if name in MOVES:
        letters = getattr(env.unwrapped, "desc", np.full(getattr(env.unwrapped, "shape", ()), b" "))
        best = np.where(tried, values.max(1), np.nan).reshape(letters.shape)
        figure.set_size_inches(2 + letters.shape[1], letters.shape[0])
        axes = figure.add_subplot(xticks=[], yticks=[], facecolor="lightgrey")
        figure.colorbar(axes.imshow(best, "summer_r"), label="value of the best action (arrow)")
        for action, (down, right) in enumerate(MOVES[name]):
            y, x = np.nonzero((tried & (values[:, action] == values.max(1))).reshape(letters.shape))
            style = {"angles": "xy", "units": "x", "scale_units": "x", "scale": 3, "width": 0.05}
            axes.quiver(x, y + 0.1, np.full(len(x), right), np.full(len(x), down), **style)
        for (y, x), value in np.ndenumerate(best):
            text = {b"H": "hole", b"G": "goal"}.get(letters[y, x], "") if np.isnan(value) else f"{value:.2f}"
            axes.text(x, y - 0.42, text, ha="center", va="top", fontsize="small")
    elif name == "Blackjack":
        figure.set_size_inches(10, 8)
        gain = np.where(tried, values[:, 1] - values[:, 0], np.nan).reshape(32, 11, 2)[4:22, 1:]
        axes = figure.subplots(1, 2)
        for ace, title in enumerate(("no usable ace", "usable ace")):
            style = {"cmap": "RdBu", "vmin": -1, "vmax": 1, "origin": "lower"}
            image = axes[ace].imshow(gain[:, :, ace], **style)
            axes[ace].set(title=title, xlabel="dealer's card", ylabel="player's sum", facecolor="lightgrey")
            axes[ace].set_xticks(range(10), ["ace", *range(2, 11)])
            axes[ace].set_yticks(range(18), range(4, 22))
            for (y, x), difference in np.ndenumerate(gain[:, :, ace]):
                letter = "" if np.isnan(difference) else "H" if difference > 0 else "S"
                color = "white" if abs(difference) > 0.7 else "black"
                axes[ace].text(x, y, letter, color=color, ha="center", va="center")
        figure.colorbar(image, label="value of hitting (H) less value of sticking (S)", extend="both")
    else:
        return
    figure.savefig(path, dpi=150, bbox_inches="tight")


def save_table(path: Path, facts: dict, **tables: Table) -> None:
    """Write beside and move into place, so that a crash leaves the old file."""
    with path.with_suffix(".tmp").open("wb") as file:
        np.savez(file, facts=json.dumps(facts), **{k: np.array([*v.values()]) for k, v in tables.items()})
    os.replace(path.with_suffix(".tmp"), path)


def load_table(path: Path, *parts: str) -> dict:
    """What `save_table` wrote, its arguments as Args. Refuses anything else; nothing in it is run as code."""
    try:
        with np.load(path, allow_pickle=False) as file:
            state = dict(file)
        state |= json.loads(str(state["facts"]))
        if state["script"] != SCRIPT:
            error(f"{path} is of {state['script']}, not of {SCRIPT}")
        return {part: state[part] for part in parts} | {"args": Args(**state["args"])}
    except FileNotFoundError:
        error(f"there is no {path}")
    except Exception as exception:  # np.load raises many kinds
        error(f"{path} is damaged or not a checkpoint: {str(exception).partition('. ')[0]}")


def describe_host() -> dict[str, str | None]:
    """Versions, commit and hardware, for config.json."""
    git = "git rev-parse --verify --quiet HEAD"  # through a shell, so that a machine without git is no error
    commit = subprocess.run(
        git, shell=True, cwd=Path(__file__).resolve().parent, capture_output=True, text=True
    )
    return {name: importlib.metadata.version(name) for name in PACKAGES} | {
        "python": platform.python_version(),
        "git_commit": commit.stdout.strip() or None,
        "cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
    }


def open_folder(args: Args) -> tuple[Path, dict]:
    """The run's folder, and the state to resume from; refuses what cannot be run."""
    state = {}
    if args.resume:
        state = load_table(args.resume / "checkpoint.npz", "q", "visits", "recent", "global_step")
        if state["args"].env_id != args.env_id:
            error(f"{args.resume} is a run of {state['args'].env_id}, not of --env-id {args.env_id}")
    check_ranges(args)
    name = f"{args.env_id.replace('/', '-')}__{SCRIPT}__seed{args.seed}__{int(time.time())}"
    run_dir = args.resume or args.run_dir or Path("runs") / name
    if state and args.run_dir:
        error("--run-dir has no meaning beside --resume, which goes on in the folder that it names")
    if not state and run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        error(f"{run_dir} is taken; if it is a run, this goes on with it: --resume {run_dir}")
    return run_dir, state


class TableLog:
    """TensorBoard, W&B, evaluations.csv, config.json and the progress bar of one run.

    What an earlier process logged after global_step, from where the run is resumed, is dropped.
    """

    def __init__(self, args: Args, run_dir: Path, global_step: int):
        config = json.dumps({"script": SCRIPT} | asdict(args) | describe_host(), indent=2, default=str)
        (run_dir / "config.json").write_text(config + "\n")
        path, rows = run_dir / "evaluations.csv", [("global_step", "episode", "return", "length")]
        if path.exists():
            rows += [row for row in list(csv.reader(path.open()))[1:] if int(row[0]) <= global_step]
        with path.with_suffix(".tmp").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        os.replace(file.name, path)
        self.csv_file = path.open("a", newline="", buffering=1)
        # What torch.utils.tensorboard writes, too.
        self.tensorboard, restart = EventFileWriter(str(run_dir)), SessionLog(status=SessionLog.START)
        self.tensorboard.add_event(Event(wall_time=time.time(), step=global_step + 1, session_log=restart))
        self.wandb = None
        if args.track:
            import wandb

            project = {"project": args.wandb_project, "entity": args.wandb_entity}
            self.wandb = wandb.init(**project, id=run_dir.name, resume="allow", config=asdict(args))
        self.tty, self.reported, self.status = sys.stderr.isatty(), time.monotonic(), {}
        hide = 0 if self.tty else math.inf  # seconds
        self.bar = tqdm(initial=global_step, total=args.total_timesteps, unit="step", delay=hide)
        print(f"run folder: {run_dir}", flush=True)

    def scalars(self, values: dict[str, float], global_step: int) -> None:
        """Log scalars by their tags; the bar shows the two that matter most."""
        summary = {"value": [{"tag": tag, "simple_value": value} for tag, value in values.items()]}
        self.tensorboard.add_event(Event(wall_time=time.time(), step=global_step, summary=summary))
        if self.wandb:
            self.wandb.log(values, step=global_step)
        shown = {"charts/return_mean_100": "return", "eval/return_mean": "evaluation"}
        self.status |= {shown[tag]: f"{value:.3f}" for tag, value in values.items() if tag in shown}
        self.bar.set_postfix(self.status, refresh=False)
        self.bar.update(min(global_step, self.bar.total) - self.bar.n)
        if not self.tty and time.monotonic() > self.reported + 60:
            self.reported = time.monotonic()
            print(self.bar, flush=True)

    def evaluation(self, returns: np.ndarray, lengths: np.ndarray, global_step: int) -> float:
        """Log an evaluation's returns and lengths, each (episodes,), and return the mean return."""
        rows = enumerate(zip(returns, lengths, strict=True))
        csv.writer(self.csv_file).writerows((global_step, i, *row) for i, row in rows)
        mean, _, stderr = spread(returns)
        tags = {"eval/return_mean": mean, "eval/return_stderr": stderr, "eval/length_mean": lengths.mean()}
        self.scalars(tags, global_step)
        write = tqdm.write if self.tty else print
        write(f"step {global_step}: evaluation return {mean:.4f} +- {stderr:.4f}")
        return mean

    def close(self) -> None:
        """Write out what is buffered."""
        self.bar.close()
        self.csv_file.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def train(args: Args) -> None:
    """Train one table; all that it leaves behind is in its run folder."""
    run_dir, state = open_folder(args)
    eval_env, env = make_env(args, args.capture_video), make_env(args)
    q, visits = make_tables(args, env, state)
    start = int(env.action_space.start)
    recent = deque(state.get("recent", []), maxlen=100)  # (return, length) of the latest training episodes
    global_step = state.get("global_step", 0)

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exception:
        error(f"cannot make the run folder: {exception}")

    def checkpoint() -> None:
        settings = {k: v for k, v in asdict(args).items() if not isinstance(v, Path)}
        facts = {"script": SCRIPT, "args": settings, "global_step": global_step}
        save_table(run_dir / "model.npz", facts, q=q)
        save_table(run_dir / "checkpoint.npz", facts | {"recent": list(recent)}, q=q, visits=visits)

    interrupts = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: interrupts.append(number))
    if not state:
        checkpoint()
    log = TableLog(args, run_dir, global_step)
    intervals = (LOG_INTERVAL, args.eval_interval or args.total_timesteps, args.checkpoint_interval)
    barrier, stop = True, False
    while global_step < args.total_timesteps and not stop:
        started, previous_step = time.perf_counter(), global_step
        global_step = min(args.total_timesteps, *((previous_step // n + 1) * n for n in intervals))
        if barrier:
            obs, _ = env.reset(seed=derive_seed(args.seed, previous_step, 0))
            rng = random.Random(derive_seed(args.seed, previous_step, 1))
            episode_return, episode_length, barrier = 0.0, 0, False

        # Collect and update, a step at a time.
        updates, episodes = [], []
        for step in range(previous_step, global_step):
            values, counts = q[obs], visits[obs]
            action = epsilon_greedy(values, exploration(step, args), rng)
            obs, reward, terminated, truncated, _ = env.step(action + start)
            reward = float(reward)
            counts[action] += 1
            alpha = step_size(counts[action], args.alpha, args.alpha_decay)
            prediction, target = values[action], q_target(reward, q[obs], terminated, args.gamma)
            values[action] = prediction + alpha * (target - prediction)
            updates.append((alpha, prediction, target))
            episode_return += reward
            episode_length += 1
            if terminated or truncated:
                episodes.append((episode_return, episode_length))
                obs, _ = env.reset()
                episode_return, episode_length = 0.0, 0
        alphas, predictions, targets = np.array(updates).T
        td_loss = np.square(targets - predictions).mean()
        if not np.isfinite(td_loss):
            log.close()
            last = f"the last checkpoint is {run_dir / 'checkpoint.npz'}"
            sys.exit(f"error: non-finite value in the table before step {global_step}; {last}")

        # Log.
        scalars = {
            "losses/td_loss": td_loss,
            "values/predictions": predictions.mean(),
            "values/targets": targets.mean(),
            "charts/learning_rate": alphas.mean(),
            "charts/epsilon": exploration(global_step, args),
            "charts/SPS": len(updates) / (time.perf_counter() - started),
        }
        if episodes:
            recent.extend(episodes)
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(episodes, axis=0)
            scalars["charts/return_mean_100"] = np.mean(recent, axis=0)[0]
        log.scalars(scalars, global_step)

        # Evaluate.
        finished = global_step >= args.total_timesteps
        if args.eval_interval and (finished or global_step % args.eval_interval == 0):
            video = Path("videos", run_dir.name, f"step_{global_step}.mp4") if args.capture_video else None
            epsilon, seed = 0.0 if args.greedy else args.end_e, derive_seed(args.seed, global_step, 2)
            returns, lengths = play_episodes(q, eval_env, epsilon, args.eval_episodes, seed, video)
            eval_mean = log.evaluation(returns, lengths, global_step)
            stop = args.stop_at_return is not None and eval_mean >= args.stop_at_return

        # Checkpoint.
        stop = stop or bool(interrupts)
        if finished or stop or global_step % args.checkpoint_interval == 0:
            log.tensorboard.flush()  # a run that resumes from here has logged what came before
            checkpoint()
            barrier = True
    draw_table(q, visits, env, run_dir / "table.png")
    log.close()
    if interrupts:
        command = shlex.join(("python", sys.argv[0], "--resume", str(run_dir)))
        print(f"saved at step {global_step}; to go on: {command}")
        raise SystemExit(128 + interrupts[0])


def play_saved(args: Args, state: dict) -> None:
    """Evaluate a saved table and print what it scored."""
    if state["args"].env_id != args.env_id:
        error(f"{args.evaluate} was trained on {state['args'].env_id}, not on --env-id {args.env_id}")
    check_ranges(args)
    run_dir = args.evaluate if args.evaluate.is_dir() else args.evaluate.parent
    env = make_env(args, args.capture_video)
    q, _ = make_tables(args, env, state)
    epsilon, name = (0.0, "greedy.mp4") if args.greedy else (args.end_e, "sampled.mp4")
    video = Path("videos", run_dir.resolve().name, name) if args.capture_video else None
    returns, lengths = play_episodes(q, env, epsilon, args.eval_episodes, args.seed, video)
    for i, (episode_return, length) in enumerate(zip(returns, lengths, strict=True)):
        print(f"episode {i}: return {episode_return:.2f}, length {length}")
    print("mean {:.4f}, standard deviation {:.4f}, standard error {:.4f}".format(*spread(returns)))


def parse_args(default: Args | None = None) -> Args:
    """The command line as Args. What tyro has to say of a bad one it puts in a box; here it is one line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(Args, default=default)
    except SystemExit as stopped:
        if stopped.code:
            error(re.sub(r"[^ -~]+", " ", output.getvalue()))
        raise


def run() -> None:
    args = parse_args()
    if args.evaluate:
        path = args.evaluate / "model.npz" if args.evaluate.is_dir() else args.evaluate
        state = load_table(path, "q")
        own = {name: getattr(Args, name) for name in ("seed", "eval_episodes", "greedy", "capture_video")}
        play_saved(parse_args(replace(state["args"], evaluate=args.evaluate, **own)), state)
    elif args.resume:
        state = load_table(args.resume / "checkpoint.npz")
        train(parse_args(replace(state["args"], resume=args.resume)))
    else:
        train(args)


if __name__ == "__main__":
    run()
