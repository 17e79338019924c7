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

    total         r_0 + r_1 + ... + r_T, the return: each action answers for every reward, so that each term
                  has the noise of a whole episode. The mean is the gradient of the expected return.
    discounted    r_0 + gamma r_1 + gamma^2 r_2 + ...: total, where later rewards count for less: fewer noisy
                  terms in the sum. The mean is the gradient of the expected discounted return.
    reward-to-go  r_t + gamma r_t+1 + ...: discounted, without the rewards before a_t, which it cannot change:
                  E[r_k grad log pi(a_t|s_t)] = 0 for k < t, so they were noise only. The rest is divided by
                  gamma^t, as is usual, for late steps to count as much as early ones.
    baseline      reward-to-go - V(s_t), V learned: E[V(s_t) grad log pi(a_t|s_t)] = 0 likewise, since V(s_t)
                  is the same for every a_t. What the state alone lets expect is noise no more.

Where a time limit cuts an episode off (truncated, not terminated), the first three take the sum as it is, the
return of the game with that limit. baseline, which knows what to expect, adds gamma V(s_T+1) to r_T.

    python reinforce_cartpole.py --estimator baseline --greedy                   trains
    python reinforce_cartpole.py --resume runs/RUN                               goes on from a checkpoint
    python reinforce_cartpole.py --evaluate runs/RUN --greedy --capture-video    plays

A run is a function of its arguments: for each batch of episodes every generator is reseeded and the
environments are reset from (seed, global step), so that a run that was killed or stopped, and resumed, ends
with the same bits as one that was not.
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
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "reinforce_cartpole"
PACKAGES = ("gymnasium", "numpy", "torch")


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """Gymnasium environment with a flat Box observation and Discrete actions"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 500_000
    """environment steps to train for, over all environments; rounded up to whole batches"""
    total_episodes: int = 1000
    """episodes to train for, if they end before --total-timesteps do; rounded up to whole batches"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the update runs (auto: CUDA if there is one); actions are always computed on the CPU"""
    torch_threads: int = 1
    """CPU threads of PyTorch; small networks are fastest on one"""
    run_dir: Path | None = None
    """folder of this run (default: runs/<env id>__reinforce_cartpole__seed<seed>__<unix time>)"""
    resume: Path | None = None
    """run folder to go on with, under its own settings; flags given beside this one override them"""
    evaluate: Path | None = None
    """model.pt or run folder to play --eval-episodes with, instead of training"""
    greedy: bool = False
    """evaluate the mode of the policy instead of sampling from it"""
    eval_interval: int = 10_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
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
    """Whether a step is its episode's first, from whether it is its last (done); (num_steps, num_envs)."""
    return torch.cat([torch.ones_like(done[:1]), done[:-1]])


def estimator_weights(estimator: str, rewards: Tensor, done: Tensor, values: Tensor, gamma: float) -> Tensor:
    """Weights w_t of grad log pi(a_t|s_t), see the module's docstring; all shapes (num_steps, num_envs).

    Only baseline looks at the values.
    """
    to_go = rewards_to_go(rewards, done, 1.0 if estimator == "total" else gamma)
    if estimator in ("reward-to-go", "baseline"):
        return to_go - values if estimator == "baseline" else to_go
    starts = episode_starts(done)
    return discounted_cumsum(to_go * starts, (~starts).to(to_go.dtype), torch.zeros_like(to_go[0]))


def policy_loss(log_probs: Tensor, weights: Tensor, num_episodes: int) -> Tensor:
    """What has minus the estimate as its gradient; log_probs and weights are (batch,).

    Divided by the number of steps, which is random, the estimate would be biased towards short episodes.
    """
    return -(weights * log_probs).sum() / num_episodes


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


