"""Processes: so many runs at a time, again after a failure, and ended together by a signal."""

import contextlib
import ctypes
import fcntl
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results_store
from cli import error
from grid import THREAD_VARIABLES, Run
from scripts import BENCHMARK
from tqdm import tqdm


@dataclass(kw_only=True)
class Workers:
    """The flags that say where runs go, and how many at a time."""

    workers: int | None = None
    """runs at a time (default: as many as the cores have room for with their threads, or the Ray cluster)"""
    retries: int = 2
    """times that a run which died or lost its node goes on from its checkpoint, before it has failed"""
    ray_address: str | None = None
    """Ray cluster to run on ("auto": the one that this machine is a node of); needs the extra `cluster`"""
    cpus_per_run: float = 1
    """CPUs that a run takes up on the cluster: as many as it has threads"""
    gpus_per_run: float = 0
    """GPUs that a run takes up on the cluster"""

    def check(self) -> None:
        if self.workers is not None and self.workers < 1:
            error(f"--workers must be above 0, not {self.workers}")

    def connect(self, runs: list[Run]) -> tuple[Callable[[Run], Any] | None, Callable[[], int]]:
        """What starts a run on the cluster, if there is to be one; and how many may run at a time."""
        start_there, capacity = None, None
        if self.ray_address:
            from cluster import connect

            start_there, capacity = connect(self.ray_address, self.cpus_per_run, self.gpus_per_run)
        # Threads beyond the cores wait for each other: on two cores, two runs of A2C with two threads each
        # went at 60 steps/s each, one alone at 1,300.
        room = max(1, os.cpu_count() // max((run.threads for run in runs if not run.exported), default=1))
        return start_there, lambda: self.workers or (capacity() if capacity else room)


class Process(subprocess.Popen):
    """Python with the given arguments, its output added to a file; it ends when this process does.

    It leads a process group of its own. So a terminal's Ctrl-C, which is for all processes of the runner's
    group, comes to it once, by way of the runner; and what it has started itself can be killed with it.
    """

    def __init__(self, command: list[str], threads: int, log: Path, cwd: Path | None = None, **options: Any):
        command = [sys.executable, *command]
        # Elsewhere than on Linux it would go on; there the lock that it holds refuses a second runner.
        prctl, pr_set_pdeathsig = getattr(ctypes.CDLL(None), "prctl", None), 1
        if prctl:
            options["preexec_fn"] = lambda: prctl(pr_set_pdeathsig, signal.SIGKILL)
        with log.open("ab", buffering=0) as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            super().__init__(
                command,
                env=os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONUNBUFFERED": "1"},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                **options,
            )

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


def lock(folder: Path) -> int:
    """Take a grid's folder for as long as this process or a run of its lives; returns a file descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(50):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(0.1)  # the runs of a runner that was killed are still ending
    error(f"{folder} is taken: a runner, or a run of one that was killed, is at work there")


def start_here(run: Run, descriptor: int) -> Process:
    """Start a run on this machine, go on with it, or export its results, by what its folder holds."""
    if results_store.is_completed(run.run_dir):
        command = [str(BENCHMARK / "run.py"), "--export", str(run.run_dir), str(run.results)]
    else:
        command = run.command()
        results_store.discard_unless_resumable(run.run_dir)
    return Process(command, run.threads, results_store.log_of(run.run_dir), pass_fds=(descriptor,))


def to_export(run: Run) -> list[Run]:
    """What is to be started after a run that is over: itself, to be exported, unless it was or has failed."""
    if run.process.returncode:
        return []
    run.exported = results_store.is_completed(run.run_dir)
    results_store.mark_completed(run.run_dir)
    return [] if run.exported else [run]


def say(text: str) -> None:
    """A line on standard error, above the bar if there is one."""
    (tqdm.write if sys.stderr.isatty() else print)(text, file=sys.stderr)


def run_all(
    runs: list[Run],
    start: Callable[[Run], Any],
    capacity: Callable[[], int],
    retries: int = 2,
    ended: Callable[[Run], list[Run]] = to_export,
    expected: int = 0,
) -> tuple[list[Run], list[int]]:
    """Run what is not finished, `capacity` at a time; returns what failed, and the signals that ended it.

    start: gives a run its process. ended: called with a run whose process ended well, or that has failed;
    what it returns is started next, and joins the runs if it is new. expected: how many runs there will be,
    if that is more. A first SIGINT or SIGTERM is passed on, once, and all runs end at their checkpoints; a
    second one kills them.
    """
    waiting, running, failed, interrupts = deque(run for run in runs if not run.exported), [], [], []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: interrupts.append(number))
    tty, reported, passed_on = sys.stderr.isatty(), time.monotonic(), 0
    tqdm.monitor_interval = 0  # no thread beside this one: runs are forked off it
    bar = tqdm(
        total=max(len(runs), expected),
        initial=len(runs) - len(waiting) + sum(run.fraction() for run in waiting),
        smoothing=0,
        delay=0 if tty else math.inf,
        bar_format="{percentage:3.0f}%|{bar}| {desc}, {remaining} left",
    )
    while running or (waiting and not interrupts):
        while waiting and not interrupts and len(running) < capacity():
            running.append(waiting.popleft())
            running[-1].process = start(running[-1])
        for signum in interrupts[passed_on:]:
            for run in running:
                if passed_on:
                    run.process.kill()
                elif not results_store.is_completed(run.run_dir):  # an export is over in a moment
                    run.process.send_signal(signum)
            passed_on += 1
        time.sleep(0.02)
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            status = run.process.returncode
            if status and interrupts:
                waiting.appendleft(run)
            elif status and run.failures < retries:
                run.failures += 1
                waiting.appendleft(run)
                attempt = f"retry {run.failures} of {retries}"
                say(f"{run.name}: exit status {status}, {attempt}")
            else:
                if status:
                    failed.append(run)
                    log = results_store.log_of(run.run_dir)
                    say(f"{run.name}: exit status {status}, given up. The end of {log}:")
                    lines = results_store.last_words(run.run_dir)
                    say("\n".join(f"    {line}" for line in lines))
                after = ended(run)
                waiting.extendleft(reversed(after))
                runs += [new for new in after if new not in runs]
                bar.total = max(len(runs), expected)
        finished = len(runs) - len(waiting) - len(running) - len(failed)
        counts = f"{finished} of {bar.total} runs done, {len(running)} running, {len(failed)} failed"
        bar.set_description_str(counts, refresh=False)
        if time.monotonic() > reported + (1 if tty else 60):
            bar.n = finished + len(failed) + sum(run.fraction() for run in (*running, *waiting))
            reported = time.monotonic()
            bar.refresh() if tty else print(bar, flush=True)
    bar.close()
    return failed, interrupts
