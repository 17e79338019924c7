# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "gymnasium[toy-text]~=1.4.0",
#     "imageio[ffmpeg]~=2.37",
#     "matplotlib~=3.11",
#     "numpy~=2.4",
#     "tensorboard~=2.21",
#     "torch~=2.13.0",
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

    python qlearning_tabular.py                                         trains, on FrozenLake-v1
    python qlearning_tabular.py --resume runs/RUN                       goes on from the last checkpoint
    python qlearning_tabular.py --evaluate runs/RUN --capture-video     plays

The first command ends within 0.01 of the return of the exact solution for its gamma, 0.740, and so do those
for FrozenLake's larger map, 0.632, and for Blackjack, -0.043:

    python qlearning_tabular.py --map-name 8x8 --total-timesteps 4000000
    python qlearning_tabular.py --env-id Blackjack-v1 --gamma 1 --alpha-decay 0.8

The run folder of a map or of Blackjack also holds a picture of the table, table.png.
"""

import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete, Tuple


@dataclass
class Args:
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

    env_id: str = "FrozenLake-v1"
    """Gymnasium environment with Discrete actions whose observations are Discrete or a few such numbers"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 1_000_000
    """environment steps to train for"""
    device: Literal["cpu"] = "cpu"
    """a table lives on the CPU"""
    torch_threads: int = 1
    """CPU threads of PyTorch, which only stores the table"""
    eval_interval: int = 100_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 1_000
    """episodes of one evaluation"""
    greedy: bool = True
    """evaluate the greedy policy instead of the epsilon-greedy one with epsilon --end-e"""
    checkpoint_interval: int = 100_000
    """environment steps between checkpoints; part of what determines the run"""
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
    run_dir: Path | None = None
    """folder of this run (default: runs/<env id>__<script>__seed<seed>__<unix time>)"""
    resume: Path | None = None
    """run folder to go on with, under its own settings; flags given beside this one override them"""
    evaluate: Path | None = None
    """model.pt or run folder to play --eval-episodes with, instead of training"""


# What a number may be, where that is not anything above 0.
RANGES = dict.fromkeys(("seed", "eval_interval"), (0, 2**32)) | {"alpha": (1e-9, 1)}
RANGES |= dict.fromkeys(("alpha_decay", "gamma", "start_e", "end_e", "exploration_fraction"), (0, 1))
RANGES |= dict.fromkeys(("initial_value", "stop_at_return"), (-sys.float_info.max, sys.float_info.max))


