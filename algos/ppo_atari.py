# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "ale-py~=0.12.1",
#     "gymnasium~=1.4.0",
#     "imageio[ffmpeg]~=2.37",
#     "numpy~=2.4",
#     "tensorboard~=2.21",
#     "torch~=2.13.0",
#     "tqdm~=4.67",
#     "tyro~=1.0",
#     "wandb~=0.31",
# ]
# ///
"""Proximal policy optimization (PPO) on Atari games.

Schulman et al. 2017, arXiv 1707.06347, with the advantages of Schulman et al. 2015, arXiv 1506.02438 (GAE).
Each rollout is used for several epochs of minibatches. With r = pi(a|s) / pi_old(a|s) and the advantage A
from GAE, PPO maximises

    E[min(r A, clip(r, 1 - eps, 1 + eps) A)] - vf_coef/2 E[(V(s) - R)^2] + ent_coef H(pi),   R = A + V_old(s).

    python ppo_atari.py --env-id PongNoFrameskip-v4                     trains
    python ppo_atari.py --resume runs/RUN                               goes on from the last checkpoint
    python ppo_atari.py --evaluate runs/RUN --greedy --capture-video    plays whole games for their score

Not in the paper but in OpenAI's code (Huang et al. 2022, "The 37 implementation details of PPO"): orthogonal
weights, the gradient's norm clipped; and, by flags, advantages normalised in each minibatch and the value's
change clipped as the ratio is, with which the agent learns later (algos/README.md), as it does with their
lambda of 0.95. In neither: a time limit is no end, and what it cuts off is bootstrapped.

In training a reward counts by its sign and a lost life as the end of an episode, after which the game goes
on; every return that is reported is the score of a whole game. A step is an action, which lasts 4 frames.
"""

import ctypes
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

if __name__ == "__main__" and sys.platform == "linux":
    # How often idle threads of PyTorch look for work before they sleep; read as it is loaded. If too often,
    # they keep the cores from the games' threads; if never, each layer has to wake them.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # Keep the memory that an update frees for the next one. Given back to the system, it has to be taken from
    # there anew, page by page: a tenth of the time.
    libc = ctypes.CDLL(None)
    for parameter in (-1, -2, -3):  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(parameter, 2**30)  # bytes
    # In huge pages, of which the processor looks up fewer, the first 2**30 save a thirtieth of the time.
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(2**24)))  # now that many are there, up to sbrk(0)
    libc.madvise(ctypes.c_void_p(libc.sbrk(0) - 2**30), ctypes.c_size_t(2**30), 14)  # MADV_HUGEPAGE

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from ale_py.vector_env import AtariVectorEnv
from torch import Tensor, nn


@dataclass
class Args:
    num_envs: int = 8
    """parallel games"""
    num_steps: int = 128
    """steps of each game in one rollout"""
    num_minibatches: int = 4
    """minibatches of one epoch"""
    update_epochs: int = 4
    """passes over each rollout"""
    learning_rate: float = 5e-4
    """step size of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 at --total-timesteps"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.65
    """lambda of GAE: 0 gives one-step advantages, 1 multi-step ones"""
    norm_adv: bool = False
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate objective"""
    anneal_clip: bool = True
    """let epsilon fall linearly to 0 at --total-timesteps"""
    clip_vloss: bool = False
    """clip the value function's change by epsilon too"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient over all parameters"""
    bf16: bool = False
    """compute all layers but the heads in bfloat16 (autocast): faster where the processor has it"""

    env_id: str = "PongNoFrameskip-v4"
    """Atari game under one of Gymnasium's names: PongNoFrameskip-v4, ALE/Pong-v5 (sticky actions), ..."""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 10_000_000
    """environment steps to train for, over all environments; rounded up to whole rollouts"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the network runs (auto: CUDA if there is one); the games always run on the CPU"""
    torch_threads: int = torch.get_num_threads()
    """CPU threads of PyTorch, and of the games; part of what determines the run"""
    eval_interval: int = 250_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """whole games of one evaluation"""
    greedy: bool = False
    """evaluate the mode of the policy instead of sampling from it"""
    checkpoint_interval: int = 50_000
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
RANGES |= {"stop_at_return": (-sys.float_info.max, sys.float_info.max)}


def convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """A layer with that weight, of pictures (batch, channels, height, width); its stride divides the width.

    For the gradient on a CPU, the pixels of a row that the stride steps over count as one with as many times
    the channels: a view in channels_last, and the same sums. With AVX512 it takes nine tenths of the time, in
    bfloat16 that of the first layer less than half.
    """
    stride = layer.stride
    if x.device.type == "cpu" and torch.is_grad_enabled():
        x, weight = (
            y.permute(0, 2, 3, 1).unflatten(2, (-1, stride[1])).flatten(3).permute(0, 3, 1, 2)
            for y in (x, weight)
        )
        stride = stride[0], 1
    return F.conv2d(x, weight, layer.bias, stride)


class AtariNetwork(nn.Module):
    """The network of Mnih et al. 2015 (Nature 518, p. 529) below its heads.

    Orthogonal weights with gain sqrt 2; biases zero. With layer_norm what a layer computes is normalised over
    each sample, before its relu. With bf16 the layers compute in bfloat16.
    """

    def __init__(self, bf16: bool, layer_norm: bool = False):
        super().__init__()
        self.bf16 = bf16
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.hidden = nn.Linear(7 * 7 * 64, 512)  # of rows, columns, channels
        self.layers = (self.conv1, self.conv2, self.conv3, self.hidden)
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)
        norms = [nn.GroupNorm(1, len(x.bias)) if layer_norm else nn.Identity() for x in self.layers]
        self.norms = nn.ModuleList(norms)  # of one group: over all of a sample
        self.to(memory_format=torch.channels_last)  # for which convolutions take three quarters of the time

    def features(self, obs: Tensor) -> Tensor:
        """What the heads take, (batch, 512), of observations (batch, 4, 84, 84)."""
        # Grey levels to 255, exact in bfloat16 too: the first weights are scaled instead, which are fewer.
        x = obs.contiguous(memory_format=torch.channels_last)
        x = x.to(torch.bfloat16 if self.bf16 else self.conv1.weight.dtype)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            for layer, norm in zip(self.layers, self.norms, strict=True):
                if layer is self.hidden:
                    x = layer(x.permute(0, 2, 3, 1).flatten(1))  # a view, in channels_last
                else:
                    x = convolution(layer, x, layer.weight / 255 if layer is self.conv1 else layer.weight)
                x = F.relu_(norm(x))
        return x.float()


class AtariAgent(AtariNetwork):
    """A policy's and a critic's head on one network.

    Their weights are orthogonal, with gain 0.01 for the policy and for a critic of actions, whose first
    differences between them mean nothing, and 1 for a critic of states; biases zero.
    """

    def __init__(self, num_actions: int, num_values: int, bf16: bool):
        super().__init__(bf16)
        self.policy = nn.Linear(512, num_actions)
        self.critic = nn.Linear(512, num_values)
        for head, gain in ((self.policy, 0.01), (self.critic, 1.0 if num_values == 1 else 0.01)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, num_actions) and values (batch, num_values) of observations (batch, 4, 84, 84)."""
        features = self.features(obs)
        return self.policy(features), self.critic(features)


def sample_actions(logits: Tensor, rng: torch.Generator) -> Tensor:
    """Actions (batch,) with the probabilities softmax(logits), for logits (batch, num_actions).

    With E exponential, -log E is Gumbel noise, and the largest of logits with it is such a sample.
    """
    return (logits - torch.empty_like(logits).exponential_(generator=rng).log()).argmax(-1)


def log_probs_and_entropies(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Both (batch,), in nats, of actions (batch,) and of logits (batch, num_actions)."""
    log_probs = F.log_softmax(logits, -1)
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


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


