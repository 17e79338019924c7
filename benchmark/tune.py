"""Searches settings of a script that score well, on one environment or on several at once.

    python benchmark/tune.py benchmark/studies/ppo.toml                       a run for each core at a time
    python benchmark/tune.py benchmark/studies/ppo.toml --ray-address auto    on this node's cluster

The same command goes on with a study that was interrupted in whatever way. A study is a grid (see run.py)
with two tables more:

    [defaults]                            # a setting is tried on all environments and seeds of the grid
    script = "ppo_continuous"
    env-id = ["Walker2d-v4", "Hopper-v4"]
    seed = [101, 102]
    [[runs]]
    [search]                              # flags of the script, a range or a list for each
    learning-rate = { low = 1e-4, high = 1e-3, log = true }
    update-epochs = { low = 2, high = 20, step = 2 }
    num-steps = [1024, 2048, 4096]
    [study]                               # here with its defaults, but for the rungs, of which there are none
    trials = 40                           # settings to try; with more, a study that had ended goes on
    rungs = [200_000, 500_000]            # steps after which only the best go on, at checkpoints
    reduction-factor = 3                  # one in so many goes on
    sampler = "tpe"                       # or "random"
    seed = 1                              # of the sampler
    thresholds = {}                       # where references.toml has none: { MyWalker-v0 = 900 }
    beside = []                           # other studies to draw in the same figure

The score of a setting at a rung is the interquartile mean, over environments and seeds, of the return of the
evaluation there over the environment's threshold (on a single environment without one, of the return). A
setting with a run that failed counts as the worst.

Successive halving is asynchronous (ASHA, Li et al. 2020, arXiv 1810.05934): a trial goes on as soon as it is
among the best of those that have reached its rung. So no core waits, the sampler soon learns from whole runs,
and a study that is ended early has some. Each run is started for all of its steps and paused at the
checkpoint of a rung, where an uninterrupted run has its barrier too: a trial that goes on is the run that it
would have been, bit for bit. The sampler is made anew for each trial, from the seed, the trial's number and
the scores so far; so with --workers 1 the trials follow from the study alone, however often it is
interrupted. The first setting tried is the script's own, where the ranges hold it.

Optuna's journal and the runs are in runs/tune/<study>/. In benchmark/results/tune/<study>/ is what is kept:
trials.csv, a row for each trial and rung; README.md, figures/ and report.html; <study>_best.toml, the best
setting as a grid for run.py. Where only trials.csv is left, the same command draws the page anew. On the page
is what studies/<study>.md says of it.
"""

import logging
import math
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import optuna
import results_store
import tyro
from cli import error, parse
from grid import Run, check_settings
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from runner import Workers, lock, run_all, say, start_here
from scripts import BENCHMARK
from study import Study, read_study
from trials import promotion, propose, reports, scores, write_trials


@dataclass(kw_only=True)
class Args(Workers):
    study: Annotated[Path, tyro.conf.Positional]
    """TOML file that says what to search"""
    results: Path = BENCHMARK / "results" / "tune"
    """folder for what is kept, in a folder of the study's name"""


class Leg:
    """The process of a run, ended at its first checkpoint at or past a rung, which counts as ended well."""

    def __init__(self, process: Any, run_dir: Path, rung: int):
        self.process, self.run_dir, self.rung, self.returncode = process, run_dir, rung, None
        self.send_signal, self.kill, self.told = process.send_signal, process.kill, False

    def poll(self) -> int | None:
        status, there = self.process.poll(), is_at(self.run_dir, self.rung)
        if there and status is None and not self.told:
            self.told = True
            self.send_signal(signal.SIGTERM)
        self.paused = bool(there and status)
        self.returncode = 0 if self.paused else status
        return self.returncode


def is_at(run_dir: Path, rung: int) -> bool:
    """Whether a run has a checkpoint at or past a rung; its evaluation there was written before."""
    return results_store.latest_step(run_dir) >= rung and results_store.checkpoint_step(run_dir) >= rung


def measure(run: Run, rung: int) -> tuple[float, float]:
    """Return of the first evaluation at or past a rung, or else the last; hours of training until then."""
    record = results_store.read_run(run.run_dir)
    means = record.mean_returns()
    step = means.index[min(means.index.searchsorted(rung), len(means) - 1)]
    return float(means[step]), float(np.nan_to_num(record.at("hours", np.array([step]))[0]))


