"""Runs on a Ray cluster, with what the runner needs of a process."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli
import grid
import results_store
import runner
import scripts
from cli import error
from grid import Run
from runner import Process
from scripts import BENCHMARK, REPOSITORY, SCRIPTS

SYNC_SECONDS = 1.0  # how often what has changed in a run folder comes back from another machine


class Node:
    """Ray actor: a run on whichever machine has room for it, in a folder of its own there."""

    def __init__(self, files: dict[str, bytes], command: list[str], run_dir: Path, threads: int):
        self.folder, self.run_dir, self.seen = tempfile.TemporaryDirectory(prefix="plainrl"), run_dir, {}
        self.root = Path(self.folder.name)
        results_store.write_files(self.root, files)
        (self.root / run_dir.parent).mkdir(parents=True, exist_ok=True)
        results_store.read_files(self.root, run_dir, self.seen)
        self.process = Process(command, threads, self.root / results_store.log_of(run_dir), self.root)

    def poll(self, seconds: float) -> tuple[int | None, dict[str, bytes]]:
        """Exit status, None after so many seconds without one, and the files that have changed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        status = self.process.returncode
        changed = results_store.read_files(self.root, self.run_dir, self.seen)
        if status is not None:
            self.folder.cleanup()
        return status, changed

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)


class RemoteRun:
    """A run on a Ray cluster, with what `run_all` needs of a process."""

    def __init__(self, run: Run, node: Any):
        results_store.discard_unless_resumable(run.run_dir)
        # All scripts, since peers.py and those of one grid import some of the others.
        paths = [*SCRIPTS.values(), *BENCHMARK.glob("*.py"), run.script]
        names = {
            path: str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
            for path in paths
        }
        # As much of a repository as tells a script there, which writes it down, the commit that it is of.
        git = "git rev-parse --verify --quiet HEAD"  # through a shell, since there may be no git
        commit = subprocess.run(git, shell=True, cwd=BENCHMARK, capture_output=True).stdout
        files = {".git/HEAD": commit, ".git/objects/none": b"", ".git/refs/none": b""}
        files |= {name: path.read_bytes() for path, name in names.items()}
        files |= results_store.read_files(Path(), run.run_dir, {})
        command = [names[run.script], *run.command()[1:]]
        self.node = node.remote(files, command, run.run_dir, run.threads)
        self.log, self.returncode = results_store.log_of(run.run_dir), None
        self.reply = self.node.poll.remote(SYNC_SECONDS)

    def poll(self) -> int | None:
        """Take in what has come back; exit status if the run has ended, 1 if its machine is gone."""
        import ray

        if self.returncode is None and ray.wait([self.reply], timeout=0)[0]:
            try:
                self.returncode, files = ray.get(self.reply)
                results_store.write_files(Path(), files)
            except ray.exceptions.RayError as exception:
                self.returncode = 1
                with self.log.open("a") as file:
                    file.write(f"lost its node: {exception}\n")
            if self.returncode is None:
                self.reply = self.node.poll.remote(SYNC_SECONDS)
            else:
                self.kill()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        self.node.send_signal.remote(signum)

    def kill(self) -> None:
        import ray

        ray.kill(self.node)


def connect(address: str, cpus: float, gpus: float) -> tuple[Callable[[Run], RemoteRun], Callable[[], int]]:
    """Functions that start a run on the Ray cluster, and that say how many it holds.

    cpus, gpus: what a run takes up.
    """
    try:
        import ray
    except ModuleNotFoundError:
        error('--ray-address needs Ray: python -m pip install ".[cluster]"')
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as exception:
        error(f"--ray-address {address}: {exception}")
    needs = {"CPU": cpus, "GPU": gpus}
    for module in (cli, grid, results_store, runner, scripts, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)  # another machine may have no copy of benchmark/
    node = ray.remote(num_cpus=cpus, num_gpus=gpus)(Node)

    def capacity() -> int:
        has = ray.cluster_resources()
        return min(int(has.get(kind, 0) / need) for kind, need in needs.items() if need)

    if not capacity():
        error(f"--ray-address {address}: no room for a run that takes up {needs}")
    return lambda run: RemoteRun(run, node), capacity
