# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "gymnasium[classic-control]~=1.4.0",
#     "imageio[ffmpeg]~=2.37",
#     "numpy~=2.4",
#     "tensorboard~=2.21",
#     "torch~=2.13.0",
#     "tqdm~=4.67",
#     "tyro~=1.0",
#     "wandb~=0.31",
# ]
# ///
"""REINFORCE, the Monte-Carlo policy gradient, for discrete actions.

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
Each update is one step of Adam, up the estimate of the policy gradient from N whole episodes

    1/N sum over episodes and steps t of  w_t grad log pi(a_t|s_t),

and --estimator says what the weights w_t are. Each follows from the one before, with less variance:

    total         r_0 + r_1 + ... + r_T, the return: every action is credited with every reward, so that each
                  term has the noise of a whole episode. The mean is the gradient of the expected return.
    discounted    r_0 + gamma r_1 + gamma^2 r_2 + ...: total, where later rewards count for less: fewer noisy
                  terms in the sum. The mean is the gradient of the expected discounted return.
    reward-to-go  r_t + gamma r_t+1 + ...: discounted, without the rewards before a_t, which it cannot change:
                  E[r_k grad log pi(a_t|s_t)] = 0 for k < t, so they were noise only. The rest is divided by
                  gamma^t, as is usual, for late steps to count as much as early ones.
    baseline      reward-to-go - V(s_t), V learned: E[V(s_t) grad log pi(a_t|s_t)] = 0 likewise, since V(s_t)
                  is the same for every a_t. What the state alone predicts is no longer noise.

Where a time limit cuts an episode off (truncated, not terminated), the first three take the sum as it is, the
return of the game with that limit. baseline adds gamma V(s_T+1), the return to expect without it, to r_T.

    python reinforce_cartpole.py --estimator baseline                   trains
    python reinforce_cartpole.py --resume runs/RUN                      goes on from the last checkpoint
    python reinforce_cartpole.py --evaluate runs/RUN --capture-video    plays
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Args:
    estimator: Literal["total", "discounted", "reward-to-go", "baseline"] = "baseline"
    """what the gradient of an action's log-probability is weighed with, see above"""
    num_envs: int = 5
    """parallel environments"""
    batch_episodes: int = 5
    """whole episodes for one update of the policy; each environment plays the same number of them"""
    learning_rate: float = 3e-3
    """step size of Adam for the policy"""
    value_learning_rate: float = 1e-2
    """step size of Adam for the value network"""
    anneal_lr: bool = True
    """let both step sizes fall linearly to 0 at --total-episodes or --total-timesteps"""
    gamma: float = 0.995
    """discount factor; total goes without"""
    max_grad_norm: float = 1.0
    """largest norm of a network's gradient; most exceed 1, and the longer the episodes the more so"""
    value_epochs: int = 10
    """steps on the value loss with each batch, for baseline"""
    hidden_size: int = 64
    """units in each of the two tanh layers of the policy and of the value network"""

    env_id: str = "CartPole-v1"
    """Gymnasium environment with a flat Box observation and Discrete actions"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 500_000
    """environment steps to train for, over all environments; rounded up to whole batches"""
    total_episodes: int = 1000
    """episodes to train for, if they end before --total-timesteps do; rounded up to whole batches"""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """where the update runs (auto: CUDA if there is one); actions are always computed on the CPU"""
    torch_threads: int = 1
    """CPU threads of PyTorch; small networks are fastest on one"""
    eval_interval: int = 10_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    greedy: bool = True
    """evaluate the mode of the policy instead of sampling from it"""
    checkpoint_interval: int = 10_000
    """environment steps between checkpoints"""
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
RANGES = dict.fromkeys(("seed", "eval_interval"), (0, 2**32))
RANGES |= {"gamma": (0, 1), "stop_at_return": (-sys.float_info.max, sys.float_info.max)}


class MLP(nn.Module):
    """Two tanh layers and a linear one. Orthogonal weights, hidden layers with gain sqrt 2; biases zero."""

    def __init__(self, inputs: int, hidden_size: int, outputs: int, gain: float):
        super().__init__()
        self.hidden1 = nn.Linear(inputs, hidden_size)
        self.hidden2 = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, outputs)
        for layer in self.children():
            nn.init.orthogonal_(layer.weight, gain if layer is self.output else math.sqrt(2))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., inputs) to outputs (..., outputs)."""
        return self.output(torch.tanh(self.hidden2(torch.tanh(self.hidden1(x)))))


