"""Runs a grid of settings, environments and seeds, on this machine or on a Ray cluster.

    python benchmark/run.py benchmark/grids/smoke.toml                     a run for each core at a time
    python benchmark/run.py benchmark/grids/ppo.toml --dry-run             prints the commands
    python benchmark/run.py benchmark/grids/ppo.toml --ray-address auto    on the cluster that this node is of
    python benchmark/run.py --export runs/RUN benchmark/results/old        adds a run of its own to results

The same command goes on with a grid that was interrupted in whatever way: finished runs are skipped, the
others resumed from their checkpoints. A second Ctrl-C ends it at once. A grid is a TOML file:

    [defaults]                            # settings of every run; of a list, every value is run
    seed = [1, 2, 3]
    greedy = true
    [[runs]]                              # the product of its lists; settings here override the defaults
    script = "ppo_continuous"             # of algos/; "peers" is benchmark/peers.py; a path that ends in .py,
                                          # from the folder of the grid, is a script of your own
    env-id = ["Walker2d-v4", "Hopper-v4"]
    hidden-size = 64                      # all but script are flags of the script: --hidden-size=64

Runs are in runs/<grid>/<run>/, what they print in runs/<grid>/<run>.log. What is kept of the finished ones is
in benchmark/results/<grid>/, for pandas to read: runs.jsonl, settings and versions, a line for each run;
evaluations.csv.gz, a row for each episode; progress.csv.gz, the TensorBoard scalars of each run in up to 200
rows. A run has one thread, or as many as its torch-threads says.
"""

import resource
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import results_store
import tyro
from cli import parse
from grid import THREAD_VARIABLES, Run, make_runs
from runner import Workers, lock, run_all, start_here
from scripts import BENCHMARK


@dataclass(kw_only=True)
class Args(Workers):
    grid: Annotated[Path, tyro.conf.Positional]
    """TOML file that says what to run"""
    results: Path = BENCHMARK / "results"
    """folder for the results of finished runs, in a folder of the grid's name"""
    dry_run: bool = False
    """print the commands of what is not finished, and run nothing"""


def main(args: Args) -> None:
    args.check()
    runs = make_runs(args.grid, args.results)
    if args.dry_run:
        for run in runs:
            if not run.exported and not results_store.is_completed(run.run_dir):
                threads = [f"{name}={run.threads}" for name in THREAD_VARIABLES]
                print(*threads, shlex.join([sys.executable, *run.command()]))
        return
    start_there, capacity = args.connect(runs)
    descriptor = lock(Path("runs", args.grid.stem))

    def start(run: Run) -> Any:
        there = start_there and not results_store.is_completed(run.run_dir)
        return start_there(run) if there else start_here(run, descriptor)

    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    failed, interrupts = run_all(runs, start, capacity, args.retries)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    finished, results = sum(run.exported for run in runs), args.results / args.grid.stem
    print(f"{finished} of {len(runs)} runs done, {len(failed)} failed; results in {results}")
    print(f"{seconds:.0f} s, {cores:.2f} cores here busy with runs, the runner took {megabytes:.0f} MB")
    if interrupts:
        print(f"to go on: {shlex.join(('python', *sys.argv))}")
        raise SystemExit(128 + interrupts[0])
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--export"]:
        results_store.export_run(*map(Path, sys.argv[2:]))
    else:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # before there are runs, Ctrl-C leaves without a traceback
        main(parse(Args, __doc__))
