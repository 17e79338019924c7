"""Steps a second of a script and of its Stable-Baselines3 peer, and where the script's time goes.

    python benchmark/speed.py                     # about five minutes on one core

Each repetition starts every contender in turn as a process of its own, on one thread with the same settings,
so that a change of the machine's speed meets all of them; ratios are taken within a repetition. A process's
first rollout is warm-up (compilation, first allocations) and is not counted. Run it on an otherwise idle
machine.
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

import mujoco
import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).resolve().parents[1] / "algos" / "ppo_continuous.py"
ENV_ID = "HalfCheetah-v4"
SETTINGS = {"num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10, "hidden_size": 64}


@dataclass
class Args:
    repetitions: int = 5
    """times that each contender is run"""
    rollouts: int = 8
    """rollouts of 2,048 steps that each run is timed over"""


def time_script(rollouts: int, *flags: str) -> tuple[float, float]:
    """Steps a second (median over rollouts) and peak memory in MB of the script."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"--{k.replace('_', '-')}={v}" for k, v in SETTINGS.items()]
        steps = (rollouts + 1) * SETTINGS["num_steps"]
        limits = ["--device=cpu", "--torch-threads=1", "--eval-interval=0", f"--checkpoint-interval={steps}"]
        command = [sys.executable, str(SCRIPT), "--env-id", ENV_ID, *settings, *limits]
        megabytes, _ = run([*command, f"--total-timesteps={steps}", f"--run-dir={folder}/run", *flags])
        events = EventAccumulator(f"{folder}/run").Reload()
        return statistics.median(scalar.value for scalar in events.Scalars("charts/SPS")[1:]), megabytes


def time_peer(rollouts: int) -> tuple[float, float]:
    """The same of Stable-Baselines3's PPO, timed by a callback from one rollout's start to the next."""
    megabytes, output = run([sys.executable, str(Path(__file__).resolve()), "--peer", str(rollouts)])
    return json.loads(output), megabytes


def peer(rollouts: int) -> None:
    """Print the peer's steps a second; runs in a process of its own."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        def _on_training_start(self) -> None:
            self.starts: list[float] = []

        def _on_rollout_start(self) -> None:
            self.starts.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    torch.set_num_threads(1)
    steps, clock = SETTINGS["num_steps"], Clock()
    batch_size = steps // SETTINGS["num_minibatches"]
    model = PPO(
        "MlpPolicy",
        ENV_ID,
        n_steps=steps,
        batch_size=batch_size,
        n_epochs=SETTINGS["update_epochs"],
        device="cpu",
    )
    model.learn((rollouts + 2) * steps, callback=clock)
    print(steps / statistics.median(np.diff(clock.starts)[1:]))


def run(command: list[str]) -> tuple[float, str]:
    """Peak memory in MB and standard output of a command on one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | threads
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


def parts() -> dict[str, float]:
    """Microseconds for each environment step of the parts of the script, each alone, and of their floors."""
    spec = importlib.util.spec_from_file_location("script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.set_num_threads(1)
    args = script.Args(env_id=ENV_ID, **SETTINGS)
    envs = script.make_envs(ENV_ID, 1)
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


def main(args: Args) -> None:
    contenders = {
        "PlainRL": lambda: time_script(args.rollouts),
        "PlainRL --compile": lambda: time_script(args.rollouts, "--compile"),
        "Stable-Baselines3": lambda: time_peer(args.rollouts),
    }
    results = {name: [] for name in contenders}
    for _ in range(args.repetitions):
        for name, contender in contenders.items():
            results[name].append(contender())
    print(f"PPO, {ENV_ID}, one thread, {SETTINGS}\n")
    print("| | steps/s | times Stable-Baselines3 (min to max) | peak memory |\n|---|---|---|---|")
    for name, runs in results.items():
        ratios = [
            speed / other for (speed, _), (other, _) in zip(runs, results["Stable-Baselines3"], strict=True)
        ]
        speed, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {speed:,.0f} | {spread} | {memory:.0f} MB |")
    print("\n| part, alone | us for each step |\n|---|---|")
    for part, time_per_step in parts().items():
        print(f"| {part} | {time_per_step:.1f} |")
    for name in ("PlainRL", "PlainRL --compile"):
        print(f"| whole loop, {name} | {1e6 / statistics.median(speed for speed, _ in results[name]):.1f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(int(sys.argv[2]))
    else:
        main(tyro.cli(Args))