class AtariGames(AtariVectorEnv):
    """Parallel games in ale-py's own threads; with render, the first one twice, for its colours.

    A life begins with FIRE, for which some games wait, as a game does: in the step after a lost life that is
    what they take, whatever the agent's action.

    ALE cannot save these games. But how one stands follows from the last seed and the actions since, and so
    state_dict holds those, and load_state_dict plays them again. After `seed_interval` steps the next game
    begins from a new seed, so that they stay few.
    """

    seed_interval = 6_000  # more often, seeds would cost time: with one, a reset takes 15 times as long

    def __init__(self, num_envs: int, render: bool, **settings):
        settings |= {"autoreset_mode": "SameStep", "reward_clipping": False}
        super().__init__(num_envs=num_envs, num_threads=torch.get_num_threads(), **settings)
        self.metadata = self.metadata | {"render_fps": 15}  # of an Atari's 60 frames a second
        self.envs, self.film = [self], None
        has_fire = self.ale.get_action_set()[1] == ale_py.Action.FIRE  # at 1 in all games of several lives
        self.fires = has_fire and settings.get("use_fire_reset", True)
        if render:
            size = {"stack_num": 1, "img_height": 210, "img_width": 160}
            self.film = AtariVectorEnv(num_envs=1, grayscale=False, **size, **settings)
        # Of each game a seed, and which was the first action after it; of all, the actions since the first.
        self.seeds, self.first, self.actions = *np.zeros((2, num_envs), int), []

    def new_seeds(self, seed: int | np.ndarray | None) -> np.ndarray:
        """One for each game; ale-py would take 31 bits of the seed itself, and give them consecutive ones."""
        return np.random.SeedSequence(seed).generate_state(self.num_envs).astype(int) >> 1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.seeds, self.actions = self.new_seeds(seed), []
        self.returns, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        self.lost = np.zeros(self.num_envs, bool)
        return self.start(~self.lost)

    def start(self, games: np.ndarray) -> tuple:
        """Start those games, a mask (num_envs,), from their seeds; returns what a reset does, of all."""
        self.first[games] = len(self.actions)
        self.actions, self.first = self.actions[self.first.min() :], self.first - self.first.min()
        self.lost[games], self.returns[games], self.lengths[games] = False, 0, 0
        if self.film and games[0]:
            self.picture, _ = self.film.reset(seed=self.seeds[:1])
        self.obs, info = super().reset(seed=self.seeds[games], options={"reset_mask": games})
        self.lives, self.frame_number = info["lives"], info["episode_frame_number"]
        return self.obs, info

    def step(self, actions: np.ndarray) -> tuple:
        """As in Gymnasium; info["games"] is a list of (return, length) of those that ended, not of lives."""
        if self.fires:
            actions = np.where(self.lost, 1, actions)
        self.actions.append(actions.astype(np.uint8))
        if self.film:
            self.picture = self.film.step(actions[:1])[0]
        self.obs, reward, *ends, info = super().step(actions)
        self.lost, self.lives = info["lives"] < self.lives, info["lives"]
        over = info["episode_frame_number"] < self.frame_number
        self.frame_number = info["episode_frame_number"]
        self.returns += reward
        self.lengths += 1
        info["games"] = list(zip(self.returns[over].tolist(), self.lengths[over].tolist(), strict=True))
        self.returns[over], self.lengths[over] = 0, 0
        over &= len(self.actions) - self.first >= self.seed_interval
        if over.any():
            self.seeds = np.where(over, self.new_seeds(self.seeds), self.seeds)
            info |= self.start(over)[1]
        return self.obs, reward, *ends, info

    def state_dict(self) -> dict[str, Tensor]:
        """Seeds and indices of the first actions, (num_envs,), and the actions, (steps, num_envs)."""
        actions = np.reshape(self.actions, (-1, self.num_envs)).astype(np.uint8)
        state = {"seeds": self.seeds, "first": self.first, "actions": actions}
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        seeds, first, actions = (state[name].numpy().copy() for name in ("seeds", "first", "actions"))
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} games, not {self.num_envs}")
        self.reset()
        for t, actions_t in enumerate(progress_bar(iterable=actions, desc="games so far", leave=False)):
            if t in first:  # until then, that game was another
                self.seeds = seeds.copy()
                self.start(first == t)
            self.step(actions_t.astype(int))
        self.seeds, self.first, self.actions = seeds, first, list(actions)
        if len(actions) in first:
            self.start(first == len(actions))

    def render(self) -> np.ndarray:
        """The first game's screen at twice its size, (420, 320, 3)."""
        return self.picture[0, 0].repeat(2, 0).repeat(2, 1)


