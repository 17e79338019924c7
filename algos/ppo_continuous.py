# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "gymnasium[mujoco]~=1.4.0",
#     "imageio[ffmpeg]~=2.37",
#     "mujoco~=4.0.0",
#     "numpy~=2.4",
#     "tensorboard~=2.21",
#     "torch~=2.13.0",
#     "tqdm~=4.67",
#     "tyro~=1.0",
#     "wandb~=0.31",
# ]
# ///
"""Proximal policy optimization (PPO) for continuous actions.

Schulman et al. 2017, arXiv 1707.06347, with the advantages of Schulman et al. 2015, arXiv 1506.02438 (GAE).
Each rollout is passed over several times in minibatches; with r = pi(a|s) / pi_old(a|s) and GAE's A, PPO
maximises

    E[min(r A, clip(r, 1 - eps, 1 + eps) A)] - vf_coef/2 E[(V(s) - R)^2] + ent_coef H(pi),   R = A + V_old(s).

    python ppo_continuous.py --env-id HalfCheetah-v4                         trains
    python ppo_continuous.py --resume runs/RUN                               goes on from the last checkpoint
    python ppo_continuous.py --evaluate runs/RUN --greedy --capture-video    plays

A run is a function of its arguments: at each checkpoint every generator is reseeded and the environments are
reset from (seed, global step), so that a run that was killed and resumed ends with the same bits as one that
was not. A run ended by Ctrl-C or SIGTERM saves where it stands: one such point more than an uninterrupted run
has.
"""

import contextlib
import csv
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "ppo_continuous"
PACKAGES = ("gymnasium", "mujoco", "numpy", "torch")


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"
    """Gymnasium environment with a flat Box observation and a flat Box action"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 1_000_000
    """environment steps to train for, over all environments; rounded up to whole rollouts"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the update runs (auto: CUDA if there is one); actions are always computed on the CPU"""
    torch_threads: int = 1
    """CPU threads of PyTorch; small networks are fastest on one"""
    run_dir: Path | None = None
    """folder of this run (default: runs/<env id>__ppo_continuous__seed<seed>__<unix time>)"""
    resume: Path | None = None
    """run folder to go on with, under its own settings; flags given beside this one override them"""
    evaluate: Path | None = None
    """model.pt or run folder to play --eval-episodes with, instead of training"""
    greedy: bool = False
    """evaluate the mode of the policy instead of sampling from it"""
    eval_interval: int = 100_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
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

    num_envs: int = 1
    """parallel environments"""
    num_steps: int = 2048
    """steps of each environment in one rollout"""
    num_minibatches: int = 32
    """minibatches of one epoch"""
    update_epochs: int = 10
    """passes over each rollout"""
    learning_rate: float = 3e-4
    """step size of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 at --total-timesteps"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of GAE: 0 gives one-step advantages, 1 multi-step ones"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate objective"""
    clip_vloss: bool = False
    """clip the value function's change by epsilon too"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient over all parameters"""
    target_kl: float | None = None
    """end an update after the epoch in which the KL divergence from the old policy exceeds this (nats)"""
    hidden_size: int = 256
    """units in each of the two tanh layers of the policy and of the value network"""
    log_std_init: float = -1.0
    """initial logarithm of the policy's standard deviation"""
    compile: bool = False
    """compile loss, gradient and clipping into one function: faster, after some seconds of warm-up"""


# What a number may be, where that is not anything above 0.
RANGES = dict.fromkeys(("seed", "eval_interval", "ent_coef", "vf_coef"), (0, 2**32))
RANGES |= dict.fromkeys(("gamma", "gae_lambda"), (0, 1))
RANGES |= dict.fromkeys(("log_std_init", "stop_at_return"), (-sys.float_info.max, sys.float_info.max))


