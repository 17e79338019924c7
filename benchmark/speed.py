"""Steps a second of a script and of its Stable-Baselines3 peer, and where the script's time goes.

    python benchmark/speed.py --script ppo_continuous           # about five minutes on one core
    python benchmark/speed.py --script a2c_atari                # about five minutes on two cores
    python benchmark/speed.py --script a2c_atari --device cuda  # the same where the networks run on a GPU
    python benchmark/speed.py --script qlearning_tabular        # a minute; it has no peer

Each repetition starts every contender in turn as a process of its own, on the same number of threads with
the same settings, so that a change of the machine's speed meets all of them; ratios are taken within a
repetition. What a process measures first is warm-up (compilation, first allocations) and is not counted. Run
it on an otherwise idle machine.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

# As a2c_atari.py has it, for its parts in this process; no child gets it.
os.environ["GOMP_SPINCOUNT"] = "20000"

import gymnasium as gym
import numpy as np
import torch
import tyro

ALGOS = Path(__file__).resolve().parents[1] / "algos"


@dataclass(frozen=True)
class Contest:
    """What is run, and against what."""

    env_id: str
    threads: int
    settings: dict[str, float]
    """flags of the script, with which the peer agrees"""
    steps: int
    """environment steps of one timed run"""
    variants: dict[str, tuple[str, ...]]
    """flags of each contender beside the script with its defaults"""


CONTESTS = {
    "ppo_continuous": Contest(
        env_id="HalfCheetah-v4",
        threads=1,
        settings={
            "num_envs": 1,
            "num_steps": 2048,
            "num_minibatches": 32,
            "update_epochs": 10,
            "hidden_size": 64,
        },
        steps=9 * 2048,
        variants={"PlainRL": (), "PlainRL --compile": ("--compile",)},
    ),
    "a2c_atari": Contest(
        env_id="PongNoFrameskip-v4",
        threads=2,
        settings={"num_envs": 16, "num_steps": 5},
        steps=25_000,
        variants={"PlainRL": (), "PlainRL --bf16": ("--bf16",)},
    ),
}
CONTESTS["qcritic_atari"] = CONTESTS["a2c_atari"]  # its peer too
# The scripts without a peer, what they are timed on, and with which settings.
ALONE = {
    "reinforce_cartpole": (("CartPole-v1",), {"total_episodes": 2000}),
    "qlearning_tabular": (("FrozenLake-v1", "Blackjack-v1"), {"total_timesteps": 200_000}),
}


@dataclass
class Args:
    script: Literal[*CONTESTS, *ALONE] = "ppo_continuous"
    """script of algos/ that is timed"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the networks of a script with a peer, and of the peer, run"""
    repetitions: int = 5
    """times that each contender is run"""


def time_script(
    name: str, env_id: str, threads: int, settings: dict[str, object], *flags: str
) -> tuple[float, float]:
    """Steps a second (median over what the run logged) and peak memory in MB of a script."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings | {"env_id": env_id, "eval_interval": 0, "checkpoint_interval": 1_000_000}
        options = [f"--{k.replace('_', '-')}={v}" for k, v in settings.items()]
        command = [sys.executable, str(ALGOS / f"{name}.py"), *options, *flags]
        megabytes, _ = run([*command, f"--run-dir={folder}/run"], threads)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{folder}/run").Reload()
        return statistics.median(scalar.value for scalar in events.Scalars("charts/SPS")[1:]), megabytes


def time_peer(name: str, device: str) -> tuple[float, float]:
    """The same of the script's peer."""
    this = [sys.executable, str(Path(__file__).resolve()), "--peer", name, device]
    megabytes, output = run(this, CONTESTS[name].threads)
    return json.loads(output), megabytes


