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
Each rollout is used for several epochs of minibatches. With r = pi(a|s) / pi_old(a|s) and the advantage A
from GAE, PPO maximises

    E[min(r A, clip(r, 1 - eps, 1 + eps) A)] - vf_coef/2 E[(V(s) - R)^2] + ent_coef H(pi),   R = A + V_old(s).

Not in the paper, and what makes it work on MuJoCo: observations are normalised by running statistics, which
are part of the saved policy; rewards are divided by the running deviation of the discounted return, for the
learner alone; the policy begins with a small deviation (--log-std-init), the same in all states; advantages
are normalised in each minibatch. A time limit is no end: what it cuts off is bootstrapped.

    python ppo_continuous.py --env-id HalfCheetah-v4                trains
    python ppo_continuous.py --resume runs/RUN                      goes on from the last checkpoint
    python ppo_continuous.py --evaluate runs/RUN --capture-video    plays
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Args:
    num_envs: int = 1
    """parallel environments"""
    num_steps: int = 2048
    """steps of each environment in one rollout"""
    num_minibatches: int = 32
    """minibatches of one epoch"""
    update_epochs: int = 12
    """passes over each rollout"""
    learning_rate: float = 2.5e-4
    """step size of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 at --total-timesteps"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.88
    """lambda of GAE: 0 gives one-step advantages, 1 multi-step ones"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    norm_adv_eps: float = 0.1
    """added to the deviation that they are divided by: where all are near 0, their noise stays small"""
    clip_coef: float = 0.24
    """epsilon of the clipped surrogate objective"""
    clip_vloss: bool = False
    """clip the value function's change by epsilon too"""
    ent_coef: float = 0.003
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 5.0
    """largest norm of the gradient over all parameters"""
    target_kl: float | None = None
    """end an update after the epoch in which the KL divergence from the old policy exceeds this (nats)"""
    hidden_size: int = 256
    """units in each of the two tanh layers of the policy and of the value network"""
    log_std_init: float = -1.0
    """initial logarithm of the policy's standard deviation"""
    compile: bool = False
    """compile loss, gradient and clipping into one function: faster, after some seconds of warm-up"""

    env_id: str = "HalfCheetah-v4"
    """Gymnasium environment with a flat Box observation and a flat Box action"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 1_000_000
    """environment steps to train for, over all environments; rounded up to whole rollouts"""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """where the update runs (auto: CUDA if there is one); actions are always computed on the CPU"""
    torch_threads: int = 1
    """CPU threads of PyTorch; small networks are fastest on one"""
    eval_interval: int = 100_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    greedy: bool = True
    """evaluate the mode of the policy instead of sampling from it"""
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

    On one row PyTorch is mostly overhead: 25 us against 8 for NumPy, of 100 (compiled) to 190 a step, more
    from a GPU. From there the weights are copied, so this is made anew after each update.
    """
    mean, std = agent.obs_moments.mean.cpu().numpy(), agent.obs_moments.std().cpu().numpy()
    w1, b1, w2, b2, w3, b3 = [p.detach().cpu().numpy().T for p in agent.actor.parameters()]

    def act(obs: np.ndarray) -> np.ndarray:
        x = np.minimum(np.maximum((obs - mean) / std, -10), 10).astype(np.float32)
        return np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3

    return act


