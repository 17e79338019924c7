"""Steps a second of a script and of its Stable-Baselines3 peer, and where the script's time goes.

    python benchmark/speed.py --script ppo_continuous           # about five minutes on one core
    python benchmark/speed.py --hidden-size 64                  # Stable-Baselines3's own width
    python benchmark/speed.py --script a2c_atari                # about five minutes on two cores
    python benchmark/speed.py --script a2c_atari --device cuda  # the same where the networks run on a GPU
    python benchmark/speed.py --script qlearning_tabular        # a minute; it has no peer
    python benchmark/speed.py --beside /tmp/before/algos        # against another copy of the scripts, too

Each repetition starts every contender in turn as a process of its own, on the same number of threads with
the same settings, so that a change of the machine's speed meets all of them; ratios are taken within a
repetition. What a process measures first is warm-up (compilation, first allocations) and is not counted. Run
it on an otherwise idle machine.

The parts are the script's own functions, timed in every call that a run makes of them. Below a part stands
what it cannot do without: MuJoCo's simulation, or its matrix products and convolutions, done again alone.
"""

import functools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from cli import error, parse
from contests import CONTESTS, Contest
from results_store import read_events
from scripts import ALGOS
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Args:
    script: Literal[*CONTESTS] = "ppo_continuous"
    """script of algos/ that is timed"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the networks of the script, and of its peer, run"""
    threads: int | None = None
    """CPU threads of each contender (default: 2 for the Atari games, else 1)"""
    repetitions: int = 5
    """times that each contender is run"""
    hidden_size: int | None = None
    """units of a layer of PPO's or SAC's networks, the peer's too (default: the script's own)"""
    beside: Path | None = None
    """folder with another copy of the script, one contender more"""


def run(threads: int, *command: str | Path) -> tuple[float, str]:
    """Peak memory in MB and last line of standard output of a Python with these arguments."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    command = [sys.executable, *map(str, command)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: {' '.join(command)} failed")
    return usage.ru_maxrss / 1024, output.splitlines()[-1]


def time_script(threads: int, script: Path, *flags: str) -> tuple[float, float]:
    """Steps a second (median over what the run logged) and peak memory in MB of a script."""
    with tempfile.TemporaryDirectory() as folder:
        megabytes, _ = run(threads, script, *flags, f"--run-dir={folder}/run")
        return read_events(Path(folder, "run"))["charts/SPS"].dropna()[1:].median(), megabytes


def time_peer(threads: int, *arguments: str) -> tuple[float, float]:
    """The same of the script's peer."""
    megabytes, output = run(threads, Path(__file__).resolve(), "--peer", *arguments)
    return json.loads(output), megabytes


