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
"""All-action actor-critic (the Q critic) on Atari games.

Sutton et al. 2001, "Comparing policy-gradient algorithms"; Mean Actor-Critic, Allen et al. 2017, arXiv
1709.00503; the expected form of Ciosek and Whiteson 2018, arXiv 1801.03326. The policy gradient theorem,

    grad J = E_s[grad_w sum_a pi(a|s; w) Q(s, a)],

has no sampled action in it. With a critic Q^ for Q, each update is one step of RMSprop up

    E[pg_coef sum_a pi(a|s) W(s, a) - vf_coef (R - Q^(s, a_t))^2] + ent_coef H(pi),   W taken as a constant:

Q^(s, a) with --baseline none, Q^(s, a) - V~(s) with --baseline value, where V~(s) = sum_a pi(a|s) Q^(s, a).
R is the n-step return: the rewards of the rollout from here on, and V~ of the state where it ends.

The sum buys a gradient without the variance of sampled actions. It costs bias wherever Q^ is wrong, about
actions that were not taken above all, which nothing corrects until they are. For a given Q^ the maximum at a
state is pi = softmax(pg_coef Q^ / ent_coef), so differences of many times ent_coef / pg_coef all but end
exploration, also where they are wrong. The baseline changes nothing:

    sum_a grad pi(a|s) (Q^(s, a) - V~(s)) = sum_a grad pi(a|s) Q^(s, a) - V~(s) grad sum_a pi(a|s),
    and sum_a pi(a|s) = 1 has the gradient 0.

    python qcritic_atari.py --env-id PongNoFrameskip-v4                     trains
    python qcritic_atari.py --resume runs/RUN                               goes on from the last checkpoint
    python qcritic_atari.py --evaluate runs/RUN --greedy --capture-video    plays whole games for their score

In training a reward counts by its sign and a lost life as the end of an episode, after which the game goes
on; every return that is reported is the score of a whole game. A step is an action, which lasts 4 frames.

RMSprop divides a gradient g by sqrt(E[g^2]) + eps, as PyTorch has it. TensorFlow's sqrt(E[g^2] + eps) makes
far smaller steps as long as gradients are small against sqrt(eps) = 0.003, as they are here: early on Pong
their norm is about 0.3 over 1.7 million weights, 0.0002 for one of them.

A run is a function of its arguments: at each checkpoint every generator is reseeded and the environments are
reset from (seed, global step), so that a run that was killed and resumed ends with the same bits as one that
was not. A run ended by Ctrl-C or SIGTERM saves where it stands: one such point more than an uninterrupted run
has.
"""

import contextlib
import csv
import ctypes
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
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

if __name__ == "__main__":
    # How often idle threads of PyTorch look for work before they sleep; read as it is loaded. Too often keeps
    # the cores from the games' threads, never means to wake them for each layer.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "qcritic_atari"
PACKAGES = ("ale-py", "gymnasium", "numpy", "torch")
LOG_INTERVAL = 5_000  # environment steps
ACTION_VALUES = True  # whether the critic has an output for each action