def make_envs(args: Args, num_envs: int, render: bool = False, life_loss: bool = False) -> AtariGames:
    """num_envs copies of a game, each reset in the step that ends it; life_loss: a lost life terminates too.

    A step lasts 4 frames; of the last two it shows the maximum, in grey and 84x84, and an observation is the
    last 4 such pictures, as in Mnih et al. 2015. Up to 30 frames pass before the first action.
    """
    gym.register_envs(ale_py)
    settings = dict(gym.spec(args.env_id).kwargs)
    if "game" not in settings:
        error(f"this plays Atari games; --env-id {args.env_id} is none")
    if settings.pop("frameskip") not in (1, 4):
        error(f"{args.env_id} skips a random number of frames; NoFrameskip-v4 or ALE/...-v5 do not")
    return AtariGames(num_envs, render, life_loss_info=life_loss, **settings)


def make_agent(args: Args, envs: gym.vector.VectorEnv) -> AtariAgent:
    """A new agent for these environments, whose critic values states."""
    return AtariAgent(int(envs.single_action_space.n), 1, args.bf16)


def graphed(agent: AtariNetwork, obs: Tensor) -> Callable:
    """The agent, for observations (batch, 4, 84, 84) of this batch size; on CUDA as a graph of its kernels.

    One launch for all of them takes less time than one for each. A call overwrites what the last returned.
    """
    if obs.device.type != "cuda":
        return agent
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph's stream is another
    return torch.cuda.make_graphed_callables(nn.Sequential(agent), (obs.clone(),))


def make_policy(args: Args, agent: AtariAgent, space: gym.spaces.Discrete) -> Callable:
    """A function from observations (num_envs, 4, 84, 84) and a NumPy generator to actions (num_envs,)."""

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        with torch.no_grad():
            logits = agent(torch.as_tensor(obs, device=agent.policy.weight.device))[0].cpu().numpy()
        return np.argmax(logits if args.greedy else logits + rng.gumbel(size=logits.shape), axis=-1)

    return act


