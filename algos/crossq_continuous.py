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
"""CrossQ for continuous actions: soft actor-critic (SAC) without target networks.

Bhatt et al. 2024, arXiv 1902.05605. CrossQ learns from a replay buffer of transitions (s, a, r, s') and
maximises the return and the policy's entropy together. With a' and a~ drawn from the policy, Q the smaller of
two critics, and the temperature alpha, it minimises

    critics       E[(Q_i(s, a) - y)^2] / 2,   y = r + gamma (Q(s', a') - alpha log pi(a'|s')), held constant,
    policy        E[alpha log pi(a~|s) - Q(s, a~)],
    temperature   E[-log alpha (log pi(a~|s) + H)],   H the entropy to keep: minus the number of actions.

Q(s, a) and Q(s', a') come from one pass over both, with batch renormalisation before each layer, so that the
statistics are of what the critics are asked for. That takes the place of SAC's slowly moving copies.

    python crossq_continuous.py --env-id HalfCheetah-v4                trains
    python crossq_continuous.py --resume runs/RUN                      goes on from the last checkpoint
    python crossq_continuous.py --evaluate runs/RUN --capture-video    plays

Where this departs from the paper and the authors' own code (github.com/adityab/CrossQ):
- Critics are 256 wide in place of 2,048, for the sake of a CPU; --critic-hidden-size sets it.
- The temperature's Adam has beta1 0.5, as that of the networks; theirs has 0.9.
- Weights begin as PyTorch has them, not as Flax, and the policy's first update comes with the critics'.
- Truncated episodes: a time limit is no end. Their last transition has a future, as in Pardo et al. 2018,
  arXiv 1712.00378; only a terminated one has none.
As in SAC the policy acts in the box [-1, 1]^n, of which log pi is the density. It is scaled to the
environment's box outside of the algorithm, so that H asks as much of a wide box as of a narrow one.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Args:
    num_envs: int = 1
    """parallel environments"""
    buffer_size: int = 1_000_000
    """transitions that the replay buffer holds; then each new one replaces the oldest"""
    learning_starts: int = 5_000
    """environment steps with random actions before the first update"""
    batch_size: int = 256
    """transitions of one update"""
    gamma: float = 0.99
    """discount factor"""
    policy_lr: float = 1e-3
    """step size of Adam for the policy and the temperature"""
    q_lr: float = 1e-3
    """step size of Adam for the critics"""
    policy_frequency: int = 3
    """updates of the critics from one of the policy and the temperature to the next"""
    critic_hidden_size: int = 256
    """units in each of the two ReLU layers of a critic"""
    policy_hidden_size: int = 256
    """units in each of the two ReLU layers of the policy"""
    compile: bool = False
    """compile the losses with their gradients: faster, after half a minute of warm-up"""
    bf16: bool = False
    """compute the layers in bfloat16 (autocast): faster where the processor has it"""

    env_id: str = "HalfCheetah-v4"
    """Gymnasium environment with a flat Box observation and a flat, bounded Box action"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 300_000
    """environment steps to train for, over all environments"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the networks and the replay buffer are (auto: CUDA if there is one)"""
    torch_threads: int = torch.get_num_threads()
    """CPU threads of PyTorch; part of what determines the run"""
    eval_interval: int = 10_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    greedy: bool = True
    """evaluate the mode of the policy instead of sampling from it"""
    checkpoint_interval: int = 10_000
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
RANGES = dict.fromkeys(("seed", "eval_interval", "learning_starts"), (0, 2**32))
RANGES |= {"batch_size": (2, 2**32), "gamma": (0, 1)}  # one transition has no deviation
RANGES |= {"stop_at_return": (-sys.float_info.max, sys.float_info.max)}