@dataclass
class Args:
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
    run_dir: Path | None = None
    """folder of this run (default: runs/<env id>__qcritic_atari__seed<seed>__<unix time>)"""
    resume: Path | None = None
    """run folder to go on with, under its own settings; flags given beside this one override them"""
    evaluate: Path | None = None
    """model.pt or run folder to play --eval-episodes with, instead of training"""
    greedy: bool = False
    """evaluate the mode of the policy instead of sampling from it"""
    eval_interval: int = 250_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """whole games of one evaluation"""
    checkpoint_interval: int = 250_000
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

    baseline: Literal["none", "value"] = "value"
    """what is subtracted from the Q values that weigh the actions: nothing, or their mean under the policy"""
    num_envs: int = 16
    """parallel games"""
    num_steps: int = 5
    """steps of each game in one rollout: the n of the n-step returns"""
    learning_rate: float = 7e-4
    """step size of RMSprop"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 at --total-timesteps"""
    rms_alpha: float = 0.99
    """smoothing of RMSprop's mean of squared gradients"""
    rms_eps: float = 1e-5
    """epsilon of RMSprop, outside the root"""
    gamma: float = 0.99
    """discount factor"""
    pg_coef: float = 1.0
    """coefficient of the policy loss"""
    ent_coef: float = 0.02
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient over all parameters"""
    bf16: bool = False
    """compute all layers but the heads in bfloat16 (autocast): faster where the processor has it"""


# What a number may be, where that is not anything above 0.
RANGES = dict.fromkeys(("seed", "eval_interval", "pg_coef", "ent_coef", "vf_coef"), (0, 2**32))
RANGES |= dict.fromkeys(("gamma", "rms_alpha"), (0, 1))
RANGES |= {"stop_at_return": (-sys.float_info.max, sys.float_info.max)}


class AtariAgent(nn.Module):
    """The network of Mnih et al. 2015 (Nature 518, p. 529), with a policy's and a critic's head.

    Orthogonal weights, with gain sqrt 2, 0.01 for the policy and for a critic of actions, whose first
    differences between them mean nothing, 1 for a critic of states; biases zero. The hidden layer is fully
    connected, to pictures of 7x7; as a convolution it takes half the time in float32. With bf16, all but the
    heads is computed in bfloat16.
    """

    def __init__(self, num_actions: int, num_values: int, bf16: bool):
        super().__init__()
        self.bf16 = bf16
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.hidden = nn.Conv2d(64, 512, 7)
        self.policy = nn.Linear(512, num_actions)
        self.critic = nn.Linear(512, num_values)
        for layer in self.children():
            heads = {self.policy: 0.01, self.critic: 0.01 if ACTION_VALUES else 1.0}
            gain = heads.get(layer, math.sqrt(2))
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, num_actions) and values (batch, num_values) of observations (batch, 4, 84, 84)."""
        return self.heads(self.activations(obs)[-1])

    def activations(self, obs: Tensor) -> list[Tensor]:
        """What goes into each layer below the heads, and what comes out of the last: (batch, 512, 1, 1)."""
        # With the channels last, convolutions take three quarters of the time.
        activations = [obs.contiguous(memory_format=torch.channels_last) * (1 / 255)]
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            for layer in (self.conv1, self.conv2, self.conv3, self.hidden):
                activations.append(F.relu(layer(activations[-1])))
        return activations

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values of the last activations."""
        x = x.flatten(1).float()
        return self.policy(x), self.critic(x)

    def backward(self, activations: list[Tensor], grad: Tensor) -> None:
        """Set the gradients of all weights below the heads, grad being that of the last activations."""
        layers = (self.conv1, self.conv2, self.conv3, self.hidden)
        for layer, x, y in reversed(list(zip(layers, activations, activations[1:], strict=False))):
            grad = torch.ops.aten.threshold_backward(grad, y, 0)  # of relu
            convolution = ([len(layer.bias)], layer.stride, (0, 0), (1, 1), False, (0, 0), 1)
            needed = [layer is not self.conv1, True, True]
            grad, weight_grad, bias_grad = torch.ops.aten.convolution_backward(
                grad, x.to(y.dtype), layer.weight.to(y.dtype), *convolution, needed
            )
            layer.weight.grad, layer.bias.grad = weight_grad.float(), bias_grad.float()


def sample_actions(logits: Tensor, rng: torch.Generator) -> Tensor:
    """Actions (batch,) with the probabilities softmax(logits), for logits (batch, num_actions).

    With E exponential, -log E is Gumbel noise, and the largest of logits with it is such a sample.
    """
    return (logits - torch.empty_like(logits).exponential_(generator=rng).log()).argmax(-1)


def discounted_cumsum(x: Tensor, discounts: Tensor, start: Tensor) -> Tensor:
    """y_t = x_t + discounts_t y_(t-1) with y_(-1) = start; x, discounts and y (num_steps, num_envs)."""
    sums = []
    for x_t, discount in zip(x.unbind(), discounts.unbind(), strict=True):
        start = torch.addcmul(x_t, discount, start)
        sums.append(start)
    return torch.stack(sums)


def n_step_returns(
    rewards: Tensor, bootstraps: Tensor, done: Tensor, last_values: Tensor, gamma: float
) -> Tensor:
    """Returns of a rollout, arXiv 1602.01783, algorithm S3; all shapes (num_steps, num_envs) but one.

    R_t = r_t + gamma R_(t+1) within an episode; where step t ends one (done), bootstraps[t] stands for
    R_(t+1): 0 if it terminated, the value of the last observation if it was truncated. After the last step
    follow last_values (num_envs,).
    """
    rewards = rewards + gamma * torch.where(done, bootstraps, 0.0)
    discounts = gamma * (~done).to(rewards.dtype)
    return discounted_cumsum(rewards.flip(0), discounts.flip(0), last_values).flip(0)


def expected_values(logits: Tensor, q_values: Tensor) -> Tensor:
    """V~ (batch,), the mean of q_values under the policy softmax(logits), both (batch, num_actions)."""
    return (logits.softmax(-1) * q_values).sum(-1)


def qcritic_loss(
    logits: Tensor, q_values: Tensor, actions: Tensor, returns: Tensor, args: Args
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total, policy and value loss, entropy (nats).

    logits and q_values are (batch, num_actions), actions and returns (batch,). Source: arXiv 1709.00503,
    section 4, with n-step returns.
    """
    log_probs = F.log_softmax(logits, -1)
    probs, weights = log_probs.exp(), q_values.detach()
    entropy = -(probs * log_probs).sum(-1).mean()
    if args.baseline == "value":
        weights = weights - expected_values(logits.detach(), weights).unsqueeze(-1)
    policy_loss = -(probs * weights).sum(-1).mean()
    value_loss = F.mse_loss(q_values.gather(-1, actions.unsqueeze(-1)).squeeze(-1), returns)
    total = args.pg_coef * policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return total, policy_loss, value_loss, entropy


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