class CategoricalAgent(nn.Module):
    """Policy, as logits of the actions' probabilities, and value network."""

    def __init__(self, obs_dim: int, num_actions: int, hidden_size: int):
        super().__init__()
        self.actor = MLP(obs_dim, hidden_size, num_actions, gain=0.01)
        self.critic = MLP(obs_dim, hidden_size, 1, gain=1.0)


def numpy_logits(agent: CategoricalAgent) -> Callable[[np.ndarray], np.ndarray]:
    """The policy's logits (num_envs, num_actions) as a function of observations (num_envs, obs_dim).

    On a few rows PyTorch is mostly overhead: 50 us a step, against 12 in NumPy, with the draw of an action.
    The weights are copied, so this is made anew after each update.
    """
    w1, b1, w2, b2, w3, b3 = [p.detach().cpu().numpy().T for p in agent.actor.parameters()]
    return lambda obs: np.tanh(np.tanh(obs @ w1 + b1) @ w2 + b2) @ w3 + b3


def sample_softmax(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Actions (num_envs,) drawn from the softmax of logits (num_envs, num_actions).

    The largest of the logits plus Gumbel noise is such a draw.
    """
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)


def discounted_cumsum(x: Tensor, discounts: Tensor, start: Tensor) -> Tensor:
    """y_t = x_t + discounts_t y_(t-1) with y_(-1) = start; x, discounts and y (num_steps, num_envs)."""
    sums = []
    for x_t, discount in zip(x.unbind(), discounts.unbind(), strict=True):
        start = torch.addcmul(x_t, discount, start)
        sums.append(start)
    return torch.stack(sums)


def rewards_to_go(rewards: Tensor, done: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_(t+1), without G_(t+1) where t ends an episode; all (num_steps, num_envs)."""
    discounts = gamma * (~done).to(rewards.dtype)
    return discounted_cumsum(rewards.flip(0), discounts.flip(0), torch.zeros_like(rewards[0])).flip(0)


def episode_starts(done: Tensor) -> Tensor:
    """True where a step is the first of its episode; done is True at the last. Both (num_steps, num_envs)."""
    return torch.cat([torch.ones_like(done[:1]), done[:-1]])


def estimator_weights(estimator: str, rewards: Tensor, done: Tensor, values: Tensor, gamma: float) -> Tensor:
    """Weights w_t of grad log pi(a_t|s_t), see the module's docstring; all shapes (num_steps, num_envs).

    Only baseline looks at the values.
    """
    to_go = rewards_to_go(rewards, done, 1.0 if estimator == "total" else gamma)
    if estimator in ("reward-to-go", "baseline"):
        return to_go - values if estimator == "baseline" else to_go
    # The reward-to-go of its first step is the sum of the whole episode.
    starts = episode_starts(done)
    return discounted_cumsum(to_go * starts, (~starts).to(to_go.dtype), torch.zeros_like(to_go[0]))


def policy_loss(log_probs: Tensor, weights: Tensor, num_episodes: int) -> Tensor:
    """Loss whose gradient is minus the estimate; log_probs and weights are (batch,).

    It is divided by the number of episodes. That of steps is random, and an estimate divided by it would be
    biased towards short episodes.
    """
    return -(weights * log_probs).sum() / num_episodes


def make_envs(args: Args, num_envs: int, render: bool = False) -> gym.vector.SyncVectorEnv:
    """num_envs copies of the environment, each reset in the step that ends its episode."""
    mode = {"render_mode": "rgb_array"} if render else {}
    vector_kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    return gym.make_vec(args.env_id, num_envs, "sync", vector_kwargs, **mode)


def make_agent(args: Args, envs: gym.vector.VectorEnv) -> CategoricalAgent:
    """A new agent for these environments."""
    spaces = obs_space, action_space = envs.single_observation_space, envs.single_action_space
    flat_obs = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
    if not flat_obs or not isinstance(action_space, gym.spaces.Discrete):
        error(f"this needs a flat Box of observations and Discrete actions; {args.env_id} has {spaces}")
    return CategoricalAgent(obs_space.shape[0], int(action_space.n), args.hidden_size)


def make_policy(args: Args, agent: CategoricalAgent, space: gym.spaces.Discrete) -> Callable:
    """A function from observations (num_envs, obs_dim) and a NumPy generator to actions (num_envs,)."""
    logits = numpy_logits(agent)

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        x = logits(obs)
        return space.start + (np.argmax(x, axis=-1) if args.greedy else sample_softmax(x, rng))

    return act


def train(args: Args) -> None:
    """Train one agent; all that it leaves behind is in its run folder."""
    if args.batch_episodes % args.num_envs:
        sizes = f"--batch-episodes {args.batch_episodes}", f"--num-envs {args.num_envs}"
        error(f"{sizes[0]} are not the same number for each of {sizes[1]}")
    device = prepare(args)
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs).to(device)
    optimizer = torch.optim.Adam([{"params": net.parameters()} for net in (agent.actor, agent.critic)])
    run = Run(args, agent=agent, optimizer=optimizer)

    def minimize(loss: Tensor) -> Tensor:
        """One step of the network that the loss depends on; returns the gradient's norm before clipping."""
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        return norm

    space = envs.single_action_space
    while not run.over:
        decay = 1 - run.progress if args.anneal_lr else 1
        actor_group, critic_group = optimizer.param_groups
        actor_group["lr"], critic_group["lr"] = args.learning_rate * decay, args.value_learning_rate * decay

        # Collect. Each environment plays its share, and what it does while others finish theirs is not
        # counted: the first episodes to end would be the short ones.
        obs, _ = envs.reset(seed=run.seed(0))
        rng = np.random.default_rng(run.seed(1))
        logits = numpy_logits(agent)
        remaining, steps = np.full(args.num_envs, args.batch_episodes // args.num_envs), []
        while remaining.any():
            action, counted = sample_softmax(logits(obs), rng), remaining > 0
            reset_obs, reward, terminated, truncated, info = envs.step(space.start + action)
            next_obs, done = reset_obs.copy(), terminated | truncated
            if "final_obs" in info:
                next_obs[done] = np.stack(info["final_obs"][done])
            steps.append((obs, next_obs, action, reward, terminated, done, counted))
            obs, remaining = reset_obs, remaining - (done & counted)

        # Compute the weights.
        tensors = (torch.from_numpy(np.stack(x)).to(device) for x in zip(*steps, strict=True))
        obs, next_obs, actions, rewards, terminated, done, counted = tensors
        starts = episode_starts(done) & counted
        returns, lengths = (rewards_to_go(x, done, 1.0)[starts] for x in (rewards, torch.ones_like(rewards)))
        values = torch.zeros_like(rewards)
        if args.estimator == "baseline":
            with torch.no_grad():
                values, next_values = (agent.critic(x.float()).squeeze(-1) for x in (obs, next_obs))
            rewards = rewards + args.gamma * next_values * (done & ~terminated)
        weights = estimator_weights(args.estimator, rewards, done, values, args.gamma)
        obs, actions = obs[counted].float(), actions[counted, None]  # from here on (batch, ...)
        values, weights = values[counted].float(), weights[counted].float()

        # Update.
        log_probs = F.log_softmax(agent.actor(obs), dim=-1)
        loss = policy_loss(log_probs.gather(-1, actions).squeeze(-1), weights, args.batch_episodes)
        scalars = {
            "losses/policy_loss": loss.detach(),
            "losses/grad_norm": minimize(loss),
            "losses/entropy": -(log_probs.exp() * log_probs).sum(-1).detach(),
            "values/advantages": weights,
            "charts/learning_rate": args.learning_rate * decay,
            "charts/episodes": run.episodes + args.batch_episodes,
        }
        if args.estimator == "baseline":
            targets = values + weights
            for _ in range(args.value_epochs):
                value_loss = 0.5 * F.mse_loss(agent.critic(obs).squeeze(-1), targets)
                minimize(value_loss)
            scalars |= {
                "losses/value_loss": value_loss.detach(),
                "values/predictions": values,
                "values/targets": targets,
            }
        run.end_iteration(len(obs), scalars, list(zip(returns.tolist(), lengths.tolist(), strict=True)))


# ---- From here on, the text is the same in every script. ----

import io
import json
import os
import platform
import shlex
import signal
import subprocess
import threading
import time
import warnings
from collections import defaultdict, deque
from dataclasses import asdict, replace
from typing import Any, NoReturn

import tyro
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
            must = f"lie in [{low}, {high}]" if name in RANGES else "be above 0"
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
    except Exception as exception:  # of any kind: the environment is the user's choice
        hint = "MUJOCO_GL=egl (Debian: apt install libegl1) or MUJOCO_GL=osmesa (apt install libosmesa6)"
        hint = f". To render without a display, MuJoCo needs {hint}" if args.capture_video else ""
        error(f"cannot make --env-id {args.env_id}: {exception}{hint}")


def prepare(args: Args) -> torch.device:
    """Seed PyTorch and set its number of threads; returns the device to train on."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


def derive_seed(*entropy: int) -> int:
    """A seed that is a function of the numbers given, and unrelated to that of any other numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def progress_bar(**options: Any) -> tqdm:
    """A bar on a terminal; elsewhere a line a minute."""
    if sys.stderr.isatty():
        return tqdm(delay=2, unit="step", **options)
    lines = {"bar_format": "{l_bar}{bar:10}{r_bar}\n", "mininterval": 60, "maxinterval": 60}
    return tqdm(delay=60, unit="step", **lines, **options)


def evaluate(
    policy: Callable, envs: gym.vector.VectorEnv, episodes: int, seed: int, video: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, each (episodes,), of the policy; the first environment's first episode as an MP4.

    Each environment plays a fixed share of the episodes, so that short ones are not over-counted.
    """
    num_envs, frames = envs.num_envs, None
    rng = np.random.default_rng((seed, 1))  # of the seed alone it would draw what the first environment draws
    remaining = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
    episode_return, episode_length = np.zeros(num_envs), np.zeros(num_envs, int)
    returns, lengths, bar = [], [], progress_bar(desc="evaluation", leave=False)
    if video:
        import imageio

        video.parent.mkdir(parents=True, exist_ok=True)
        frames = imageio.get_writer(video, fps=envs.metadata.get("render_fps", 30), macro_block_size=2)
    obs, _ = envs.reset(seed=seed)
    while remaining.any():
        if frames and not frames.closed:
            frames.append_data(envs.envs[0].render())
        obs, rewards, terminated, truncated, _ = envs.step(policy(obs, rng))
        episode_return += rewards
        episode_length += 1
        done = terminated | truncated
        counted = done & (remaining > 0)
        returns += episode_return[counted].tolist()
        lengths += episode_length[counted].tolist()
        remaining = remaining - counted
        episode_return[done], episode_length[done] = 0, 0
        if frames and done[0]:
            frames.close()
        bar.set_postfix_str(f"{len(returns)} of {episodes} episodes", refresh=False)
        bar.update(num_envs)
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


def load(path: Path, args: Args | None = None, **parts: Any) -> dict:
    """A saved state, its arguments as Args; given args for this run, each part takes in its state.

    Refuses what is no such state or does not fit. Nothing in the file is run as code.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says what matters of them
            state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            error(f"{path} is of {state['script']}, not of {SCRIPT}")
        state["args"] = Args(**state["args"])
    except FileNotFoundError:
        error(f"there is no {path}")
    except Exception as exception:  # torch.load raises many kinds
        error(f"{path} is damaged or not a checkpoint: {str(exception).partition('. ')[0]}")
    if args and args.env_id != state["args"].env_id:
        error(f"{path} is of {state['args'].env_id}, not of --env-id {args.env_id}")
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (KeyError, RuntimeError, ValueError):
        saved = vars(state["args"]) | {"resume": args.resume, "evaluate": args.evaluate}
        flags = [f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if v != saved[k]]
        error(f"the weights in {path} ({name}) do not fit {' '.join(flags)}")
    return state


class Run:
    """A training run: its folder and logs, its evaluations and checkpoints, and when it ends.

    A run is a function of its arguments. At its start and after each checkpoint, `fresh` is true: every
    generator is then seeded anew and the environments are reset, with seeds that follow from --seed and the
    global step. So a checkpoint needs to hold no state of theirs, and a run that was killed and resumed ends
    with the same bits as one that was not. Ctrl-C and SIGTERM make one checkpoint more.

    parts: what training changes, each with state_dict and load_state_dict. `agent` is what make_policy takes
    and model.pt holds. Of `buffer`, a replay buffer, each checkpoint writes the new rows to another file.
    """

    def __init__(self, args: Args, log_interval: int = 1, **parts: Any):
        self.args, self.parts, self.log_interval = args, parts, log_interval
        self.global_step, self.episodes, self.recent = 0, 0, deque(maxlen=100)
        self.fresh, self.interrupts, self.pending, self.ended = True, [], [], []
        self.row_files = []  # by the number of the last row in each
        self.num_streams, self.seconds, self.started = 0, 0.0, time.perf_counter()
        name = f"{args.env_id.replace('/', '-')}__{SCRIPT}__seed{args.seed}__{int(time.time())}"
        self.folder = args.resume or args.run_dir or Path("runs", name)
        if args.resume and args.run_dir:
            error("--run-dir has no meaning beside --resume, which goes on in the folder that it names")
        if args.resume:
            state = load(self.folder / "checkpoint.pt", args, **parts)
            for missing in {"global_step", "episodes", "recent", "row_files"} - state.keys():
                error(f"{self.folder / 'checkpoint.pt'} is damaged or not a checkpoint: it has no {missing}")
            self.global_step, self.episodes = state["global_step"], state["episodes"]
            self.recent.extend(state["recent"])
            self.row_files = state["row_files"]
            for end in self.row_files:
                parts["buffer"].write(load(self.folder / f"rows_{end}.pt")["rows"], end)
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            error(f"{self.folder} is taken; if it is a run, this goes on with it: --resume {self.folder}")
        self.over = self.progress >= 1
        self.eval_envs = make_envs(args, min(args.eval_episodes, 10), args.capture_video)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda number, _: self.interrupts.append(number))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not args.resume:
                self.save()
            self.open_logs()
        except OSError as exception:
            error(f"cannot write the run folder: {exception}")

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
            wandb.init(**account, id=self.folder.name, resume="allow", config=config, sync_tensorboard=True)
        threading.excepthook = lambda failure: None  # what TensorBoard's raises, its next call raises here
        self.tensorboard = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
        self.bar, self.shown = progress_bar(initial=self.global_step, total=self.args.total_timesteps), {}
        print(f"run folder: {self.folder}", flush=True)

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        episodes = self.episodes / getattr(self.args, "total_episodes", math.inf)
        return max(self.global_step / self.args.total_timesteps, episodes)

    def seed(self, stream: int) -> int:
        """The seed of a stream of random numbers from the global step on."""
        self.num_streams = max(self.num_streams, stream + 1)
        return derive_seed(self.args.seed, self.global_step, stream)

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
            if log_due or eval_due or save_due or finished or self.interrupts:
                self.log()
            if eval_due or (finished and args.eval_interval):
                mean_return = self.evaluate()
            solved = args.stop_at_return is not None and mean_return >= args.stop_at_return
            self.over = finished or solved or bool(self.interrupts)
            self.fresh = save_due or self.over
            if self.fresh:
                self.tensorboard.flush()  # a run that resumes from here has logged what came before
                self.save()
        except OSError as exception:
            self.fail(f"cannot write ({exception})", self.global_step)
        if self.over:
            self.bar.close()
        if self.over and self.interrupts:
            command = shlex.join(("python", sys.argv[0], "--resume", str(self.folder)))
            print(f"saved at step {self.global_step}; to go on: {command}")
            raise SystemExit(128 + self.interrupts[0])
        self.started = time.perf_counter()

    def log(self) -> None:
        """Log what has come since the last time; a loss that is not finite ends the run."""
        values = defaultdict(list)
        for step, _, scalars in self.pending:
            for tag, value in scalars.items():
                values[tag].append(torch.as_tensor(value, dtype=torch.float64).flatten())
                if tag.startswith("losses/") and not values[tag][-1].isfinite().all():
                    self.fail(f"non-finite {tag}", step)
        values = {tag: torch.cat(tensors) for tag, tensors in values.items()}
        means = {tag: x.mean().item() for tag, x in values.items()}
        if "values/targets" in values:  # 1: the predictions are perfect, 0: no better than a constant
            targets, predictions = values["values/targets"], values["values/predictions"]
            means["losses/explained_variance"] = 1 - ((targets - predictions).var() / targets.var()).item()
        means["charts/SPS"] = sum(steps for _, steps, _ in self.pending) / self.seconds
        if self.ended:
            # Where parallel environments end few episodes, the latest of each.
            latest = [*self.recent, *self.ended][-max(len(self.ended), getattr(self.args, "num_envs", 1)) :]
            self.recent.extend(self.ended)
            means["charts/episodic_return"], means["charts/episodic_length"] = np.mean(latest, axis=0)
            means["charts/episodic_return_min"] = min(latest)[0]
            means["charts/episodic_return_max"] = max(latest)[0]
            means["charts/return_mean_100"], _ = np.mean(self.recent, axis=0)
        self.show(means)
        self.pending, self.ended, self.seconds = [], [], 0.0

    def show(self, scalars: dict[str, float]) -> None:
        """Log scalars by their tags; the bar shows the two that matter most."""
        for tag, value in scalars.items():
            self.tensorboard.add_scalar(tag, value, self.global_step)
        names = {"charts/return_mean_100": "return", "eval/return_mean": "evaluation"}
        self.shown |= {names[tag]: f"{value:.5g}" for tag, value in scalars.items() if tag in names}
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update(min(self.global_step, self.bar.total) - self.bar.n)

    def evaluate(self) -> float:
        """Evaluate the agent, log what it scores, and return the mean."""
        args, step = self.args, self.global_step
        video = Path("videos", self.folder.name, f"step_{step}.mp4") if args.capture_video else None
        policy = make_policy(args, self.parts["agent"], self.eval_envs.single_action_space)
        seed = derive_seed(args.seed, step, self.num_streams)  # of a stream that training does not use
        returns, lengths = evaluate(policy, self.eval_envs, args.eval_episodes, seed, video)
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
        """Write model.pt, the replay buffer's new rows and checkpoint.pt."""
        settings = {k: v for k, v in asdict(self.args).items() if not isinstance(v, Path)}
        state = {"script": SCRIPT, "args": settings, "global_step": self.global_step}
        write(self.folder / "model.pt", state | {"agent": self.parts["agent"].state_dict()})
        if (buffer := self.parts.get("buffer")) and buffer.added:
            rows = buffer.rows_since(max(self.row_files, default=0))
            write(self.folder / f"rows_{buffer.added}.pt", state | {"rows": rows})
            kept = [end for end in self.row_files if end > buffer.added - buffer.capacity]
            self.row_files = [*kept, buffer.added]
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"episodes": self.episodes, "recent": list(self.recent), "row_files": self.row_files}
        write(self.folder / "checkpoint.pt", state)
        for path in self.folder.glob("rows_*.pt"):
            if path.name not in {f"rows_{end}.pt" for end in self.row_files}:  # of no use any more
                path.unlink()

    def fail(self, what: str, step: int) -> NoReturn:
        """End a run that cannot go on: one line, exit status 1."""
        self.bar.close()
        sys.exit(f"error: {what} at step {step}; the last checkpoint is {self.folder / 'checkpoint.pt'}")


def play(args: Args) -> None:
    """Evaluate a saved policy and print what it scores."""
    envs = make_envs(args, min(args.eval_episodes, 10), args.capture_video)
    agent = make_agent(args, envs)
    load(args.evaluate, args, agent=agent)
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
        own = ("seed", "eval_episodes", "greedy", "capture_video", "device")
        own = {name: getattr(Args, name) for name in own}
        args = replace(tyro.cli(Args, default=replace(load(path)["args"], **own)), evaluate=path)
    elif args.resume:
        saved = load(args.resume / "checkpoint.pt")["args"]
        args = tyro.cli(Args, default=replace(saved, resume=args.resume))
    check(args)
    play(args) if args.evaluate else train(args)


if __name__ == "__main__":
    main()