class RunningMoments(nn.Module):
    """Mean and variance of a stream of batches, merged as in Chan, Golub and LeVeque (1979), equation 2.1."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def update(self, batch: Tensor) -> None:
        """Take in a batch of shape (batch, *shape)."""
        n, delta = len(batch), batch.double().mean(0) - self.mean
        squares = self.count * self.var + n * batch.double().var(0, correction=0)
        squares += delta.square() * self.count * n / (self.count + n)
        self.count += n
        self.mean += delta * n / self.count
        self.var.copy_(squares / self.count)

    def std(self) -> Tensor:
        """Standard deviation, kept off zero for quantities that never change."""
        return torch.sqrt(self.var + 1e-8)


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


class GaussianAgent(nn.Module):
    """Policy with a state-independent standard deviation, value network, and the observations' statistics."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_size: int, log_std_init: float):
        super().__init__()
        self.obs_moments = RunningMoments((obs_dim,))
        self.actor = MLP(obs_dim, hidden_size, action_dim, gain=0.01)
        self.critic = MLP(obs_dim, hidden_size, 1, gain=1.0)
        self.log_std = nn.Parameter(torch.full((action_dim,), log_std_init))

    def normalize(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to zero mean and unit variance, clipped at 10 standard deviations."""
        return ((obs - self.obs_moments.mean) / self.obs_moments.std()).clamp(-10, 10).float()

    def forward(self, normalized_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean actions (..., action_dim) and values (...) of normalised observations (..., obs_dim)."""
        return self.actor(normalized_obs), self.critic(normalized_obs).squeeze(-1)


def numpy_actor(agent: GaussianAgent) -> Callable[[np.ndarray], np.ndarray]:
    """The policy's mean (num_envs, action_dim) as a function of raw observations (num_envs, obs_dim).

    On a few rows PyTorch is mostly overhead: 23 us a step, against 8 for NumPy, and more on a GPU. From there
    the weights are copied, so this is made anew after each update.
    """
    mean, std = agent.obs_moments.mean.cpu().numpy(), agent.obs_moments.std().cpu().numpy()
    w1, b1, w2, b2, w3, b3 = [p.detach().cpu().numpy().T for p in agent.actor.parameters()]

    def act(obs: np.ndarray) -> np.ndarray:
        x = np.minimum(np.maximum((obs - mean) / std, -10), 10).astype(np.float32)
        return np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3

    return act


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log density (...), in nats, of actions (..., action_dim) under a Gaussian; log_std is (action_dim,)."""
    z = (actions - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * actions.shape[-1]


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy, in nats, of a Gaussian with log_std (action_dim,)."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def discounted_cumsum(x: Tensor, discounts: Tensor, start: Tensor) -> Tensor:
    """y_t = x_t + discounts_t y_(t-1) with y_(-1) = start; x, discounts and y (num_steps, num_envs)."""
    sums = []
    for x_t, discount in zip(x.unbind(), discounts.unbind(), strict=True):
        start = torch.addcmul(x_t, discount, start)
        sums.append(start)
    return torch.stack(sums)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Advantages by GAE(lambda), arXiv 1506.02438, equation 16; all shapes (num_steps, num_envs).

    next_values[t] is the value of the observation that step t led to, before any reset: at a truncation, that
    of the episode's last one. A terminated step has no future, and no sum goes on past the end of an episode
    (done: terminated or truncated). lambda 0 gives one-step advantages, 1 multi-step ones; returns are
    advantages + values.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    discounts = gamma * lam * (~done).to(deltas.dtype)
    return discounted_cumsum(deltas.flip(0), discounts.flip(0), torch.zeros_like(deltas[0])).flip(0)


class Rollout(NamedTuple):
    """A rollout, or a part of it."""

    obs: Tensor  # (batch, obs_dim), normalised
    actions: Tensor  # (batch, action_dim), before clipping to the box
    log_probs: Tensor  # (batch,), as all that follow; of the policy that acted
    values: Tensor
    advantages: Tensor
    returns: Tensor


def ppo_loss(
    log_ratio: Tensor, values: Tensor, entropy: Tensor, batch: Rollout, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, policy and value loss, arXiv 1707.06347, equations 7 and 9; log_ratio and values are (batch,).

    min(r A, clip(r, 1 - eps, 1 + eps) A) equals min(r A, A + eps |A|), in fewer operations.
    """
    bound = batch.advantages + args.clip_coef * batch.advantages.abs()
    policy_loss = -torch.minimum(log_ratio.exp() * batch.advantages, bound).mean()
    value_loss = 0.5 * F.mse_loss(values, batch.returns)
    if args.clip_vloss:
        near = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.maximum((values - batch.returns).square(), (near - batch.returns).square())
        value_loss = 0.5 * errors.mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy, policy_loss, value_loss


def ppo_gradient(
    agent: GaussianAgent, parameters: list[nn.Parameter], batch: Rollout, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped gradient, flat; total, policy and value loss, entropy, norm before clipping; log r (batch,)."""
    mean, values = agent(batch.obs)
    log_ratio = gaussian_log_prob(batch.actions, mean, agent.log_std) - batch.log_probs
    entropy = gaussian_entropy(agent.log_std)
    losses = ppo_loss(log_ratio, values, entropy, batch, args)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(losses[0], parameters)])
    norm = torch.linalg.vector_norm(gradient)
    clipped = gradient * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    return clipped, torch.stack([*losses, entropy, norm]).detach(), log_ratio.detach()


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """1 - Var[targets - predictions] / Var[targets]: 1 is perfect, 0 no better than a constant."""
    return 1 - (targets - predictions).var() / targets.var()


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


def make_envs(env_id: str, num_envs: int, render: bool = False) -> gym.vector.SyncVectorEnv:
    """num_envs copies of an environment, each reset in the step that ends its episode."""
    mode = {"render_mode": "rgb_array"} if render else {}
    vector_kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "copy": False}
    with warnings.catch_warnings(action="ignore"):
        try:
            import mujoco  # fails where MUJOCO_GL names a renderer that is not installed

            # Loading v4's models, MuJoCo would log a deprecation to a file in the working directory.
            mujoco.set_mju_user_warning(
                lambda text: "deprecated" in text or warnings.warn(text, stacklevel=2)
            )
            envs = gym.make_vec(env_id, num_envs, "sync", vector_kwargs, **mode)
            if render:
                # Unasked, Gymnasium 1.4 leaves a model's tracking camera unused: a runner leaves the picture.
                if renderer := getattr(envs.envs[0].unwrapped, "mujoco_renderer", None):
                    camera = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
                    renderer.camera_id = camera
                envs.reset()
                envs.envs[0].render()
        except Exception as exception:  # of any kind: the environment is the user's choice
            hint = "MUJOCO_GL=egl (Debian: apt install libegl1) or MUJOCO_GL=osmesa (apt install libosmesa6)"
            hint = f". To render without a display, MuJoCo needs {hint}" if render else ""
            error(f"cannot make {'a video of ' if render else ''}--env-id {env_id}: {exception}{hint}")
    return envs


def make_agent(args: Args, envs: gym.vector.VectorEnv, state: dict | None) -> GaussianAgent:
    """An agent for these environments: a new one, or that of a saved state."""
    for space in (envs.single_observation_space, envs.single_action_space):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            error(f"{SCRIPT} needs flat Boxes of observations and of actions; {args.env_id} has a {space}")
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = GaussianAgent(obs_dim, action_dim, args.hidden_size, args.log_std_init)
    if state is not None:
        try:
            agent.load_state_dict(state["agent"])
        except (KeyError, RuntimeError):
            error(f"the saved weights do not fit {args.env_id} and --hidden-size {args.hidden_size}")
    return agent


def flatten_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that holds all parameters, each of which becomes a view of it.

    Clipping and Adam then work on one tensor in place of thirteen: 0.13 ms of 0.66 a minibatch.
    """
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = view.view_as(p)
    return flat


def make_policy(agent: GaussianAgent, space: gym.spaces.Box, greedy: bool) -> Callable:
    """A function from observations (num_envs, obs_dim) and a NumPy generator to actions within the box."""
    mean, std = numpy_actor(agent), 0.0 if greedy else agent.log_std.detach().exp().cpu().numpy()

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal((len(obs), *space.shape), dtype=np.float32)
        return np.clip(mean(obs) + std * noise, space.low, space.high)

    return act


def evaluate(
    policy: Callable, envs: gym.vector.SyncVectorEnv, episodes: int, seed: int, video: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, each (episodes,), of the policy; the first environment's first episode as an MP4.

    Each environment plays a fixed share of the episodes, so that short ones are not over-counted.
    """
    num_envs, frames = envs.num_envs, None
    rng = np.random.default_rng((seed, 1))  # of the seed alone it would draw what the first environment draws
    remaining = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
    episode_return, episode_length = np.zeros(num_envs), np.zeros(num_envs, int)
    returns, lengths = [], []
    if video:
        import imageio

        video.parent.mkdir(parents=True, exist_ok=True)
        frames = imageio.get_writer(video, fps=envs.metadata.get("render_fps", 30))
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
    return np.array(returns), np.array(lengths)


def spread(returns: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard deviation and standard error of returns (episodes,)."""
    std = returns.std(ddof=1) if len(returns) > 1 else math.nan
    return returns.mean(), std, std / math.sqrt(len(returns))


def save(state: dict, path: Path) -> None:
    """Write beside and move into place, so that a crash leaves the old file."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load(path: Path, *parts: str) -> dict:
    """What `save` wrote, its arguments as Args. Refuses anything else; nothing in the file is run as code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            error(f"{path} is of {state['script']}, not of {SCRIPT}")
        return {part: state[part] for part in parts} | {"args": Args(**state["args"])}
    except FileNotFoundError:
        error(f"there is no {path}")
    except Exception as exception:  # torch.load raises many kinds
        error(f"{path} is damaged or not a checkpoint: {str(exception).partition('. ')[0]}")


def describe_machine() -> dict[str, str | None]:
    """Versions, commit and hardware, for config.json."""
    git = "git rev-parse --verify --quiet HEAD"  # through a shell, so that a machine without git is no error
    commit = subprocess.run(
        git, shell=True, cwd=Path(__file__).resolve().parent, capture_output=True, text=True
    )
    return {name: importlib.metadata.version(name) for name in PACKAGES} | {
        "python": platform.python_version(),
        "git_commit": commit.stdout.strip() or None,
        "cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def open_run(args: Args, *parts: str) -> tuple[Path, dict | None, torch.device]:
    """The run's folder, the state to resume from, and the device; refuses what cannot be run."""
    state = load(args.resume / "checkpoint.pt", *parts) if args.resume else None
    if state and state["args"].env_id != args.env_id:
        error(f"{args.resume} is a run of {state['args'].env_id}, not of --env-id {args.env_id}")
    check_ranges(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: PyTorch sees no CUDA device here")
    name = f"{args.env_id.replace('/', '-')}__{SCRIPT}__seed{args.seed}__{int(time.time())}"
    run_dir = args.resume or args.run_dir or Path("runs") / name
    if state and args.run_dir:
        error("--run-dir has no meaning beside --resume, which goes on in the folder that it names")
    if not state and run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        error(f"{run_dir} is taken; if it is a run, this goes on with it: --resume {run_dir}")
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    return run_dir, state, torch.device(device)


class RunLog:
    """TensorBoard, W&B, evaluations.csv, config.json and the progress bar of one run.

    What an earlier process logged after global_step, from where the run is resumed, is dropped.
    """

    def __init__(self, args: Args, run_dir: Path, global_step: int):
        config = json.dumps({"script": SCRIPT} | asdict(args) | describe_machine(), indent=2, default=str)
        (run_dir / "config.json").write_text(config + "\n")
        path, rows = run_dir / "evaluations.csv", [("global_step", "episode", "return", "length")]
        if path.exists():
            rows += [row for row in list(csv.reader(path.open()))[1:] if int(row[0]) <= global_step]
        with path.with_suffix(".tmp").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        os.replace(file.name, path)
        self.csv_file = path.open("a", newline="", buffering=1)
        self.tensorboard = SummaryWriter(str(run_dir), purge_step=global_step + 1)
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
        for tag, value in values.items():
            self.tensorboard.add_scalar(tag, value, global_step)
        if self.wandb:
            self.wandb.log(values, step=global_step)
        shown = {"charts/return_mean_100": "return", "eval/return_mean": "evaluation"}
        self.status |= {shown[tag]: f"{value:.1f}" for tag, value in values.items() if tag in shown}
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
        write(f"step {global_step}: evaluation return {mean:.1f} +- {stderr:.1f}")
        return mean

    def close(self) -> None:
        """Write out what is buffered."""
        self.bar.close()
        self.csv_file.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def train(args: Args) -> None:
    """Train one agent; all that it leaves behind is in its run folder."""
    run_dir, state, device = open_run(args, "agent", "optimizer", "return_moments", "recent", "global_step")
    shape, batch_size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    if batch_size % args.num_minibatches or batch_size < 2 * args.num_minibatches:
        error(f"a rollout of {batch_size} steps is not {args.num_minibatches} equal minibatches of 2 or more")
    eval_envs = make_envs(args.env_id, min(args.eval_episodes, 10), args.capture_video)
    envs = make_envs(args.env_id, args.num_envs)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    agent = make_agent(args, envs, state).to(device)
    parameters = list(agent.parameters())
    flat = flatten_parameters(parameters)
    optimizer = torch.optim.Adam([flat], eps=1e-5, fused=True)
    return_moments = RunningMoments(()).to(device)
    recent = deque(maxlen=100)  # (return, length) of the latest training episodes
    global_step = 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        return_moments.load_state_dict(state["return_moments"])
        recent.extend(state["recent"])
        global_step = state["global_step"]
    gradient = ppo_gradient
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        # Calling the compiled kernels from C++ saves 0.03 ms a minibatch on the CPU.
        gradient = torch.compile(gradient, fullgraph=True, options={"cpp_wrapper": device.type == "cpu"})

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exception:
        error(f"cannot make the run folder: {exception}")

    def checkpoint() -> None:
        settings = {k: v for k, v in asdict(args).items() if not isinstance(v, Path)}
        policy = {"script": SCRIPT, "args": settings, "global_step": global_step, "agent": agent.state_dict()}
        save(policy, run_dir / "model.pt")
        moments = {"return_moments": return_moments.state_dict(), "recent": list(recent)}
        save(policy | moments | {"optimizer": optimizer.state_dict()}, run_dir / "checkpoint.pt")

    interrupts = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: interrupts.append(number))
    if not state:
        checkpoint()
    log = RunLog(args, run_dir, global_step)
    space = envs.single_action_space
    obs_buffer, next_obs_buffer = np.zeros((2, *shape, *envs.single_observation_space.shape), np.float32)
    action_buffer, reward_buffer = np.zeros((*shape, *space.shape), np.float32), np.zeros(shape)
    terminated_buffer, done_buffer = np.zeros((2, *shape), bool)
    barrier, stop = True, False
    while global_step < args.total_timesteps and not stop:
        started, previous_step = time.perf_counter(), global_step
        if barrier:
            obs, _ = envs.reset(seed=derive_seed(args.seed, global_step, 0))
            noise_rng = np.random.default_rng(derive_seed(args.seed, global_step, 1))
            shuffle_rng = torch.Generator(device).manual_seed(derive_seed(args.seed, global_step, 2))
            episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
            discounted_return, barrier = torch.zeros(args.num_envs, dtype=torch.float64, device=device), False
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate

        # Collect. A step needs only an action: log-probabilities and values follow, in one pass for all.
        mean, std = numpy_actor(agent), agent.log_std.detach().exp().cpu().numpy()
        noise = std * noise_rng.standard_normal(action_buffer.shape, dtype=np.float32)
        episodes = []
        for t in range(args.num_steps):
            obs_buffer[t] = obs
            action_buffer[t] = action = mean(obs) + noise[t]
            action = np.minimum(np.maximum(action, space.low), space.high)
            obs, reward_buffer[t], terminated_buffer[t], truncated, info = envs.step(action)
            next_obs_buffer[t] = obs
            done_buffer[t] = done = terminated_buffer[t] | truncated
            episode_return += reward_buffer[t]
            episode_length += 1
            if "final_obs" in info:
                next_obs_buffer[t, done] = np.stack(info["final_obs"][done])
                episodes += zip(episode_return[done].tolist(), episode_length[done].tolist(), strict=True)
                episode_return[done], episode_length[done] = 0, 0
        global_step += batch_size

        # Compute targets, for rewards in units of the standard deviation of the discounted return.
        with torch.no_grad():
            arrays = (
                obs_buffer,
                next_obs_buffer,
                action_buffer,
                reward_buffer,
                terminated_buffer,
                done_buffer,
            )
            tensors = (torch.from_numpy(array).to(device) for array in arrays)
            raw_obs, next_obs, actions, rewards, terminated, done = tensors
            alive = torch.cat([torch.ones_like(done[:1]), ~done[:-1]]).double()
            discounted_returns = discounted_cumsum(rewards, args.gamma * alive, discounted_return)
            discounted_return = discounted_returns[-1] * ~done[-1]
            return_moments.update(discounted_returns.flatten())
            rewards = (rewards / return_moments.std()).clamp(-10, 10).float()
            normalized_obs = agent.normalize(raw_obs)
            means, values = agent(normalized_obs)
            next_values = agent.critic(agent.normalize(next_obs)).squeeze(-1)
            advantages = gae(rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)
            log_probs = gaussian_log_prob(actions, means, agent.log_std)
            rollout = Rollout(normalized_obs, actions, log_probs, values, advantages, advantages + values)
            rollout = Rollout(*(x.flatten(0, 1) for x in rollout))

        # Update.
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, generator=shuffle_rng, device=device)
            epoch = Rollout(*(x[order].unflatten(0, (args.num_minibatches, -1)) for x in rollout))
            scale, center = torch.std_mean(epoch.advantages, dim=1, keepdim=True)
            epoch = epoch._replace(advantages=(epoch.advantages - center) / (scale + 1e-8))
            steps = []
            for minibatch in zip(*(x.unbind() for x in epoch), strict=True):
                flat.grad, *diagnostics = gradient(agent, parameters, Rollout(*minibatch), args)
                optimizer.step()
                steps.append(diagnostics)
            losses, log_ratio = (torch.stack(x) for x in zip(*steps, strict=True))
            approx_kl = (log_ratio.exp() - 1 - log_ratio).mean().item()  # k3, joschu.net/blog/kl-approx.html
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        if not losses.isfinite().all():
            log.close()
            last = f"the last checkpoint is {run_dir / 'checkpoint.pt'}"
            sys.exit(f"error: non-finite loss or gradient in the update at step {global_step}; {last}")
        # After the update, so that its ratios start from the policy that acted.
        agent.obs_moments.update(raw_obs.flatten(0, 1))

        # Log.
        names = ("total", "policy_loss", "value_loss", "entropy", "grad_norm")
        scalars = {f"losses/{k}": v for k, v in zip(names, losses.mean(0).tolist(), strict=True)} | {
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": ((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean().item(),
            "losses/explained_variance": explained_variance(rollout.values, rollout.returns).item(),
            "values/predictions": rollout.values.mean().item(),
            "values/targets": rollout.returns.mean().item(),
            "values/advantages": rollout.advantages.mean().item(),
            "charts/learning_rate": learning_rate,
            "charts/SPS": batch_size / (time.perf_counter() - started),
        }
        if episodes:
            recent.extend(episodes)
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(episodes, axis=0)
            scalars["charts/return_mean_100"] = np.mean(recent, axis=0)[0]
        log.scalars(scalars, global_step)

        # Evaluate.
        finished = global_step >= args.total_timesteps
        intervals = (args.eval_interval or math.inf, args.checkpoint_interval)
        eval_due, checkpoint_due = (global_step // n > previous_step // n for n in intervals)
        if eval_due or (finished and args.eval_interval):
            video = Path("videos", run_dir.name, f"step_{global_step}.mp4") if args.capture_video else None
            policy, seed = make_policy(agent, space, args.greedy), derive_seed(args.seed, global_step, 3)
            returns, lengths = evaluate(policy, eval_envs, args.eval_episodes, seed, video)
            eval_mean = log.evaluation(returns, lengths, global_step)
            stop = args.stop_at_return is not None and eval_mean >= args.stop_at_return

        # Checkpoint.
        stop = stop or bool(interrupts)
        if checkpoint_due or finished or stop:
            log.tensorboard.flush()  # a run that resumes from here has logged what came before
            checkpoint()
            barrier = True
    log.close()
    if interrupts:
        command = shlex.join(("python", sys.argv[0], "--resume", str(run_dir)))
        print(f"saved at step {global_step}; to go on: {command}")
        raise SystemExit(128 + interrupts[0])


def play(args: Args, state: dict) -> None:
    """Evaluate a saved policy and print what it scored."""
    if state["args"].env_id != args.env_id:
        error(f"{args.evaluate} was trained on {state['args'].env_id}, not on --env-id {args.env_id}")
    check_ranges(args)
    run_dir = args.evaluate if args.evaluate.is_dir() else args.evaluate.parent
    envs = make_envs(args.env_id, min(args.eval_episodes, 10), args.capture_video)
    policy = make_policy(make_agent(args, envs, state), envs.single_action_space, args.greedy)
    video = Path("videos", run_dir.resolve().name, "greedy.mp4" if args.greedy else "sampled.mp4")
    returns, lengths = evaluate(
        policy, envs, args.eval_episodes, args.seed, video if args.capture_video else None
    )
    for i, (episode_return, length) in enumerate(zip(returns, lengths, strict=True)):
        print(f"episode {i}: return {episode_return:.2f}, length {length}")
    print("mean {:.2f}, standard deviation {:.2f}, standard error {:.2f}".format(*spread(returns)))


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


def main() -> None:
    args = parse_args()
    if args.evaluate:
        path = args.evaluate / "model.pt" if args.evaluate.is_dir() else args.evaluate
        state = load(path, "agent")
        own = {name: getattr(Args, name) for name in ("seed", "eval_episodes", "greedy", "capture_video")}
        play(parse_args(replace(state["args"], evaluate=args.evaluate, **own)), state)
    elif args.resume:
        state = load(args.resume / "checkpoint.pt")
        train(parse_args(replace(state["args"], resume=args.resume)))
    else:
        train(args)


if __name__ == "__main__":
    main()