class AtariGames(AtariVectorEnv):
    """Parallel games in ale-py's own threads; with render, the first one twice, for its colours."""

    def __init__(self, num_envs: int, render: bool, **settings):
        settings |= {"autoreset_mode": "SameStep", "reward_clipping": False}
        super().__init__(num_envs=num_envs, num_threads=torch.get_num_threads(), **settings)
        self.metadata = self.metadata | {"render_fps": 15}  # of an Atari's 60 frames a second
        self.envs, self.film = [self], None
        if render:
            size = {"stack_num": 1, "img_height": 210, "img_width": 160}
            self.film = AtariVectorEnv(num_envs=1, grayscale=False, **size, **settings)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Of a seed ale-py would take 31 bits, and give the games consecutive ones."""
        seeds = np.random.SeedSequence(seed).generate_state(self.num_envs).astype(int) >> 1
        if self.film:
            self.picture, _ = self.film.reset(seed=seeds[:1], options=options)
        return super().reset(seed=seeds, options=options)

    def step(self, actions: np.ndarray) -> tuple:
        if self.film:
            self.picture = self.film.step(actions[:1])[0]
        return super().step(actions)

    def render(self) -> np.ndarray:
        """The first game's screen (432, 320, 3): twice its size, padded to multiples of 16 for MP4."""
        return np.pad(self.picture[0, 0].repeat(2, 0).repeat(2, 1), ((6, 6), (0, 0), (0, 0)))


def make_atari_envs(env_id: str, num_envs: int, render: bool = False, life_loss: bool = False) -> AtariGames:
    """num_envs copies of a game, each reset in the step that ends it; life_loss: a lost life terminates too.

    A step lasts 4 frames; of the last two it shows the maximum, in grey and 84x84, and an observation is the
    last 4 such pictures, as in Mnih et al. 2015. Up to 30 frames pass before the first action.
    """
    gym.register_envs(ale_py)
    try:
        kwargs = dict(gym.spec(env_id).kwargs)
        if kwargs.pop("frameskip") not in (1, 4):
            raise ValueError("it skips a random number of frames; NoFrameskip-v4 or ALE/...-v5 do not")
        return AtariGames(num_envs, render, life_loss_info=life_loss, **kwargs)
    except KeyError:
        error(f"{SCRIPT} plays Atari games; --env-id {env_id} is none")
    except Exception as exception:  # of any kind: the environment is the user's choice
        error(f"cannot make --env-id {env_id}: {exception}")


