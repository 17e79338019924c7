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

and --estimator says what the weights w_t are. The means of the first two are two gradients; those of the last
two are one and the same, which is neither of these:

    total         r_0 + r_1 + ... + r_T, the return: every action is credited with every reward, so that each
                  term has the noise of a whole episode. The mean is the gradient of the expected return.
    discounted    r_0 + gamma r_1 + gamma^2 r_2 + ...: total, where later rewards count for less: fewer noisy
                  terms in the sum. The mean is the gradient of the expected discounted return.
    reward-to-go  r_t + gamma r_t+1 + ...: discounted, without the rewards before a_t, which it cannot change:
                  E[r_k grad log pi(a_t|s_t)] = 0 for k < t, so they were noise only. The rest is divided by
                  gamma^t, as is usual, for late steps to count as much as early ones: so the mean is
                  another, and larger, and so can be the variance.
    baseline      reward-to-go - V(s_t), V learned: E[V(s_t) grad log pi(a_t|s_t)] = 0 likewise, since V(s_t)
                  is the same for every a_t. What V predicts well is no longer noise; a bad V adds some.

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
    sums = [start]
    for x_t, discount in zip(x.unbind(), discounts.unbind(), strict=True):
        sums.append(torch.addcmul(x_t, discount, sums[-1]))
    return torch.stack(sums[1:])


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
        # counted: the first episodes to end would be the short ones. No state is left for the next iteration.
        obs, _ = envs.reset(seed=run.seed(0))
        rng = np.random.default_rng(run.seed(1))
        logits = numpy_logits(agent)
        remaining, steps = np.full(args.num_envs, args.batch_episodes // args.num_envs), []
        while remaining.any():
            action, counted = sample_softmax(logits(obs), rng), remaining > 0
            reset_obs, reward, terminated, truncated, info = envs.step(space.start + action)
            next_obs, done = reset_obs.copy(), terminated | truncated
            if "final_obs" in info:  # reset_obs is by then the first one of the next episode (SAME_STEP)
                next_obs[done] = np.stack(info["final_obs"][done])
            steps.append((obs, next_obs, action, reward, terminated, done, counted))
            obs, remaining = reset_obs, remaining - (done & counted)

        # Compute the weights.
        arrays = [np.stack(x) for x in zip(*steps, strict=True)]
        run.require_finite(observation=arrays[1], reward=arrays[3])
        tensors = (torch.from_numpy(x).to(device) for x in arrays)
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