class BatchRenorm(nn.Module):
    """Batch renormalisation of each feature (Ioffe 2017, arXiv 1702.03275, algorithm 1), scaled and shifted.

    In a training pass it is (x - mean_B) / std_B * r + d with the mean and deviation of the batch,
    r = std_B / std and d = (mean_B - mean) / std, clipped and held constant: if nothing is clipped, it is
    (x - mean) / std with the running statistics, as in every other pass. The first `warmup` training passes
    have r = 1 and d = 0, plain batch normalisation. As in the authors' code what runs is the variance (Ioffe:
    the deviation), and warm-up ends at once.
    """

    momentum, eps, warmup, r_max, d_max = 0.01, 1e-3, 100_000, 3.0, 5.0

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        """x (batch, features), normalised; a training pass moves the running statistics."""
        if not training:
            return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, eps=self.eps)
        with torch.no_grad():
            mean = x.float().mean(0)
            var = (x.float() - mean).square().mean(0)
            std = (self.var + self.eps).sqrt()
            r = ((var + self.eps).sqrt() / std).clamp(1 / self.r_max, self.r_max)
            d = ((mean - self.mean) / std).clamp(-self.d_max, self.d_max)
            warmed_up = self.passes >= self.warmup
            r, d = torch.where(warmed_up, r, 1.0), torch.where(warmed_up, d, 0.0)
            self.mean.lerp_(mean, self.momentum)
            self.var.lerp_(var, self.momentum)
            self.passes += 1
        # With r and d in the scale and the shift the rest is one operation: a tenth of the time.
        scale, shift = self.weight * r, self.weight * d + self.bias
        return F.batch_norm(x, None, None, scale, shift, training=True, eps=self.eps)