class Search:
    """A study under way: its trials, and the runs that they wait for."""

    def __init__(self, study: Study, folder: Path, start: Callable[[Run], Any], capacity: Callable[[], int]):
        self.study, self.folder, self.start_run, self.capacity = study, folder, start, capacity
        self.runs, self.waiting, self.trial_of = {}, deque(), {}
        # Of a process that was killed as it wrote; Optuna would wait for it to end.
        (folder / "study.journal.lock").unlink(missing_ok=True)
        self.kept = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "study.journal"))),
            study_name=study.name,
            direction="maximize",
            load_if_exists=True,
        )
        definition = study.definition()
        if self.kept.user_attrs.get("definition", definition) != definition:
            error(f"{folder} is of another study; give this one another name, or remove the folder")
        if not self.kept.trials:
            self.kept.set_user_attr("definition", definition)
        for trial in self.trials():
            if trial.user_attrs["goal"] not in scores(trial):
                self.go_on(trial)

    def trials(self) -> list[FrozenTrial]:
        return self.kept.get_trials(deepcopy=False)

    def note(self, trial: FrozenTrial, **attributes: Any) -> None:
        for name, value in attributes.items():
            Trial(self.kept, trial._trial_id).set_user_attr(name, value)

    def more(self) -> list[Run]:
        """The runs to start now, as many as there is room for."""
        started = []
        while len(self.trial_of) - len(self.waiting) < self.capacity():
            if self.waiting:
                started.append(self.waiting.popleft())
                continue
            trials, plan = self.trials(), self.study.plan
            if promoted := promotion(trials, self.study.rungs, plan.reduction_factor):
                number, goal = promoted
                self.note(trials[number], goal=goal)
            elif (number := len(trials)) < plan.trials:
                params, goal = propose(self.study, trials), {"goal": self.study.rungs[0]}
                running = {"state": TrialState.RUNNING, "distributions": self.study.space}
                self.kept.add_trial(create_trial(params=params, user_attrs=goal, **running))
            else:
                break
            self.go_on(self.trials()[number])
        return started

    def go_on(self, trial: FrozenTrial) -> None:
        """Have the runs of a trial wait to be started that are not yet where they are to go."""
        goal, folder = trial.user_attrs["goal"], self.folder / f"{trial.number:03}"
        settings = {name.replace("-", "_"): value for name, value in trial.params.items()}
        if trial.number not in self.runs:
            folder.mkdir(exist_ok=True)
            self.runs[trial.number] = [
                replace(
                    r, given=r.given | trial.params, settings=r.settings | settings, run_dir=folder / r.name
                )
                for r in self.study.runs
            ]
        for run in self.runs[trial.number] if "failed" not in trial.user_attrs else ():
            check_settings(run, str(run.run_dir), results_store.read_config(run.run_dir))
            if not results_store.is_completed(run.run_dir) and not is_at(run.run_dir, self.stop(goal)):
                self.trial_of[run] = trial.number
                self.waiting.append(run)
        self.close_if_there(trial.number)

    def stop(self, goal: int) -> float:
        """The steps after which a run is paused on its way to a rung."""
        return math.inf if goal == self.study.rungs[-1] else goal

    def start(self, run: Run) -> Leg:
        goal = self.trials()[self.trial_of[run]].user_attrs["goal"]
        return Leg(self.start_run(run), run.run_dir, self.stop(goal))

    def ended(self, run: Run) -> list[Run]:
        """Take in that a run has reached its rung, or failed; returns the runs to start then."""
        number = self.trial_of.pop(run)
        if run.process.returncode:
            [reason] = results_store.last_words(run.run_dir, 1) or [f"exit status {run.process.returncode}"]
            self.note(self.trials()[number], failed=f"{run.name}: {reason.removeprefix('error: ')}")
            for other in [other for other in self.waiting if self.trial_of[other] == number]:
                self.waiting.remove(other)
                del self.trial_of[other]
        elif not run.process.paused:
            results_store.mark_completed(run.run_dir)
        self.close_if_there(number)
        return self.more()

    def close_if_there(self, number: int) -> None:
        """Keep what a trial scores once it waits for no run."""
        if number in self.trial_of.values():
            return
        trials = self.trials()
        trial, goal = trials[number], trials[number].user_attrs["goal"]
        failed = trial.user_attrs.get("failed")
        measured = {
            run.name: measure(run, self.stop(goal))
            for run in self.runs[number]
            if not failed or results_store.latest_step(run.run_dir)  # what failed took its hours, too
        }
        hours = sum(hours for _, hours in measured.values())
        before = [report["hours"] for rung, report in reports(trial).items() if rung < goal]
        known = [r["spent"] for t in trials for rung, r in reports(t).items() if t != trial or rung < goal]
        report = {"hours": hours, "spent": max(known, default=0) + hours - max(before, default=0)}
        returns = {name: mean for name, (mean, _) in measured.items()}
        self.note(trial, **{str(goal): report | {"returns": returns}})
        if failed:
            self.kept.tell(number, state=TrialState.FAIL)
            say(f"trial {number} of {self.study.plan.trials}: failed: {failed}")
            return
        score = self.study.score(returns)
        if goal == self.study.rungs[-1]:
            self.kept.tell(number, score)
        else:
            Trial(self.kept, trial._trial_id).report(score, goal)
        say(f"trial {number} of {self.study.plan.trials}: score {score:.3f} after {goal:,} steps")


def main(args: Args) -> None:
    args.check()
    study, interrupts = read_study(args.study), []
    folder, table = Path("runs", "tune", study.name), args.results / study.name / "trials.csv"
    if not table.exists() or (folder / "study.journal").exists():
        start_there, capacity = args.connect(study.runs)
        descriptor = lock(folder)
        search = Search(study, folder, start_there or (lambda run: start_here(run, descriptor)), capacity)
        runs, at_rest = search.more(), sum(t.user_attrs["goal"] in scores(t) for t in search.trials())
        total = (study.plan.trials - at_rest) * len(study.runs)
        _, interrupts = run_all(runs, search.start, capacity, args.retries, search.ended, total)
        if interrupts:
            print(f"to go on: {shlex.join(('python', *sys.argv))}", flush=True)
        write_trials(table, search.trials())
    if table.exists():
        from study_page import write_study  # takes seconds to import

        write_study(study, args.results)
    raise SystemExit(128 + interrupts[0] if interrupts else 0)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each run that was resumed
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before there are runs, Ctrl-C leaves without a traceback
    main(parse(Args, __doc__))