def flatten_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that holds all parameters, each of which becomes a view of it.

    Clipping and Adam then work on one tensor in place of a dozen: with layers of 64 units 0.1 ms of 0.6 a
    minibatch, and 0.09 of 0.25 compiled.
    """
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = view.view_as(p)
    return flat


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log density (...), in nats, of actions (..., action_dim) under a Gaussian; log_std is (action_dim,)."""
    z = (actions - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * actions.shape[-1]


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy, in nats, of a Gaussian with log_std (action_dim,)."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def discounted_cumsum(x: Tensor, discounts: Tensor, start: Tensor) -> Tensor:
    """y_t = x_t + discounts_t y_(t-1) with y_(-1) = start; x, discounts and y (num_steps, num_envs)."""
    sums = [start]
    for x_t, discount in zip(x.unbind(), discounts.unbind(), strict=True):
        sums.append(torch.addcmul(x_t, discount, sums[-1]))
    return torch.stack(sums[1:])


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

    obs: Tensor  # (batch, ...), in a minibatch as the agent takes them
    actions: Tensor  # (batch, ...), as the policy drew them
    log_probs: Tensor  # (batch,), as all that follow; of the policy that acted
    values: Tensor
    advantages: Tensor
    returns: Tensor


def ppo_loss(
    log_ratio: Tensor, values: Tensor, entropy: Tensor, batch: Rollout, clip_coef: float, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, policy and value loss, arXiv 1707.06347, equations 7 and 9; log_ratio and values (batch,)."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    value_loss = 0.5 * F.mse_loss(values, batch.returns)
    if args.clip_vloss:
        near = batch.values + (values - batch.values).clamp(-clip_coef, clip_coef)
        errors = torch.maximum((values - batch.returns).square(), (near - batch.returns).square())
        value_loss = 0.5 * errors.mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy, policy_loss, value_loss


def ppo_gradient(
    agent: GaussianAgent, parameters: list[nn.Parameter], batch: Rollout, args: Args
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Clipped gradient, flat; log r (batch,); and what is logged."""
    mean, values = agent(batch.obs)
    log_ratio = gaussian_log_prob(batch.actions, mean, agent.log_std) - batch.log_probs
    entropy = gaussian_entropy(agent.log_std)
    total, policy_loss, value_loss = ppo_loss(log_ratio, values, entropy, batch, args.clip_coef, args)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])
    norm = torch.linalg.vector_norm(gradient)
    clipped = gradient * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    scalars = {"losses/total": total, "losses/policy_loss": policy_loss, "losses/value_loss": value_loss}
    scalars |= {"losses/entropy": entropy, "losses/grad_norm": norm}
    return clipped, log_ratio.detach(), {tag: x.detach() for tag, x in scalars.items()}


def make_envs(args: Args, num_envs: int, render: bool = False) -> gym.vector.SyncVectorEnv:
    """num_envs copies of the environment, each reset in the step that ends its episode."""
    import mujoco  # fails where MUJOCO_GL names a renderer that is not installed

    # Loading v4's models, MuJoCo would log a deprecation to a file in the working directory.
    mujoco.set_mju_user_warning(lambda text: "deprecated" in text or print(text, file=sys.stderr))
    mode = {"render_mode": "rgb_array"} if render else {}
    vector_kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "copy": False}
    envs = gym.make_vec(args.env_id, num_envs, "sync", vector_kwargs, **mode)
    if render and (renderer := getattr(envs.envs[0].unwrapped, "mujoco_renderer", None)):
        # Unasked, Gymnasium 1.4 leaves the camera where it is, and the ground ends after 20 or 40 m.
        model = renderer.model
        renderer.camera_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        model.geom_size[model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE] *= 25
        model.mat_texrepeat *= 25
    return envs


def make_agent(args: Args, envs: gym.vector.VectorEnv) -> GaussianAgent:
    """A new agent for these environments."""
    spaces = envs.single_observation_space, envs.single_action_space
    if not all(isinstance(space, gym.spaces.Box) and len(space.shape) == 1 for space in spaces):
        error(f"this needs flat Boxes of observations and of actions; {args.env_id} has {spaces}")
    obs_dim, action_dim = (space.shape[0] for space in spaces)
    return GaussianAgent(obs_dim, action_dim, args.hidden_size, args.log_std_init)


def make_policy(args: Args, agent: GaussianAgent, space: gym.spaces.Box) -> Callable:
    """A function from observations (num_envs, obs_dim) and a NumPy generator to actions within the box."""
    mean, std = numpy_actor(agent), 0.0 if args.greedy else agent.log_std.detach().exp().cpu().numpy()

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal((len(obs), *space.shape), dtype=np.float32)
        return np.clip(mean(obs) + std * noise, space.low, space.high)

    return act


def train(args: Args) -> None:
    """Train one agent; all that it leaves behind is in its run folder."""
    shape, batch_size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    if batch_size % args.num_minibatches or batch_size < 2 * args.num_minibatches:
        error(f"a rollout of {batch_size} steps is not {args.num_minibatches} equal minibatches of 2 or more")
    device = prepare(args)
    envs = make_envs(args, args.num_envs)
    agent = make_agent(args, envs).to(device)
    parameters = list(agent.parameters())
    flat = flatten_parameters(parameters)
    optimizer = torch.optim.Adam([flat], eps=1e-5, fused=True)
    return_moments = RunningMoments(()).to(device)
    gradient = ppo_gradient
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        # Calling the compiled kernels from C++ saves 0.03 ms a minibatch on the CPU.
        gradient = torch.compile(gradient, fullgraph=True, options={"cpp_wrapper": device.type == "cpu"})
    run = Run(args, agent=agent, optimizer=optimizer, return_moments=return_moments)

    def to_device(*arrays: np.ndarray) -> list[Tensor]:
        return [torch.from_numpy(array).to(device) for array in arrays]

    space = envs.single_action_space
    obs_buffer, next_obs_buffer = np.zeros((2, *shape, *envs.single_observation_space.shape), np.float32)
    action_buffer, reward_buffer = np.zeros((*shape, *space.shape), np.float32), np.zeros(shape)
    terminated_buffer, done_buffer = np.zeros((2, *shape), bool)
    while not run.over:
        if run.fresh:  # at the start and after each checkpoint: so a resumed run has nothing to restore here
            obs, _ = envs.reset(seed=run.seed(0))
            noise_rng = np.random.default_rng(run.seed(1))
            shuffle_rng = torch.Generator(device).manual_seed(run.seed(2))
            episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
            discounted_return = torch.zeros(args.num_envs, dtype=torch.float64, device=device)
        learning_rate = args.learning_rate * (1 - run.progress if args.anneal_lr else 1)
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
            if "final_obs" in info:  # obs is by then the first one of the next episode (SAME_STEP)
                next_obs_buffer[t, done] = np.stack(info["final_obs"][done])
                episodes += zip(episode_return[done].tolist(), episode_length[done].tolist(), strict=True)
                episode_return[done], episode_length[done] = 0, 0
        run.require_finite(observation=next_obs_buffer, reward=reward_buffer)

        # Compute targets, for rewards in units of the standard deviation of the discounted return.
        with torch.no_grad():
            raw_obs, next_obs, actions = to_device(obs_buffer, next_obs_buffer, action_buffer)
            rewards, terminated, done = to_device(reward_buffer, terminated_buffer, done_buffer)
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
            if args.norm_adv:
                scale, center = torch.std_mean(epoch.advantages, dim=1, keepdim=True)
                epoch = epoch._replace(advantages=(epoch.advantages - center) / (scale + args.norm_adv_eps))
            steps = []
            for minibatch in zip(*(x.unbind() for x in epoch), strict=True):
                flat.grad, log_ratio, scalars = gradient(agent, parameters, Rollout(*minibatch), args)
                optimizer.step()
                steps.append((log_ratio, scalars))
            log_ratio = torch.cat([x for x, _ in steps])
            approx_kl = (log_ratio.exp() - 1 - log_ratio).mean()  # k3, joschu.net/blog/kl-approx.html
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        # After the update, so that its ratios start from the policy that acted.
        agent.obs_moments.update(raw_obs.flatten(0, 1))

        scalars = {tag: torch.stack([x[tag] for _, x in steps]) for tag in scalars} | {
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": ((log_ratio.exp() - 1).abs() > args.clip_coef).float(),
            "values/predictions": rollout.values,
            "values/targets": rollout.returns,
            "values/advantages": rollout.advantages,
            "charts/learning_rate": learning_rate,
        }
        run.end_iteration(batch_size, scalars, episodes)


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