def peer(name: str, device: str) -> None:
    """Print the peer's steps a second, by a callback from one rollout's start to the next."""
    import ale_py
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    class Clock(BaseCallback):
        def _on_training_start(self) -> None:
            self.starts: list[float] = []

        def _on_rollout_start(self) -> None:
            self.starts.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    gym.register_envs(ale_py)
    contest = CONTESTS[name]
    torch.set_num_threads(contest.threads)
    settings, batch_size = contest.settings, contest.settings["num_steps"] * contest.settings["num_envs"]
    if name == "ppo_continuous":
        size = {
            "batch_size": batch_size // settings["num_minibatches"],
            "n_epochs": settings["update_epochs"],
        }
        model = PPO("MlpPolicy", contest.env_id, n_steps=settings["num_steps"], **size, device=device)
    else:
        # Of its two vector environments DummyVecEnv is the faster one on two cores.
        envs = VecFrameStack(make_atari_env(contest.env_id, settings["num_envs"]), n_stack=4)
        model = A2C(
            "CnnPolicy", envs, n_steps=settings["num_steps"], vf_coef=0.25, ent_coef=0.01, device=device
        )
    clock, rollouts = Clock(), contest.steps // batch_size
    model.learn((rollouts + 1) * batch_size, callback=clock)
    times = np.diff(clock.starts)
    print(batch_size / np.median(times[len(times) // 5 :]))


def run(command: list[str], threads: int) -> tuple[float, str]:
    """Peak memory in MB and last line of standard output of a command."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    del environment["GOMP_SPINCOUNT"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: {' '.join(command)} failed")
    return usage.ru_maxrss / 1024, output.splitlines()[-1]


def microseconds(function: Callable[[], object], calls: int = 3000) -> float:
    """Median time of one call, over ten blocks of calls."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(calls // 10):
            function()
        times.append((time.perf_counter() - start) / (calls // 10) * 1e6)
    return statistics.median(times)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ALGOS / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ppo_parts(name: str, contest: Contest) -> dict[str, float]:
    """Microseconds for each environment step of the parts of the script, each alone, and of their floors."""
    import mujoco

    script = load(name)
    args = script.Args(env_id=contest.env_id, **contest.settings)
    envs = script.make_envs(contest.env_id, 1)
    obs, _ = envs.reset(seed=0)
    agent = script.make_agent(args, envs, None)
    obs_dim, action_dim = obs.shape[1], envs.single_action_space.shape[0]
    actions = np.random.default_rng(0).uniform(-1, 1, (1, action_dim))
    mean = script.numpy_actor(agent)
    model, data = envs.envs[0].unwrapped.model, envs.envs[0].unwrapped.data
    frame_skip = envs.envs[0].unwrapped.frame_skip

    size = args.num_steps * args.num_envs // args.num_minibatches
    scalars = [torch.randn(size) for _ in range(4)]
    batch = script.Rollout(torch.randn(size, obs_dim), torch.randn(size, action_dim), *scalars)
    parameters = list(agent.parameters())
    flat = script.flatten_parameters(parameters)
    optimizer = torch.optim.Adam([flat], eps=1e-5, fused=True)
    torch._dynamo.config.trace_autograd_ops = True
    compiled = torch.compile(script.ppo_gradient, fullgraph=True, options={"cpp_wrapper": True})

    def update(gradient: Callable) -> None:
        flat.grad, *_ = gradient(agent, parameters, batch, args)
        optimizer.step()

    # The matrix products of one minibatch: of each layer the output, the gradient of its weights and of its
    # input.
    layers = [layer.weight.detach() for net in (agent.actor, agent.critic) for layer in net.children()]
    inputs = [torch.randn(size, weight.shape[1]) for weight in layers]
    outputs = [torch.randn(size, weight.shape[0]) for weight in layers]

    def products() -> None:
        for weight, x, y in zip(layers, inputs, outputs, strict=True):
            torch.mm(x, weight.T)
            torch.mm(y.T, x)
            if weight.shape[1] != obs_dim:
                torch.mm(y, weight)

    for warm_up in (lambda: update(script.ppo_gradient), lambda: update(compiled)):
        warm_up()
    minibatches_per_step = args.update_epochs / size
    return {
        "environment": microseconds(lambda: envs.step(actions)),
        "environment, floor: mj_step alone": microseconds(
            lambda: mujoco.mj_step(model, data, nstep=frame_skip)
        ),
        "policy": microseconds(lambda: mean(obs)),
        "update": microseconds(lambda: update(script.ppo_gradient), 300) * minibatches_per_step,
        "update, --compile": microseconds(lambda: update(compiled), 300) * minibatches_per_step,
        "update, floor: its matrix products": microseconds(products, 300) * minibatches_per_step,
    }


def atari_parts(name: str, contest: Contest) -> dict[str, float]:
    """Microseconds for each environment step of the parts of the script, each alone."""
    script = load(name)
    compute_loss = getattr(script, f"{name.removesuffix('_atari')}_loss")
    args = script.Args(env_id=contest.env_id, **contest.settings)
    batch_size, rng = args.num_steps * args.num_envs, np.random.default_rng(0)
    envs = script.make_atari_envs(args.env_id, args.num_envs, life_loss=True)
    obs = torch.from_numpy(envs.reset(seed=0)[0])
    agent = script.make_atari_agent(args, envs, None)
    optimizer = torch.optim.RMSprop(agent.parameters())
    actions, returns = torch.zeros(batch_size, dtype=torch.int64), torch.zeros(batch_size)

    script.keep_freed_memory()

    @torch.no_grad()
    def forward() -> list[list[torch.Tensor]]:
        return [agent.activations(obs) for _ in range(args.num_steps)]

    def update() -> None:
        activations = [torch.cat(steps) for steps in zip(*forward(), strict=True)]
        features = activations[-1].requires_grad_()
        logits, values = agent.heads(features)
        loss, *_ = compute_loss(logits, values.squeeze(-1), actions, returns, args)
        optimizer.zero_grad()
        loss.backward()
        agent.backward(activations, features.grad)
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()

    def bootstrap() -> None:
        with torch.no_grad():
            agent(obs)

    parts = {
        "environments": microseconds(lambda: envs.step(rng.integers(6, size=args.num_envs)), 500)
        / args.num_envs
    }
    for agent.bf16, name in ((False, ""), (True, ", --bf16")):
        parts[f"forward passes and update{name}"] = microseconds(update, 50) / batch_size
        parts[f"of which forward passes{name}"] = microseconds(forward, 50) / batch_size
        parts[f"bootstrap{name}"] = microseconds(bootstrap, 50) / batch_size
    return parts


def alone(name: str, repetitions: int, steps: int = 200_000) -> None:
    """Print how fast a script without a peer is, and which share of that its environment takes alone."""
    (env_ids, settings), rows = ALONE[name], []
    for env_id in env_ids:
        runs = []
        for _ in range(repetitions):
            speed, _ = time_script(name, env_id, 1, settings)
            env, rng = gym.make(env_id), np.random.default_rng(0)
            actions = rng.integers(env.action_space.n, size=steps).tolist()
            env.reset(seed=0)
            started = time.perf_counter()
            for action in actions:
                *_, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            runs.append((speed, speed * (time.perf_counter() - started) / steps))
        speed, share = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append(f"| {env_id} | {speed:,.0f} | {share:.0%} |")
    print("| | steps/s | of which the environment |\n|---|---|---|", *rows, sep="\n")


def main(args: Args) -> None:
    if args.script in ALONE:
        return alone(args.script, args.repetitions)
    contest, parts = CONTESTS[args.script], ppo_parts if args.script == "ppo_continuous" else atari_parts
    settings = {"torch_threads": contest.threads, "total_timesteps": contest.steps, "device": args.device}
    results = {name: [] for name in (*contest.variants, "Stable-Baselines3")}
    for _ in range(args.repetitions):
        for name, flags in contest.variants.items():
            options = contest.settings | settings
            timed = time_script(args.script, contest.env_id, contest.threads, options, *flags)
            results[name].append(timed)
        results["Stable-Baselines3"].append(time_peer(args.script, args.device))
    print(
        f"{args.script}, {contest.env_id}, {contest.threads} thread(s), {args.device}, {contest.settings}\n"
    )
    print("| | steps/s | times Stable-Baselines3 (min to max) | peak memory |\n|---|---|---|---|")
    for name, runs in results.items():
        ratios = [
            speed / other for (speed, _), (other, _) in zip(runs, results["Stable-Baselines3"], strict=True)
        ]
        speed, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {speed:,.0f} | {spread} | {memory:.0f} MB |")
    if args.device == "cuda":  # the parts are timed on the CPU
        return
    torch.set_num_threads(contest.threads)
    print("\n| part, alone | us for each step | steps/s |\n|---|---|---|")
    loops = {
        f"whole loop, {name}": 1e6 / statistics.median(speed for speed, _ in results[name])
        for name in contest.variants
    }
    for part, time_per_step in (parts(args.script, contest) | loops).items():
        print(f"| {part} | {time_per_step:.1f} | {1e6 / time_per_step:,.0f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:])
    else:
        main(tyro.cli(Args))