class Table:
    """Q and the number of updates of each entry, as lists of a row for each state.

    One entry at a time, lists are several times as fast as NumPy or PyTorch.
    """

    def __init__(self, num_states: int, num_actions: int, initial_value: float):
        self.q = [[initial_value] * num_actions for _ in range(num_states)]
        self.visits = [[0] * num_actions for _ in range(num_states)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both as tensors (num_states, num_actions)."""
        return {"q": torch.tensor(self.q, dtype=torch.float64), "visits": torch.tensor(self.visits)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {state[name].shape}, not {tensor.shape}")
            setattr(self, name, state[name].tolist())


def exploration(step: int, args: Args) -> float:
    """Epsilon, the probability of a random action, at an environment step of the run."""
    duration = args.exploration_fraction * args.total_timesteps
    progress = step / duration if step < duration else 1.0
    return (1 - progress) * args.start_e + progress * args.end_e


def epsilon_greedy(values: list[float], epsilon: float, rng: random.Random | np.random.Generator) -> int:
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


def observations(space: gym.Space) -> Iterable[int | tuple]:
    """All observations, in the order of the table's rows; none if the space is not finite."""
    if isinstance(space, Discrete):
        return range(int(space.start), int(space.start + space.n))
    return product(*map(observations, space.spaces)) if isinstance(space, Tuple) else ()


def number_states(env: gym.Env) -> gym.Env:
    """The environment with the numbers of the table's rows as its observations, if these are finite."""
    space = env.observation_space
    if isinstance(space, MultiDiscrete):
        numbers = zip(space.nvec.flat, space.start.flat, strict=True)
        space = Tuple([Discrete(n, start=start) for n, start in numbers])
        env = gym.wrappers.TransformObservation(env, lambda obs: tuple(obs.flat), space)
    rows = {obs: row for row, obs in enumerate(observations(space))}
    if all(obs == row for obs, row in rows.items()):
        return env
    return gym.wrappers.TransformObservation(env, rows.__getitem__, Discrete(len(rows)))


def make_envs(args: Args, num_envs: int, render: bool = False) -> gym.vector.SyncVectorEnv:
    """num_envs copies of the environment, each reset in the step that ends its episode."""
    names = ("map_name", "is_slippery", "sab", "natural", "max_episode_steps")
    kwargs = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    kwargs |= {"render_mode": "rgb_array"} if render else {}

    def make_env() -> gym.Env:
        try:
            env = gym.make(args.env_id, disable_env_checker=True, **kwargs)
        except TypeError as exception:  # of flags that are for others
            error(f"cannot make --env-id {args.env_id} with {kwargs}: {exception}")
        return number_states(env if env.spec.max_episode_steps else gym.wrappers.TimeLimit(env, 1000))

    return gym.vector.SyncVectorEnv([make_env] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def make_agent(args: Args, envs: gym.vector.VectorEnv) -> Table:
    """A new table for these environments."""
    spaces = envs.single_observation_space, envs.single_action_space
    if not all(isinstance(space, Discrete) for space in spaces):
        error(f"this needs observations and actions that can be counted; {args.env_id} has {spaces}")
    return Table(*(int(space.n) for space in spaces), args.initial_value)


def make_policy(args: Args, table: Table, space: Discrete) -> Callable:
    """A function from states (num_envs,) and a NumPy generator to actions (num_envs,)."""
    epsilon = 0.0 if args.greedy else args.end_e

    def act(states: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return space.start + np.array([epsilon_greedy(table.q[state], epsilon, rng) for state in states])

    return act


def draw_table(table: Table, env: gym.Env, path: Path) -> None:
    """A picture of a map or of Blackjack: in each state that was seen the best actions and their value."""
    from matplotlib.figure import Figure

    q, tried, states = np.array(table.q), np.array(table.visits).any(1), np.arange(len(table.q))
    name, unseen, style = env.spec.name, np.full(len(q), ""), {"xticks": [], "yticks": []}
    if name.startswith("FrozenLake"):
        symbols, unseen = "←↓→↑", env.unwrapped.desc.astype(str).ravel()  # H: hole, G: goal
        grid = states.reshape(env.unwrapped.desc.shape)
    elif name.startswith("CliffWalking"):
        symbols, grid = "↑→↓←", states.reshape(env.unwrapped.shape)
    elif name == "Blackjack":
        symbols, grid = "SH", np.hstack(np.moveaxis(states.reshape(32, 11, 2)[21:3:-1], 2, 0))  # card 0: gap
        style = {"title": "S: stick, H: hit. Left: no usable ace; right: one", "xlabel": "dealer's card"}
        style |= {"xticks": range(22), "xticklabels": ["", "ace", *range(2, 11)] * 2}
        style |= {"ylabel": "player's sum", "yticks": range(18), "yticklabels": range(21, 3, -1)}
    else:
        return
    axes = Figure(0.7 * np.array(grid.T.shape)).add_subplot(facecolor="lightgrey", **style)
    axes.imshow(np.where(tried, q.max(1), np.nan)[grid], "summer_r")
    for (y, x), state in np.ndenumerate(grid):
        best = "".join(c for c, value in zip(symbols, q[state], strict=True) if value == q[state].max())
        text = f"{best}\n{q[state].max():z.2f}" if tried[state] else unseen[state]
        axes.text(x, y, text, ha="center", va="center")
    axes.figure.savefig(path, dpi=150, bbox_inches="tight")


def train(args: Args) -> None:
    """Train one table; all that it leaves behind is in its run folder."""
    prepare(args)
    envs = make_envs(args, 1)
    table = make_agent(args, envs)
    run = Run(args, log_interval=10_000, agent=table)

    # Step by step, the one environment alone is several times as fast as a vector of it.
    env, start = envs.envs[0], int(envs.single_action_space.start)
    while not run.over:
        if run.fresh:  # at the start and after each checkpoint: so a resumed run has nothing to restore here
            state, _ = env.reset(seed=run.seed(0))
            rng = random.Random(run.seed(1))
            episode_return, episode_length = 0.0, 0

        # Collect and update, a step at a time; 250 of them are an iteration.
        updates, episodes = [], []
        for step in range(run.global_step, min(run.global_step + 250, args.total_timesteps)):
            values, visits = table.q[state], table.visits[state]
            epsilon = exploration(step, args)
            action = epsilon_greedy(values, epsilon, rng)
            state, reward, terminated, truncated, _ = env.step(action + start)
            reward = float(reward)
            visits[action] += 1
            alpha = step_size(visits[action], args.alpha, args.alpha_decay)
            prediction, target = values[action], q_target(reward, table.q[state], terminated, args.gamma)
            values[action] = prediction + alpha * (target - prediction)
            updates.append((alpha, prediction, target, reward))
            episode_return += reward
            episode_length += 1
            if terminated or truncated:
                episodes.append((episode_return, episode_length))
                state, _ = env.reset()
                episode_return, episode_length = 0.0, 0

        alphas, predictions, targets, rewards = np.array(updates).T
        run.require_finite(reward=rewards[:, None])
        scalars = {
            "losses/td_loss": np.square(targets - predictions),
            "values/predictions": predictions,
            "values/targets": targets,
            "charts/learning_rate": alphas,
            "charts/epsilon": epsilon,
        }
        run.end_iteration(len(updates), scalars, episodes)
    try:
        draw_table(table, env, run.folder / "table.png")
    except OSError as exception:
        run.fail(f"cannot write table.png ({exception})", run.global_step)


# ---- From here on, the text is the same in every script. ----

import atexit
import io
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections import defaultdict, deque
from dataclasses import asdict, replace
from typing import Any, NoReturn

import tyro
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem


def error(message: str) -> NoReturn:
    """Refuse bad input: one line on standard error, exit status 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def check(args: Args) -> None:
    """Refuse numbers out of range, a device that is not there, and an environment that cannot be made."""
    for name, value in vars(args).items():
        low, high = RANGES.get(name, (sys.float_info.min, sys.float_info.max))
        if type(value) in (int, float) and not low <= value <= high:
            must = f"lie in [{low}, {high}]" if name in RANGES else "be finite and above 0"
            error(f"--{name.replace('_', '-')} must {must}, not {value}")
    if args.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: PyTorch sees no CUDA device here")
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says what matters of them
            envs = make_envs(args, 1, args.capture_video)
            if args.capture_video:
                _ = torch._dynamo  # loads Triton, which crashes once a software renderer has loaded its LLVM
                envs.reset()
                envs.envs[0].render()
    except Exception as exception:  # renderers raise many kinds; all but these are else a fault of code
        if not args.capture_video and not isinstance(exception, gym.error.Error | ImportError):
            raise
        hint = "MUJOCO_GL=egl (Debian: apt install libegl1) or MUJOCO_GL=osmesa (apt install libosmesa6)"
        hint = f". To render without a display, MuJoCo needs {hint}" if args.capture_video else ""
        error(f"cannot make --env-id {args.env_id}: {exception}{hint}")


def prepare(args: Args) -> torch.device:
    """Seed PyTorch and set its number of threads; returns the device to compute on."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    if args.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # The same bits again on a GPU: pytorch.org/docs/stable/notes/randomness.html
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    return torch.device("cuda")


def progress_bar(**options: Any) -> tqdm:
    """A bar on a terminal; elsewhere a line a minute."""
    if not sys.stderr.isatty():
        options |= {"bar_format": "{l_bar}{bar:10}{r_bar}\n", "mininterval": 60, "maxinterval": 60}
    return tqdm(unit="step", delay=options.get("mininterval", 2), **options)


def evaluate(
    policy: Callable, envs: gym.vector.VectorEnv, episodes: int, seed: int, video: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, each (episodes,), of the policy; the first environment's first episode as an MP4.

    Each environment plays a fixed share of the episodes, so that short ones are not over-counted.
    """
    rng = np.random.default_rng((seed, 1))  # of the seed alone it would draw what the first environment draws
    remaining = episodes // envs.num_envs + (np.arange(envs.num_envs) < episodes % envs.num_envs)
    returns, lengths, bar, frames = [], [], progress_bar(desc="evaluation", leave=False), None
    if video:
        import imageio

        video.parent.mkdir(parents=True, exist_ok=True)
        frames = imageio.get_writer(video, fps=envs.metadata.get("render_fps", 30), macro_block_size=2)
    recorded = RecordEpisodeStatistics(envs)
    obs, _ = recorded.reset(seed=seed)
    while remaining.any():
        if frames and not frames.closed:
            frames.append_data(envs.envs[0].render())
        obs, _, terminated, truncated, info = recorded.step(policy(obs, rng))
        done = terminated | truncated
        if done.any():
            counted = done & (remaining > 0)
            returns += info["episode"]["r"][counted].tolist()
            lengths += info["episode"]["l"][counted].tolist()
            remaining = remaining - counted
        if frames and done[0]:
            frames.close()
        bar.set_postfix_str(f"{len(returns)} of {episodes} episodes", refresh=False)
        bar.update(envs.num_envs)
    bar.close()
    return np.array(returns), np.array(lengths)


def spread(returns: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard deviation and standard error of returns (episodes,)."""
    std = returns.std(ddof=1) if len(returns) > 1 else math.nan
    return returns.mean(), std, std / math.sqrt(len(returns))


def write(path: Path, content: bytes | dict) -> None:
    """Write bytes, or a dict as torch.save does, beside the path and move them there, so whole or not."""
    if isinstance(content, dict):
        torch.save(content, buffer := io.BytesIO())  # writing itself, it would not say that a disk is full
        content = buffer.getbuffer()
    path.with_suffix(".tmp").write_bytes(content)
    os.replace(path.with_suffix(".tmp"), path)


def load(path: Path, *keys: str) -> dict:
    """What this script has written there, arguments as Args; refuses what is damaged or lacks a key.

    Nothing in the file is run as code.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says what matters of them
            state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            error(f"{path} is of {state['script']}, not of {SCRIPT}")
        return {key: state[key] for key in keys} | {"args": Args(**state["args"])}
    except FileNotFoundError:
        error(f"there is no {path}")
    except Exception as exception:  # torch.load raises many kinds
        error(f"{path} is damaged or not a checkpoint: {str(exception).partition('. ')[0]}")


def restore(path: Path, args: Args, *keys: str, **parts: Any) -> dict:
    """Give each part its saved state, and return the rest; refuses another environment or other sizes."""
    state = load(path, *keys, *parts)
    if args.env_id != state["args"].env_id:
        error(f"{path} is of {state['args'].env_id}, not of --env-id {args.env_id}")
    for name, part in parts.items():
        try:
            part.load_state_dict(state[name])
        except (KeyError, RuntimeError, ValueError) as exception:
            _, _, tensors = str(exception).partition(":\n")  # of a module, a line for each that does not fit
            error(f"{path} does not fit: {name}: {tensors.partition(chr(10))[0] or exception}")
    return state


class Run:
    """A training run: its folder and logs, its evaluations and checkpoints, and when it ends.

    A run is a function of its arguments. At its start and after each checkpoint, `fresh` is true: every
    generator is then seeded anew and environments that are no part of it are reset, with seeds that follow
    from --seed and the global step. So a checkpoint needs to hold no state of theirs, and a run that was
    killed and resumed ends with the same bits as one that was not. Ctrl-C and SIGTERM end the process at
    once, and what came after the last checkpoint is done again.

    parts: what training changes, each with state_dict and load_state_dict. `agent` is what make_policy takes
    and model.pt holds. A replay `buffer` has save(folder) and load(folder) as well, for files of its own.
    """

    def __init__(self, args: Args, log_interval: int = 1, **parts: Any):
        self.args, self.parts, self.log_interval = args, parts, log_interval
        self.global_step, self.episodes, self.recent = 0, 0, deque(maxlen=100)
        self.fresh, self.pending, self.ended = True, [], []
        self.seconds, self.started = 0.0, time.perf_counter()
        name = f"{args.env_id.replace('/', '-')}__{SCRIPT}__seed{args.seed}__{int(time.time())}"
        self.folder = args.resume or args.run_dir or Path("runs", name)
        self.checkpoint = self.folder / "checkpoint.pt"
        if args.resume and args.run_dir:
            error("--run-dir has no meaning beside --resume, which goes on in the folder that it names")
        if args.resume:
            state = restore(self.checkpoint, args, "global_step", "episodes", "recent", **parts)
            self.global_step, self.episodes = state["global_step"], state["episodes"]
            self.recent.extend(state["recent"])
            if "buffer" in parts:
                parts["buffer"].load(self.folder)
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            error(f"{self.folder} is taken; if it is a run, this goes on with it: --resume {self.folder}")
        self.over = self.progress >= 1
        self.eval_envs = make_envs(args, min(args.eval_episodes, 10), args.capture_video)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not args.resume:
                self.save()
            self.open_logs()
        except OSError as exception:
            if not args.resume:
                shutil.rmtree(self.folder, ignore_errors=True)
            error(f"cannot write the run folder: {exception}")
        self.how_to_go_on = shlex.join(("python", sys.argv[0], "--resume", str(self.folder)))
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.interrupt)
        sys.excepthook = self.crash
        print(f"run folder: {self.folder}", flush=True)

    def interrupt(self, signum: int, _: Any) -> NoReturn:
        """End the process with what the last checkpoint holds; a second signal ends it without a word."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # At the exit, since here it might interrupt another print; what is registered last comes first.
        atexit.register(print, f"stopped after step {self.global_step}; to go on: {self.how_to_go_on}")
        atexit.register(self.bar.close)
        raise SystemExit(128 + signum)

    def crash(self, *exception: Any) -> None:
        """Of an exception that nobody expected: its traceback, and how to go on."""
        sys.__excepthook__(*exception)
        print(f"the run folder is {self.folder}; to go on: {self.how_to_go_on}", file=sys.stderr)

    def open_logs(self) -> None:
        """Begin to log, or go on: what an earlier process logged after the checkpoint is dropped."""
        packages = sorted({"gymnasium", "mujoco", "ale_py", "numpy", "torch"} & sys.modules.keys())
        git = f"git -C {shlex.quote(str(Path(__file__).resolve().parent))} rev-parse --verify --quiet HEAD"
        commit = subprocess.run(git, shell=True, capture_output=True, text=True).stdout.strip()
        config = {"script": SCRIPT} | asdict(self.args) | {"python": platform.python_version()}
        config |= {name.replace("_", "-"): sys.modules[name].__version__ for name in packages}
        config |= {"git_commit": commit or None, "cpu": f"{os.cpu_count()} x {platform.machine()}"}
        config["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        write(self.folder / "config.json", json.dumps(config, indent=2, default=str).encode() + b"\n")
        self.evaluations = self.folder / "evaluations.csv"
        rows = self.evaluations.read_text().splitlines(True)[1:] if self.evaluations.exists() else []
        # What a full disk cut off has no end of line.
        rows = [row for row in rows if row.endswith("\n") and int(row.partition(",")[0]) <= self.global_step]
        write(self.evaluations, "".join(["global_step,episode,return,length\n", *rows]).encode())
        if self.args.track:
            import wandb

            account = {"project": self.args.wandb_project, "entity": self.args.wandb_entity}
            self.wandb = wandb.init(**account, id=self.folder.name, resume="allow", config=config)
            self.wandb.define_metric("*", step_metric="global_step")
        # What a full disk raises in TensorBoard's thread, its next call raises here.
        hook = threading.excepthook
        threading.excepthook = lambda failed: issubclass(failed.exc_type, OSError) or hook(failed)
        self.tensorboard = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
        self.bar, self.shown = progress_bar(initial=self.global_step, total=self.args.total_timesteps), {}

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        episodes = self.episodes / getattr(self.args, "total_episodes", math.inf)
        return max(self.global_step / self.args.total_timesteps, episodes)

    def seed(self, stream: int) -> int:
        """The seed of a stream of random numbers from the global step on."""
        return int(np.random.SeedSequence((self.args.seed, self.global_step, stream)).generate_state(1)[0])

    def require_finite(self, **arrays: np.ndarray) -> None:
        """End the run at a number that is not finite; arrays (steps, num_envs, ...) by what they hold."""
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                if self.pending:
                    self.log()  # which ends it if a loss was the first
                step = np.argwhere(~np.isfinite(array))[0, 0] + 1
                self.fail(f"{name} not finite", self.global_step + step * array.shape[1])

    def end_iteration(self, steps: int, scalars: dict, episodes: list[tuple[float, int]]) -> None:
        """Count and log an iteration; evaluate, record and save where that is due; end a run that is over.

        steps: environment steps. scalars: numbers or tensors of any shape by their tags; logged is the mean
        of each since the last log. episodes: (return, length) of those that ended.
        """
        self.seconds += time.perf_counter() - self.started
        args, before, self.global_step = self.args, self.global_step, self.global_step + steps
        self.episodes += len(episodes)
        self.ended += episodes
        self.pending.append((self.global_step, steps, scalars))
        intervals = (self.log_interval, args.eval_interval or math.inf, args.checkpoint_interval)
        log_due, eval_due, save_due = (self.global_step // n > before // n for n in intervals)
        finished, mean_return = self.progress >= 1, -math.inf
        try:
            if log_due or eval_due or save_due or finished:
                self.log()
            if eval_due or (finished and args.eval_interval):
                mean_return = self.evaluate()
            self.over = finished or (args.stop_at_return is not None and mean_return >= args.stop_at_return)
            self.fresh = save_due or self.over
            if self.fresh:
                self.tensorboard.flush()  # a run that resumes from here has logged what came before
                self.save()
        except OSError as exception:
            self.fail(f"cannot write ({exception})", self.global_step)
        if self.over:
            self.bar.close()
        self.started = time.perf_counter()

    def log(self) -> None:
        """Log what has come since the last time; a loss that is not finite ends the run."""
        values = defaultdict(list)
        for step, _, scalars in self.pending:
            for tag, value in scalars.items():
                values[tag].append(torch.as_tensor(value, dtype=torch.float64).flatten())
                if tag.startswith("losses/") and not values[tag][-1].isfinite().all():
                    self.fail(f"{tag} not finite", step)
        values = {tag: torch.cat(tensors) for tag, tensors in values.items()}
        means = {tag: x.mean().item() for tag, x in values.items()}
        if "values/targets" in values:  # 1: the predictions are perfect, 0: no better than a constant
            targets, predictions = values["values/targets"], values["values/predictions"]
            means["losses/explained_variance"] = 1 - ((targets - predictions).var() / targets.var()).item()
        means["charts/SPS"] = sum(steps for _, steps, _ in self.pending) / self.seconds
        if self.ended:
            self.recent.extend(self.ended)
            means["charts/episodic_return"], means["charts/episodic_length"] = np.mean(self.ended, axis=0)
            means["charts/episodic_return_min"] = min(self.ended)[0]
            means["charts/episodic_return_max"] = max(self.ended)[0]
            means["charts/return_mean_100"], _ = np.mean(self.recent, axis=0)
        self.show(means)
        self.pending, self.ended, self.seconds = [], [], 0.0

    def show(self, scalars: dict[str, float]) -> None:
        """Log scalars by their tags; the bar shows the two that matter most."""
        for tag, value in scalars.items():
            self.tensorboard.add_scalar(tag, value, self.global_step)
        if self.args.track:
            self.wandb.log(scalars | {"global_step": self.global_step})
        names = {"charts/return_mean_100": "return", "eval/return_mean": "evaluation"}
        self.shown |= {names[tag]: f"{value:.5g}" for tag, value in scalars.items() if tag in names}
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update(min(self.global_step, self.bar.total) - self.bar.n)

    def evaluate(self) -> float:
        """Evaluate the agent, log what it scores, and return the mean."""
        args, step = self.args, self.global_step
        video = Path("videos", self.folder.name, f"step_{step}.mp4") if args.capture_video else None
        policy = make_policy(args, self.parts["agent"], self.eval_envs.single_action_space)
        seed = self.seed(2**31)  # of a stream that training does not use
        returns, lengths = evaluate(policy, self.eval_envs, args.eval_episodes, seed, video)
        if not np.isfinite(returns).all():
            self.fail("return of an evaluation not finite", step)
        rows = enumerate(zip(returns, lengths, strict=True))
        with self.evaluations.open("a") as file:
            file.writelines(f"{step},{i},{episode_return},{length}\n" for i, (episode_return, length) in rows)
        mean, _, stderr = spread(returns)
        scalars = {"eval/return_mean": mean, "eval/return_stderr": stderr}
        self.show(scalars | {"eval/length_mean": lengths.mean()})
        say = tqdm.write if sys.stderr.isatty() else print  # tqdm's draws the bar anew below the line
        say(f"step {step}: evaluation return {mean:.5g} +- {stderr:.3g}")
        return mean

    def save(self) -> None:
        """Write model.pt, what is new in the replay buffer, and checkpoint.pt."""
        settings = {k: v for k, v in asdict(self.args).items() if not isinstance(v, Path)}
        state = {"script": SCRIPT, "args": settings, "global_step": self.global_step}
        write(self.folder / "model.pt", state | {"agent": self.parts["agent"].state_dict()})
        if "buffer" in self.parts:
            self.parts["buffer"].save(self.folder)
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        write(self.checkpoint, state | {"episodes": self.episodes, "recent": list(self.recent)})

    def fail(self, what: str, step: int) -> NoReturn:
        """End a run that cannot go on: one line, exit status 1."""
        self.bar.close()
        sys.exit(f"error: {what} at step {step}; the last checkpoint is {self.checkpoint}")


def play(args: Args) -> None:
    """Evaluate a saved policy and print what it scores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C leaves without a traceback
    envs = make_envs(args, min(args.eval_episodes, 10), args.capture_video)
    with prepare(args):  # all that is made there is on that device
        agent = make_agent(args, envs)
    restore(args.evaluate, args, agent=agent)
    policy = make_policy(args, agent, envs.single_action_space)
    name = Path(args.evaluate.resolve().parent.name, "greedy.mp4" if args.greedy else "sampled.mp4")
    video = "videos" / name if args.capture_video else None
    returns, lengths = evaluate(policy, envs, args.eval_episodes, args.seed, video)
    for i, (episode_return, length) in enumerate(zip(returns, lengths, strict=True)):
        print(f"episode {i}: return {episode_return:.2f}, length {length}")
    print("mean {:.6g}, standard deviation {:.4g}, standard error {:.4g}".format(*spread(returns)))


def main() -> None:
    warnings.filterwarnings("ignore", ".*out of date", DeprecationWarning)  # MuJoCo's v4 is meant
    args = tyro.cli(Args)
    if args.evaluate:
        path = args.evaluate / "model.pt" if args.evaluate.is_dir() else args.evaluate
        # How to play is not the training run's to say.
        own = ("seed", "eval_episodes", "greedy", "capture_video", "device", "torch_threads")
        own = {name: getattr(Args, name) for name in own}
        args = replace(tyro.cli(Args, default=replace(load(path)["args"], **own)), evaluate=path)
    elif args.resume:
        saved = load(args.resume / "checkpoint.pt")["args"]
        args = tyro.cli(Args, default=replace(saved, resume=args.resume))
    check(args)
    play(args) if args.evaluate else train(args)


if __name__ == "__main__":
    main()