class RenormNetwork(nn.Module):
    """Two ReLU layers and a linear one, with PyTorch's initial weights; the input of each is renormalised."""

    def __init__(self, inputs: int, hidden_size: int, outputs: int):
        super().__init__()
        self.norms = nn.ModuleList([BatchRenorm(n) for n in (inputs, hidden_size, hidden_size)])
        hidden1, hidden2 = nn.Linear(inputs, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.layers = nn.ModuleList([hidden1, hidden2, nn.Linear(hidden_size, outputs)])

    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        """(batch, outputs) for x (batch, inputs)."""
        for norm, layer in zip(self.norms[:2], self.layers[:2], strict=True):
            x = F.relu(layer(norm(x, training)))
        return self.layers[2](self.norms[2](x, training))


class RenormActor(nn.Module):
    """Policy: the hyperbolic tangent of a Gaussian whose mean and deviation depend on the observation."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_size: int):
        super().__init__()
        self.network = RenormNetwork(obs_dim, hidden_size, 2 * action_dim)

    def forward(self, obs: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation, (batch, action_dim) each, before tanh; obs (batch, obs_dim)."""
        mean, log_std = self.network(obs, training).float().chunk(2, dim=-1)
        return mean, log_std.clamp(-20, 2)


class RenormCritics(nn.Module):
    """Two action-value functions; the smaller overestimates less (Fujimoto et al. 2018, arXiv 1802.09477)."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_size: int):
        super().__init__()
        self.q1 = RenormNetwork(obs_dim + action_dim, hidden_size, 1)
        self.q2 = RenormNetwork(obs_dim + action_dim, hidden_size, 1)

    def forward(self, obs: Tensor, actions: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """Both values (batch,) of actions (batch, action_dim) in [-1, 1] at observations (batch, obs_dim)."""
        x = torch.cat([obs, actions], dim=-1)
        return self.q1(x, training).float().squeeze(-1), self.q2(x, training).float().squeeze(-1)


class Batch(NamedTuple):
    """Transitions."""

    obs: Tensor  # (batch, obs_dim)
    actions: Tensor  # (batch, action_dim), in [-1, 1]
    next_obs: Tensor  # (batch, obs_dim), the episode's own, before any reset
    rewards: Tensor  # (batch,)
    terminated: Tensor  # (batch,), 1 where there is no future, else 0


class ReplayBuffer:
    """The last `capacity` transitions.

    Each is a row of one tensor, so that a batch is gathered with one look into memory for each transition.
    """

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device):
        self.widths = (obs_dim, action_dim, obs_dim, 1, 1)
        self.rows = torch.zeros(capacity, sum(self.widths), device=device)
        self.capacity, self.added = capacity, 0  # added: rows that were ever written
        self.files: list[int] = []  # of the checkpoint, each by the number of its last row

    def add(self, *columns: np.ndarray) -> None:
        """Add a transition of each environment: arrays (num_envs, ...) in the order of Batch."""
        columns = [x.reshape(len(x), -1) for x in columns]
        rows = torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.float32))
        self.write(rows, self.added + len(rows))

    def sample(self, batch_size: int, rng: torch.Generator) -> Batch:
        """Transitions drawn uniformly, with replacement."""
        high, device = min(self.added, self.capacity), self.rows.device
        rows = self.rows[torch.randint(high, (batch_size,), generator=rng, device=device)]
        obs, actions, next_obs, rewards, terminated = rows.split(self.widths, dim=1)
        return Batch(obs, actions, next_obs, rewards.squeeze(1), terminated.squeeze(1))

    def write(self, rows: Tensor, added: int) -> None:
        """Write rows, the last of which is number `added` of all that were ever written."""
        rows = rows[-self.capacity :]
        self.rows[torch.arange(added - len(rows), added) % self.capacity] = rows.to(self.rows.device)
        self.added = added

    def save(self, folder: Path) -> None:
        """Write the rows that are new since the last time to a file of their own, so each row only once."""
        for path in folder.glob("rows_*.pt"):  # of which the checkpoint in place needs only these
            if path.name not in {f"rows_{end}.pt" for end in self.files}:
                path.unlink()
        first = max([self.added - self.capacity, 0, *self.files[-1:]])
        if first < self.added:
            rows = self.rows[torch.arange(first, self.added) % self.capacity].cpu()
            write(folder / f"rows_{self.added}.pt", {"script": SCRIPT, "args": {}, "rows": rows})
            kept = [end for end in self.files if end > self.added - self.capacity]
            self.files = [*kept, self.added]

    def load(self, folder: Path) -> None:
        """Read the rows that save has written, after load_state_dict."""
        for end in self.files:
            self.write(load(folder / f"rows_{end}.pt", "rows")["rows"], end)

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.added, "capacity": self.capacity, "files": self.files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["capacity"] != self.capacity:  # in a larger one, rows that are lost would count as there
            raise ValueError(f"it holds {state['capacity']} transitions, not {self.capacity}")
        self.added, self.files = state["added"], state["files"]


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions tanh(u) in [-1, 1] with u = mean + std noise, and their log density (...) in nats.

    mean, log_std and noise are (..., action_dim). Arxiv 1812.05905, equation 26 in its appendix C:
    log pi(a) = log N(u) - sum log(1 - tanh(u)^2). The last term is written as 2 (log 2 - u - softplus(-2 u)),
    which stays exact where tanh(u) rounds to 1.
    """
    u = mean + log_std.exp() * noise
    log_normal = (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
    return torch.tanh(u), log_normal - 2 * (math.log(2) - u - F.softplus(-2 * u)).sum(-1)


def soft_target(
    rewards: Tensor,
    terminated: Tensor,
    next_values: Tensor,
    next_log_probs: Tensor,
    alpha: Tensor,
    gamma: float,
) -> Tensor:
    """y = r + gamma (Q(s', a') - alpha log pi(a'|s')), and r where terminated; all shapes (batch,).

    Arxiv 1812.05905, equations 3 and 5.
    """
    return rewards + gamma * (1 - terminated) * (next_values - alpha * next_log_probs)


def crossq_critic_gradient(
    actor: RenormActor, critics: RenormCritics, log_alpha: Tensor, batch: Batch, noise: Tensor, args: Args
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradient of both critics' loss by their parameters, and what is logged; noise is (batch, action_dim).

    Arxiv 1902.05605: one training pass of the critics for (s, a) and (s', a'). The values of the second half
    are held constant; the batch's statistics, to which it adds, are not.
    """
    with torch.autocast(noise.device.type, torch.bfloat16, enabled=args.bf16):
        with torch.no_grad():
            next_actions, next_log_probs = squash(*actor(batch.next_obs), noise)
        obs, actions = torch.cat([batch.obs, batch.next_obs]), torch.cat([batch.actions, next_actions])
        (q1, next_q1), (q2, next_q2) = (q.chunk(2) for q in critics(obs, actions, training=True))
    next_values = torch.minimum(next_q1, next_q2).detach()
    target = soft_target(
        batch.rewards, batch.terminated, next_values, next_log_probs, log_alpha.exp(), args.gamma
    )
    loss = 0.5 * (F.mse_loss(q1, target) + F.mse_loss(q2, target))
    gradient = torch.autograd.grad(loss, list(critics.parameters()))
    norm = torch.stack([g.norm() for g in gradient]).norm()
    scalars = {"losses/qf_loss": loss, "losses/qf1_values": q1.mean(), "losses/qf2_values": q2.mean()}
    scalars |= {"values/predictions": q1, "values/targets": target, "losses/grad_norm": norm}
    return gradient, {tag: x.detach() for tag, x in scalars.items()}


def crossq_actor_gradient(
    actor: RenormActor, critics: RenormCritics, log_alpha: Tensor, obs: Tensor, noise: Tensor, args: Args
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradient of the policy's loss by its parameters, of the temperature's; what is logged.

    A training pass of the policy, which the critics judge by their running statistics.
    """
    with torch.autocast(noise.device.type, torch.bfloat16, enabled=args.bf16):
        actions, log_probs = squash(*actor(obs, training=True), noise)
        values = torch.minimum(*critics(obs, actions))
    loss = (log_alpha.exp() * log_probs - values).mean()
    gradient = torch.autograd.grad(loss, list(actor.parameters()))
    entropy = -log_probs.detach().mean()
    alpha_gradient = entropy + noise.shape[-1]  # of -log alpha (log pi + H), H minus the number of actions
    scalars = {"losses/actor_loss": loss.detach(), "losses/entropy": entropy, "losses/alpha": log_alpha.exp()}
    scalars["losses/alpha_loss"] = log_alpha * alpha_gradient
    return [*gradient, alpha_gradient], scalars


def make_envs(args: Args, num_envs: int, render: bool = False) -> gym.vector.SyncVectorEnv:
    """num_envs copies of the environment, each reset in the step that ends its episode."""
    import mujoco  # fails where MUJOCO_GL names a renderer that is not installed

    # Loading v4's models, MuJoCo would log a deprecation to a file in the working directory.
    mujoco.set_mju_user_warning(lambda text: "deprecated" in text or print(text, file=sys.stderr))
    mode = {"render_mode": "rgb_array"} if render else {}
    vector_kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec(args.env_id, num_envs, "sync", vector_kwargs, **mode)
    if render and (renderer := getattr(envs.envs[0].unwrapped, "mujoco_renderer", None)):
        # Unasked, Gymnasium 1.4 leaves the camera where it is, and the ground ends after 20 or 40 m.
        model = renderer.model
        renderer.camera_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        model.geom_size[model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE] *= 25
        model.mat_texrepeat *= 25
    return envs


def make_agent(args: Args, envs: gym.vector.VectorEnv) -> RenormActor:
    """A new policy for these environments."""
    spaces = envs.single_observation_space, envs.single_action_space
    flat = all(isinstance(space, gym.spaces.Box) and len(space.shape) == 1 for space in spaces)
    if not flat or not spaces[1].is_bounded():
        error(f"CrossQ needs flat Boxes of observations and of bounded actions; {args.env_id} has {spaces}")
    return RenormActor(spaces[0].shape[0], spaces[1].shape[0], args.policy_hidden_size)


def scale_actions(actions: Tensor, space: gym.spaces.Box) -> np.ndarray:
    """Actions in [-1, 1] to those of the box, both (num_envs, action_dim)."""
    return space.low + 0.5 * (actions.cpu().numpy() + 1) * (space.high - space.low)


def make_policy(args: Args, agent: RenormActor, space: gym.spaces.Box) -> Callable:
    """A function from observations (num_envs, obs_dim) and a NumPy generator to actions within the box."""
    device = next(agent.parameters()).device

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal((len(obs), *space.shape), dtype=np.float32)
        with torch.no_grad():
            mean, log_std = agent(torch.from_numpy(obs).float().to(device))
            noise = torch.zeros_like(mean) if args.greedy else torch.from_numpy(noise).to(device)
            return scale_actions(squash(mean, log_std, noise)[0], space)

    return act


def train(args: Args) -> None:
    """Train one agent; all that it leaves behind is in its run folder."""
    device = prepare(args)
    envs = make_envs(args, args.num_envs)
    actor = make_agent(args, envs).to(device)
    space, obs_dim = envs.single_action_space, envs.single_observation_space.shape[0]
    critics = RenormCritics(obs_dim, space.shape[0], args.critic_hidden_size).to(device)
    log_alpha = nn.Parameter(torch.zeros((), device=device), requires_grad=False)
    temperature = nn.ParameterDict({"log_alpha": log_alpha})
    actor_parameters, critic_parameters = [*actor.parameters(), log_alpha], list(critics.parameters())
    betas = (0.5, 0.999)
    actor_optimizer = torch.optim.Adam(actor_parameters, args.policy_lr, betas, fused=True)
    critic_optimizer = torch.optim.Adam(critic_parameters, args.q_lr, betas, fused=True)
    buffer = ReplayBuffer(args.buffer_size, obs_dim, space.shape[0], device)
    compute_critic_gradient, compute_actor_gradient = crossq_critic_gradient, crossq_actor_gradient
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        options = {"cpp_wrapper": device.type == "cpu"}  # calls the compiled kernels from C++
        compute_critic_gradient = torch.compile(crossq_critic_gradient, fullgraph=True, options=options)
        compute_actor_gradient = torch.compile(crossq_actor_gradient, fullgraph=True, options=options)
    run = Run(
        args,
        log_interval=1000,
        agent=actor,
        critics=critics,
        temperature=temperature,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
        buffer=buffer,
    )

    while not run.over:
        if run.fresh:  # at the start and after each checkpoint: so a resumed run has nothing to restore here
            obs, _ = envs.reset(seed=run.seed(0))
            rng = torch.Generator(device).manual_seed(run.seed(1))
            episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)

        # Collect a step of each environment.
        noise = torch.randn(args.num_envs, *space.shape, generator=rng, device=device)
        if run.global_step < args.learning_starts:
            actions = 2 * torch.rand(noise.shape, generator=rng, device=device) - 1
        else:
            with torch.no_grad():
                actions, _ = squash(*actor(torch.from_numpy(obs).float().to(device)), noise)
        scaled_actions = scale_actions(actions, space)
        run.require_finite(action=scaled_actions[None])
        next_obs, rewards, terminated, truncated, info = envs.step(scaled_actions)
        episode_return += rewards
        episode_length += 1
        done, last_obs, episodes = terminated | truncated, next_obs, []
        if done.any():  # next_obs is by then the first one of the next episode (SAME_STEP)
            last_obs = next_obs.copy()
            last_obs[done] = np.stack(info["final_obs"][done])
            episodes = list(zip(episode_return[done].tolist(), episode_length[done].tolist(), strict=True))
            episode_return[done], episode_length[done] = 0, 0
        run.require_finite(observation=last_obs[None], reward=rewards[None])
        buffer.add(obs, actions.cpu().numpy(), last_obs, rewards, terminated)
        obs = next_obs

        # An update for each step.
        scalars = {}
        for step in range(max(run.global_step, args.learning_starts), run.global_step + args.num_envs):
            batch = buffer.sample(args.batch_size, rng)
            noise = torch.randn(batch.actions.shape, generator=rng, device=device)
            gradient, critic_scalars = compute_critic_gradient(actor, critics, log_alpha, batch, noise, args)
            for p, g in zip(critic_parameters, gradient, strict=True):
                p.grad = g
            critic_optimizer.step()
            scalars |= critic_scalars
            if step % args.policy_frequency == 0:
                noise = torch.randn(batch.actions.shape, generator=rng, device=device)
                gradient, actor_scalars = compute_actor_gradient(
                    actor, critics, log_alpha, batch.obs, noise, args
                )
                for p, g in zip(actor_parameters, gradient, strict=True):
                    p.grad = g
                actor_optimizer.step()
                scalars |= actor_scalars
        run.end_iteration(args.num_envs, scalars, episodes)


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