def train(args: Args) -> None:
    """Train one agent; all that it leaves behind is in its run folder."""
    shape, batch_size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    if batch_size % args.num_minibatches or batch_size < 2 * args.num_minibatches:
        error(f"a rollout of {batch_size} steps is not {args.num_minibatches} equal minibatches of 2 or more")
    device = prepare(args)
    envs = make_envs(args, args.num_envs, life_loss=True)
    agent = make_agent(args, envs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    run = Run(args, log_interval=5_000, agent=agent, optimizer=optimizer, games=envs)
    # Observations as bytes, in the order in which the network wants them: once, and not in each epoch. With
    # the channels last in the shape too, index_select copies whole pictures: in a seventh of the time.
    channels, *size = envs.single_observation_space.shape
    obs_buffer = torch.empty((batch_size, *size, channels), dtype=torch.uint8, device=device)
    pictures = obs_buffer.permute(0, 3, 1, 2)  # as the agent takes them
    obs_by_step = pictures.unflatten(0, shape)
    learner = graphed(agent, pictures[: batch_size // args.num_minibatches])
    with torch.no_grad():
        actor = graphed(agent, obs_by_step[0])
    reward_buffer = np.zeros(shape, np.float32)
    terminated_buffer, done_buffer = np.zeros((2, *shape), bool)
    obs = envs.obs if run.global_step else envs.reset(seed=run.seed(0))[0]
    while not run.over:
        if run.fresh:  # at the start and after each checkpoint: so a resumed run has nothing to restore here
            rng = torch.Generator(device).manual_seed(run.seed(1))
        learning_rate = args.learning_rate * (1 - run.progress if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        clip_coef = args.clip_coef * (1 - run.progress if args.anneal_clip else 1)

        # Collect, into tensors made before: those of each step would cut up the heap (0.3 GB more).
        values, bootstraps = torch.zeros((2, *shape), device=device)
        logits = torch.empty((*shape, agent.policy.out_features), device=device)
        actions = torch.empty(shape, dtype=torch.int64, device=device)
        episodes = []
        # With autocast around it, the network's own casts the weights but once for all steps.
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=False):
            for t in range(args.num_steps):
                obs_by_step[t] = torch.from_numpy(obs)
                logits[t], value = actor(obs_by_step[t])
                values[t] = value.squeeze(-1)
                actions[t] = sample_actions(logits[t], rng)
                obs, reward, terminated_buffer[t], truncated, info = envs.step(actions[t].cpu().numpy())
                reward_buffer[t], done_buffer[t] = np.sign(reward), terminated_buffer[t] | truncated
                if truncated.any():  # then not terminated, says ale-py
                    # obs is by then the first one of the next game (SAME_STEP).
                    final_obs = torch.as_tensor(info["final_obs"][truncated], device=device)
                    bootstraps[t, torch.from_numpy(truncated)] = agent(final_obs)[1].squeeze(-1)
                episodes += info["games"]
            last_values = actor(torch.as_tensor(obs, device=device))[1].squeeze(-1)

        # Compute targets. Within an episode, a step leads to what the next one sees.
        buffers = (reward_buffer, terminated_buffer, done_buffer)
        rewards, terminated, done = (torch.as_tensor(buffer, device=device) for buffer in buffers)
        next_values = torch.where(done, bootstraps, torch.cat([values[1:], last_values.unsqueeze(0)]))
        advantages = gae(rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        targets = (x.flatten() for x in (values, advantages, advantages + values))
        actions = actions.flatten()
        log_probs, _ = log_probs_and_entropies(logits.flatten(0, 1), actions)
        rollout = Rollout(obs_buffer, actions, log_probs, *targets)

        # Update.
        for _ in range(args.update_epochs):
            steps = []
            order = torch.randperm(batch_size, generator=rng, device=device)
            for indices in order.chunk(args.num_minibatches):
                batch = Rollout(*(x.index_select(0, indices) for x in rollout))
                batch = batch._replace(obs=batch.obs.permute(0, 3, 1, 2))
                if args.norm_adv:
                    scale, center = torch.std_mean(batch.advantages)
                    batch = batch._replace(advantages=(batch.advantages - center) / (scale + 1e-8))
                logits, values = learner(batch.obs)
                log_probs, entropies = log_probs_and_entropies(logits, batch.actions)
                log_ratio, entropy = log_probs - batch.log_probs, entropies.mean()
                losses = ppo_loss(log_ratio, values.squeeze(-1), entropy, batch, clip_coef, args)
                optimizer.zero_grad()
                losses[0].backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                steps.append((log_ratio.detach(), torch.stack([*losses, entropy, norm]).detach()))
        log_ratio, losses = (torch.stack(x) for x in zip(*steps, strict=True))
        approx_kl = (log_ratio.exp() - 1 - log_ratio).mean()  # k3, joschu.net/blog/kl-approx.html

        names = ("total", "policy_loss", "value_loss", "entropy", "grad_norm")
        scalars = {f"losses/{name}": x for name, x in zip(names, losses.unbind(1), strict=True)} | {
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": ((log_ratio.exp() - 1).abs() > clip_coef).float(),
            "values/predictions": rollout.values,
            "values/targets": rollout.returns,
            "values/advantages": rollout.advantages,
            "charts/learning_rate": learning_rate,
            "charts/clip_coef": clip_coef,
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