def make_atari_agent(args: Args, envs: gym.vector.VectorEnv, state: dict | None) -> AtariAgent:
    """An agent for these environments: a new one, or that of a saved state."""
    num_actions = int(envs.single_action_space.n)
    agent = AtariAgent(num_actions, num_actions if ACTION_VALUES else 1, args.bf16)
    if state is not None:
        try:
            agent.load_state_dict(state["agent"])
        except (KeyError, RuntimeError):
            error(f"the saved weights do not fit {args.env_id}")
    return agent.to(memory_format=torch.channels_last)


def make_atari_policy(agent: AtariAgent, space: gym.spaces.Discrete, greedy: bool) -> Callable:
    """A function from observations (num_envs, 4, 84, 84) and a NumPy generator to actions (num_envs,)."""
    device = agent.policy.weight.device

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        with torch.no_grad():
            logits = agent(torch.from_numpy(obs).to(device))[0].cpu().numpy()
        return np.argmax(logits if greedy else logits + rng.gumbel(size=logits.shape), axis=-1)

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


def keep_freed_memory() -> None:
    """Have glibc keep the memory that an update frees for the next one. Saves a tenth of the time.

    Without this it goes back to the system, and is taken from there anew, page by page.
    """
    if platform.libc_ver()[0] == "glibc":
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
            ctypes.CDLL(None).mallopt(parameter, 2**30)  # bytes


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
    run_dir, state, device = open_run(args, "agent", "optimizer", "recent", "global_step")
    torch.set_num_threads(args.torch_threads)
    keep_freed_memory()
    torch.manual_seed(args.seed)
    eval_envs = make_atari_envs(args.env_id, min(args.eval_episodes, 10), args.capture_video)
    envs = make_atari_envs(args.env_id, args.num_envs, life_loss=True)
    agent = make_atari_agent(args, envs, state).to(device)
    optimizer = torch.optim.RMSprop(agent.parameters(), alpha=args.rms_alpha, eps=args.rms_eps)
    recent = deque(maxlen=100)  # (return, length) of the latest training games
    global_step = 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        recent.extend(state["recent"])
        global_step = state["global_step"]

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exception:
        error(f"cannot make the run folder: {exception}")

    def checkpoint() -> None:
        settings = {k: v for k, v in asdict(args).items() if not isinstance(v, Path)}
        policy = {"script": SCRIPT, "args": settings, "global_step": global_step, "agent": agent.state_dict()}
        save(policy, run_dir / "model.pt")
        rest = {"optimizer": optimizer.state_dict(), "recent": list(recent)}
        save(policy | rest, run_dir / "checkpoint.pt")

    interrupts = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: interrupts.append(number))
    if not state:
        checkpoint()
    log = RunLog(args, run_dir, global_step)
    shape = (args.num_steps, args.num_envs)
    reward_buffer, done_buffer = np.zeros(shape, np.float32), np.zeros(shape, bool)
    updates, barrier, stop = [], True, False  # the updates that are still to be logged
    while global_step < args.total_timesteps and not stop:
        if not updates:
            started = time.perf_counter()
        previous_step = global_step
        if barrier:
            obs, info = envs.reset(seed=derive_seed(args.seed, global_step, 0))
            obs, frame_number = torch.from_numpy(obs).to(device), info["episode_frame_number"]
            rng = torch.Generator(device).manual_seed(derive_seed(args.seed, global_step, 1))
            episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
            latest = np.full((args.num_envs, 2), np.nan)  # (return, length) of each environment's last game
            barrier = False
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate

        # Collect. With one update for each rollout, that can use the activations of these very passes.
        activations, actions, bootstraps = [], [], torch.zeros(shape, device=device)
        for t in range(args.num_steps):
            with torch.no_grad():
                step_activations = agent.activations(obs)
                step_actions = sample_actions(agent.heads(step_activations[-1])[0], rng)
            next_obs, reward, terminated, truncated, info = envs.step(step_actions.cpu().numpy())
            obs = torch.from_numpy(next_obs).to(device)
            activations.append(step_activations)
            actions.append(step_actions)
            reward_buffer[t], done_buffer[t] = np.sign(reward), terminated | truncated
            if truncated.any():  # then not terminated, says ale-py
                final_obs = torch.from_numpy(info["final_obs"][truncated]).to(device)
                with torch.no_grad():
                    bootstraps[t, torch.from_numpy(truncated)] = expected_values(*agent(final_obs))
            episode_return += reward
            episode_length += 1
            over = info["episode_frame_number"] < frame_number  # the game, not a life alone
            frame_number = info["episode_frame_number"]
            if over.any():
                latest[over] = np.stack([episode_return, episode_length], 1)[over]
                recent.extend(latest[over].tolist())
                episode_return[over], episode_length[over] = 0, 0
        with torch.no_grad():
            last_values = expected_values(*agent(obs))
        global_step += args.num_steps * args.num_envs

        # Compute targets.
        rewards, done = (torch.from_numpy(array).to(device) for array in (reward_buffer, done_buffer))
        returns = n_step_returns(rewards, bootstraps, done, last_values, args.gamma)

        # Update. One backward pass by hand takes two thirds of the time of autograd's, one for each step.
        activations = [torch.cat(steps) for steps in zip(*activations, strict=True)]
        features = activations[-1].requires_grad_()
        logits, q_values = agent.heads(features)
        actions, returns = torch.cat(actions), returns.flatten()
        loss, *parts = qcritic_loss(logits, q_values, actions, returns, args)
        optimizer.zero_grad()
        loss.backward()
        agent.backward(activations, features.grad)
        norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        if not (loss + norm).isfinite():
            log.close()
            last = f"the last checkpoint is {run_dir / 'checkpoint.pt'}"
            sys.exit(f"error: non-finite loss or gradient in the update at step {global_step}; {last}")
        optimizer.step()
        updates.append(
            (torch.stack([loss, *parts, norm]).detach(), logits.detach(), q_values.detach(), actions, returns)
        )

        # Log.
        finished = global_step >= args.total_timesteps
        intervals = (LOG_INTERVAL, args.eval_interval or math.inf, args.checkpoint_interval)
        log_due, eval_due, checkpoint_due = (global_step // n > previous_step // n for n in intervals)
        if log_due or checkpoint_due or finished or interrupts:
            losses, logits, q_values, actions, returns = (torch.stack(x) for x in zip(*updates, strict=True))
            values = q_values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)  # of the actions taken
            state_values = expected_values(logits, q_values)
            names = ("total", "policy_loss", "value_loss", "entropy", "grad_norm")
            scalars = {f"losses/{k}": v for k, v in zip(names, losses.mean(0).tolist(), strict=True)} | {
                "losses/explained_variance": explained_variance(values, returns).item(),
                "values/predictions": values.mean().item(),
                "values/targets": returns.mean().item(),
                "values/advantages": (returns - values).mean().item(),
                "values/q_mean": q_values.mean().item(),
                "values/q_spread": q_values.std(-1).mean().item(),
                "values/state_values": state_values.mean().item(),
                "values/q_gap": (values - state_values).mean().item(),
                "charts/learning_rate": learning_rate,
                "charts/SPS": returns.numel() / (time.perf_counter() - started),
            }
            if len(played := latest[~np.isnan(latest[:, 0])]):
                scalars["charts/episodic_return"], scalars["charts/episodic_length"] = played.mean(0)
                scalars["charts/episodic_return_min"], _ = played.min(0)
                scalars["charts/episodic_return_max"], _ = played.max(0)
                scalars["charts/return_mean_100"] = np.mean(recent, axis=0)[0]
            log.scalars(scalars, global_step)
            updates = []

        # Evaluate.
        if eval_due or (finished and args.eval_interval):
            video = Path("videos", run_dir.name, f"step_{global_step}.mp4") if args.capture_video else None
            policy = make_atari_policy(agent, envs.single_action_space, args.greedy)
            seed = derive_seed(args.seed, global_step, 2)
            eval_returns, lengths = evaluate(policy, eval_envs, args.eval_episodes, seed, video)
            eval_mean = log.evaluation(eval_returns, lengths, global_step)
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


# What `play` needs of this script.
make_envs, make_agent, make_policy = make_atari_envs, make_atari_agent, make_atari_policy


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