def peer(name: str, device: str, settings: str) -> None:
    """Print the peer's steps a second: of blocks of 1,000 or more, after the first fifth, the median."""
    import ale_py
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        def _on_training_start(self) -> None:
            self.starts: list[tuple[int, float]] = []

        def _on_rollout_start(self) -> None:
            if not self.starts or self.num_timesteps >= self.starts[-1][0] + 1000:
                self.starts.append((self.num_timesteps, time.perf_counter()))

        def _on_step(self) -> bool:
            return True

    gym.register_envs(ale_py)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    contest, settings = CONTESTS[name], json.loads(settings)
    model = contest.peer.make(settings, contest.env_ids[0], device)
    clock = Clock()
    model.learn(settings["total_timesteps"] + 1000, callback=clock)
    steps, seconds = np.diff(clock.starts, axis=0).T
    print(np.median((steps / seconds)[len(steps) // 5 :]))


class Products(TorchDispatchMode):
    """Writes down the matrix products and convolutions that PyTorch makes, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None):
        if function.__name__.split(".")[0] in ("mm", "addmm", "convolution", "convolution_backward"):
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))

    @torch.no_grad()
    def seconds(self, repetitions: int = 100) -> float:
        """Median time of doing them again."""
        times = []
        for _ in range(repetitions if self.calls else 0):
            started = time.perf_counter()
            for function, args in self.calls:
                function(*args)
            times.append(time.perf_counter() - started)
        return statistics.median(times or [0])


class Timer:
    """Seconds of functions by their paths; calls and products also by the shapes of what they are given."""

    def __init__(self, keep_products: bool):
        self.keep_products = keep_products
        self.seconds, self.calls, self.products = Counter(), Counter(), {}

    def timed(self, path: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            key = path, *(x.shape for x in args if isinstance(x, torch.Tensor))
            if self.keep_products and key not in self.products:  # which is of the warm-up
                with self.products.setdefault(key, Products()):
                    return function(*args, **kwargs)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[path] += time.perf_counter() - started
            self.calls[key] += 1
            return result

        call.path, call.function = path, function
        return call

    def products_alone(self, paths: Iterable[str]) -> float:
        """Seconds that the products take in all calls of these paths, where they are kept."""
        return sum(x.seconds() * self.calls[key] for key, x in self.products.items() if key[0] in paths)


def time_parts(name: str, script: str, *flags: str) -> None:
    """Run a script as its command does; print the microseconds of each part for each step, as JSON."""
    import mujoco

    gym.mujoco = mujoco  # where the paths find it
    timer, marks = Timer(keep_products="--compile" not in flags), []

    def wrap(module: ModuleType, path: str) -> None:
        *names, name = path.removesuffix("()").split(".")
        owner = functools.reduce(getattr, names, module)
        function = getattr(owner, name)
        make = lambda *args: timer.timed(path, function(*args))  # noqa: E731
        setattr(owner, name, make if path.endswith("()") else timer.timed(path, function))

    def parse(*args, **kwargs):
        """In place of tyro.cli, which is what a script calls first."""
        module = sys.modules["__main__"]
        for paths in CONTESTS[name].parts.values():
            for path in paths:
                wrap(module, path)
        end, compile_function = module.Run.end_iteration, torch.compile

        def end_iteration(run: Any, steps: int, *args) -> None:
            """Time counts from here to here, after a fifth of the run."""
            marks[1:] = [(run.global_step + steps, time.perf_counter())]
            if len(marks) == 1:
                timer.seconds.clear()
                timer.calls.clear()
                if run.progress < 0.2:
                    marks.clear()
            end(run, steps, *args)

        module.Run.end_iteration = end_iteration
        torch.compile = lambda f, **options: timer.timed(f.path, compile_function(f.function, **options))
        tyro.cli = cli
        return cli(*args, **kwargs)

    cli, tyro.cli, sys.argv = tyro.cli, parse, [script, *flags]
    runpy.run_path(script, run_name="__main__")
    steps, whole = np.diff(marks, axis=0)[0]
    times, rest = {}, whole
    for part, paths in CONTESTS[name].parts.items():
        times[part] = sum(timer.seconds[path] for path in paths)
        rest -= 0 if part.startswith("-") else times[part]
        if alone := timer.products_alone(paths):
            times[f"- products alone, {part}"] = alone
    times |= {"everything else": rest, "whole loop": whole}
    print(json.dumps({part: time / steps * 1e6 for part, time in times.items()}))


def compare(args: Args, contest: Contest, env_id: str) -> None:
    """Print the two tables of a script on one environment."""
    threads = args.threads or contest.threads
    settings = contest.settings | {"env_id": env_id, "eval_interval": 0, "checkpoint_interval": 1_000_000}
    settings |= {"device": args.device}
    settings |= {"torch_threads": threads} if threads > 1 else {}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in settings.items()]
    script = ALGOS / f"{args.script}.py"
    contenders = {}
    for variant in contest.variants:
        copies = {"PlainRL": script} | ({str(args.beside): args.beside / script.name} if args.beside else {})
        for copy, path in copies.items():
            command = (path.resolve(), *flags, *variant.split())
            contenders[f"{copy} {variant}".strip()] = functools.partial(time_script, threads, *command)
    if contest.peer:
        command = (args.script, args.device, json.dumps(contest.settings))
        contenders[contest.peer.algorithm] = functools.partial(time_peer, threads, *command)
    results = {name: [] for name in contenders}
    for _ in range(args.repetitions):
        for name, contender in contenders.items():
            results[name].append(contender())
    *_, reference = results
    print(f"\n{args.script}, {env_id}, {threads} thread(s), {args.device}, {contest.settings}\n")
    print(f"| | steps/s | times {reference} (min to max) | peak memory |\n|---|---|---|---|")
    for name, runs in results.items():
        ratios = [speed / other for (speed, _), (other, _) in zip(runs, results[reference], strict=True)]
        speed, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {speed:,.0f} | {spread} | {memory:.0f} MB |")
    if args.device == "cuda":  # whose time is not that of the calls
        return
    parts = {}
    for variant in contest.variants:
        command = (Path(__file__).resolve(), "--parts", args.script, script, *flags, *variant.split())
        parts[f"PlainRL {variant}".strip()] = json.loads(run(threads, *command)[1])
    print("\n| us for each step |", " | ".join(parts), "|\n|---|" + "---|" * len(parts))
    for part in dict.fromkeys(part for times in parts.values() for part in times):
        cells = (
            f"{times[part]:.1f} ({times[part] / times['whole loop']:.0%})" if part in times else ""
            for times in parts.values()
        )
        print(f"| {part} |", " | ".join(cells), "|")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:])
    elif sys.argv[1:2] == ["--parts"]:
        time_parts(*sys.argv[2:])
    else:
        args = parse(Args, __doc__)
        contest = CONTESTS[args.script]
        if args.hidden_size is not None:
            if "hidden_size" not in contest.settings:
                error(f"{args.script} has no --hidden-size")
            contest = replace(contest, settings=contest.settings | {"hidden_size": args.hidden_size})
        for env_id in contest.env_ids:
            compare(args, contest, env_id)