def make_gym_envs(env_id: str, num_envs: int, render: bool = False) -> gym.vector.SyncVectorEnv:
    """num_envs copies of an environment, each reset in the step that ends its episode."""
    mode = {"render_mode": "rgb_array"} if render else {}
    vector_kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    with warnings.catch_warnings(action="ignore"):
        try:
            envs = gym.make_vec(env_id, num_envs, "sync", vector_kwargs, **mode)
            if render:
                envs.reset()
                envs.envs[0].render()
        except Exception as exception:  # of any kind: the environment is the user's choice
            error(f"cannot make {'a video of ' if render else ''}--env-id {env_id}: {exception}")
    return envs


def make_categorical_agent(args: Args, envs: gym.vector.VectorEnv, state: dict | None) -> CategoricalAgent:
    """An agent for these environments: a new one, or that of a saved state."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    flat_obs = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
    if not flat_obs or not isinstance(action_space, gym.spaces.Discrete):
        spaces = f"a {obs_space} and a {action_space}"
        error(f"{SCRIPT} needs a flat Box of observations and Discrete actions; {args.env_id} has {spaces}")
    agent = CategoricalAgent(obs_space.shape[0], int(action_space.n), args.hidden_size)
    if state is not None:
        try:
            agent.load_state_dict(state["agent"])
        except (KeyError, RuntimeError):
            error(f"the saved weights do not fit {args.env_id} and --hidden-size {args.hidden_size}")
    return agent


def make_categorical_policy(agent: CategoricalAgent, space: gym.spaces.Discrete, greedy: bool) -> Callable:
    """A function from observations (num_envs, obs_dim) and a NumPy generator to actions (num_envs,).

    The largest of the logits plus Gumbel noise is a sample of their softmax. On a few rows PyTorch is mostly
    overhead: 50 us a step, against 12 in NumPy. The weights are copied: this is made anew after each update.
    """
    w1, b1, w2, b2, w3, b3 = [p.detach().cpu().numpy().T for p in agent.actor.parameters()]

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        logits = np.tanh(np.tanh(obs @ w1 + b1) @ w2 + b2) @ w3 + b3
        return space.start + np.argmax(logits if greedy else logits + rng.gumbel(size=logits.shape), axis=-1)

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
    run_dir, state, device = open_run(args, "agent", "optimizer", "recent", "global_step", "episodes")
    if args.batch_episodes % args.num_envs:
        sizes = f"--batch-episodes {args.batch_episodes}", f"--num-envs {args.num_envs}"
        error(f"{sizes[0]} are not the same number for each of {sizes[1]}")
    eval_envs = make_gym_envs(args.env_id, min(args.eval_episodes, 10), args.capture_video)
    envs = make_gym_envs(args.env_id, args.num_envs)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    agent = make_categorical_agent(args, envs, state).to(device)
    optimizer = torch.optim.Adam([{"params": net.parameters()} for net in (agent.actor, agent.critic)])
    recent = deque(maxlen=100)  # (return, length) of the latest training episodes
    global_step = episodes = 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        recent.extend(state["recent"])
        global_step, episodes = state["global_step"], state["episodes"]

    def checkpoint() -> None:
        settings = {k: v for k, v in asdict(args).items() if not isinstance(v, Path)}
        policy = {"script": SCRIPT, "args": settings, "global_step": global_step, "agent": agent.state_dict()}
        save(policy, run_dir / "model.pt")
        rest = {"optimizer": optimizer.state_dict(), "recent": list(recent), "episodes": episodes}
        save(policy | rest, run_dir / "checkpoint.pt")

    def progress() -> float:
        """Share of the run that is done."""
        return max(global_step / args.total_timesteps, episodes / args.total_episodes)

    def minimize(loss: Tensor) -> float:
        """One step of the network that the loss depends on; returns the gradient's norm before clipping."""
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        if not (loss + norm).isfinite():
            log.close()
            last = f"the last checkpoint is {run_dir / 'checkpoint.pt'}"
            sys.exit(f"error: non-finite loss or gradient in the update at step {global_step}; {last}")
        optimizer.step()
        return norm.item()

    interrupts = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: interrupts.append(number))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exception:
        error(f"cannot make the run folder: {exception}")
    if not state:
        checkpoint()
    log = RunLog(args, run_dir, global_step)
    space, stop = envs.single_action_space, False
    while progress() < 1 and not stop:
        started, previous_step = time.perf_counter(), global_step
        decay = 1 - progress() if args.anneal_lr else 1
        actor_group, critic_group = optimizer.param_groups
        actor_group["lr"], critic_group["lr"] = args.learning_rate * decay, args.value_learning_rate * decay

        # Collect. Each environment plays its share, and what it does while others finish theirs is not
        # counted: the first episodes to end would be the short ones.
        obs, _ = envs.reset(seed=derive_seed(args.seed, global_step, 0))
        rng = np.random.default_rng(derive_seed(args.seed, global_step, 1))
        policy = make_categorical_policy(agent, space, greedy=False)
        remaining, steps = np.full(args.num_envs, args.batch_episodes // args.num_envs), []
        while remaining.any():
            action, counted = policy(obs, rng), remaining > 0
            reset_obs, reward, terminated, truncated, info = envs.step(action)
            next_obs, done = reset_obs.copy(), terminated | truncated
            if "final_obs" in info:
                next_obs[done] = np.stack(info["final_obs"][done])
            steps.append((obs, next_obs, action - space.start, reward, terminated, done, counted))
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
        global_step, episodes = global_step + len(obs), episodes + len(returns)

        # Update.
        log_probs = F.log_softmax(agent.actor(obs), dim=-1)
        loss = policy_loss(log_probs.gather(-1, actions).squeeze(-1), weights, args.batch_episodes)
        scalars = {
            "losses/policy_loss": loss.item(),
            "losses/grad_norm": minimize(loss),
            "losses/entropy": -(log_probs.exp() * log_probs).sum(-1).mean().item(),
            "values/advantages": weights.mean().item(),
        }
        if args.estimator == "baseline":
            targets = values + weights
            for _ in range(args.value_epochs):
                value_loss = 0.5 * F.mse_loss(agent.critic(obs).squeeze(-1), targets)
                minimize(value_loss)
            scalars |= {
                "losses/value_loss": value_loss.item(),
                "losses/explained_variance": explained_variance(values, targets).item(),
                "values/predictions": values.mean().item(),
                "values/targets": targets.mean().item(),
            }

        # Log.
        recent.extend(zip(returns.tolist(), lengths.tolist(), strict=True))
        scalars |= {
            "charts/episodes": episodes,
            "charts/episodic_return": returns.mean().item(),
            "charts/episodic_length": lengths.mean().item(),
            "charts/return_mean_100": np.mean(recent, axis=0)[0],
            "charts/learning_rate": args.learning_rate * decay,
            "charts/SPS": len(obs) / (time.perf_counter() - started),
        }
        log.scalars(scalars, global_step)

        # Evaluate.
        intervals = (args.eval_interval or math.inf, args.checkpoint_interval)
        eval_due, checkpoint_due = (global_step // n > previous_step // n for n in intervals)
        if eval_due or (progress() >= 1 and args.eval_interval):
            video = Path("videos", run_dir.name, f"step_{global_step}.mp4") if args.capture_video else None
            policy = make_categorical_policy(agent, space, args.greedy)
            seed = derive_seed(args.seed, global_step, 2)
            eval_returns, eval_lengths = evaluate(policy, eval_envs, args.eval_episodes, seed, video)
            eval_mean = log.evaluation(eval_returns, eval_lengths, global_step)
            stop = args.stop_at_return is not None and eval_mean >= args.stop_at_return

        # Checkpoint.
        stop = stop or bool(interrupts)
        if checkpoint_due or progress() >= 1 or stop:
            log.tensorboard.flush()  # a run that resumes from here has logged what came before
            checkpoint()
    log.close()
    if interrupts:
        command = shlex.join(("python", sys.argv[0], "--resume", str(run_dir)))
        print(f"saved at step {global_step}; to go on: {command}")
        raise SystemExit(128 + interrupts[0])


# What `play` needs of this script.
make_envs, make_agent, make_policy = make_gym_envs, make_categorical_agent, make_categorical_policy


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
