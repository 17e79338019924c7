"""Stopped by any signal at any moment and resumed, a run has the bits of an uninterrupted one.

MOMENTS=10 in the environment stops each script at ten random moments by each signal.
"""

import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import RUNS, assert_same, flags, load_script, run_script, script_path

STATUS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
MOMENTS = int(os.environ.get("MOMENTS", "1"))


def run(folder: Path, name: str, arguments: list[str], patch: Callable | None = None) -> None:
    """A script's command, in a process of its own; patch may change the loaded script."""
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    script = load_script(name)
    if patch:
        patch(script)
    sys.argv = [f"{name}.py", *arguments]
    with Path("output").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        script.main()


@pytest.fixture(scope="module")
def start() -> Callable:
    context = multiprocessing.get_context("forkserver")
    # What takes seconds to import, once for all.
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.utils.tensorboard", "tyro", "gymnasium.envs.mujoco"]
    )

    def start(*arguments) -> multiprocessing.Process:
        (arguments[0] / "output").unlink(missing_ok=True)
        process = context.Process(target=run, args=arguments)
        process.start()
        return process

    return start


def wait_for_training(process: multiprocessing.Process, output: Path) -> None:
    while process.is_alive() and not (output.exists() and "run folder" in output.read_text()):
        time.sleep(0.005)


def finish(process: multiprocessing.Process) -> int:
    process.join(timeout=300)
    return process.exitcode


def assert_same_run(run_dir: Path, reference: Path) -> None:
    files = [{x.name for x in folder.glob("*.pt")} for folder in (run_dir, reference)]
    assert files[0] == files[1]
    for file in files[0]:
        assert_same(*(torch.load(x / file, weights_only=True) for x in (run_dir, reference)))
    assert (run_dir / "evaluations.csv").read_text() == (reference / "evaluations.csv").read_text()


@pytest.mark.parametrize("name", RUNS)
def test_stopped_at_random_moments(name, start, tmp_path):
    script_path(name)  # skips what is not there
    settings, output = flags(RUNS[name]), tmp_path / "output"
    process = start(tmp_path, name, [*settings, "--run-dir", "whole"])
    wait_for_training(process, output)
    began = time.perf_counter()
    assert finish(process) == 0, output.read_text()
    seconds, pending, runs = time.perf_counter() - began, random.sample([*STATUS] * MOMENTS, 3 * MOMENTS), 0
    while pending:
        runs, status = runs + 1, None
        arguments = [*settings, "--run-dir", f"run{runs}"]
        while status != 0:
            process = start(tmp_path, name, arguments)
            wait_for_training(process, output)
            if pending:
                process.join(random.uniform(0, seconds))
                if process.is_alive():
                    os.kill(process.pid, pending[-1])
            status = finish(process)
            if status:
                assert status == STATUS[pending.pop()], output.read_text()
            arguments = ["--resume", f"run{runs}"]
        assert_same_run(tmp_path / f"run{runs}", tmp_path / "whole")


def stop_at(owner: object, name: str, call: int, signum: int) -> None:
    """The process sends itself the signal in that call of a function."""
    function, countdown = getattr(owner, name), iter(range(call - 1, -1, -1))

    def wrapper(*args):
        if next(countdown, None) == 0:
            os.kill(os.getpid(), signum)
        return function(*args)

    setattr(owner, name, wrapper)


def in_training(script: ModuleType, signum: int) -> None:
    stop_at(script.Run, "end_iteration", 3, signum)


def in_evaluation(script: ModuleType, signum: int) -> None:
    make_policy = script.make_policy

    def make_policy_that_stops(*args) -> Callable:
        policy = SimpleNamespace(act=make_policy(*args))
        stop_at(policy, "act", 5, signum)
        return policy.act

    script.make_policy = make_policy_that_stops


def in_recording(script: ModuleType, signum: int) -> None:
    stop_at(script.AtariGames, "render", 5, signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("name", "moment"),
    [("ppo_continuous", in_training), ("sac_continuous", in_evaluation), ("a2c_atari", in_recording)],
)
def test_stopped_at_a_moment(name, moment, signum, start, tmp_path):
    script_path(name)  # skips what is not there
    arguments = [*flags(RUNS[name]), *(["--capture-video"] if moment is in_recording else [])]
    assert finish(start(tmp_path, name, [*arguments, "--run-dir", "whole"])) == 0
    stopped = start(tmp_path, name, [*arguments, "--run-dir", "run"], partial(moment, signum=signum))
    assert finish(stopped) == STATUS[signum]
    saved = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["global_step"]
    assert saved < RUNS[name]["total_timesteps"]
    assert finish(start(tmp_path, name, ["--resume", "run"])) == 0, (tmp_path / "output").read_text()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_prints_the_command_that_goes_on(tmp_path, signum):
    settings = RUNS["ppo_continuous"] | {"total_timesteps": 10**9, "eval_interval": 0}
    command = [sys.executable, script_path("ppo_continuous"), *flags(settings), "--run-dir", "my run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], cwd=tmp_path, **pipes)
    assert "my run" in process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signum)
    output, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (STATUS[signum], "")
    saved = torch.load(tmp_path / "my run/checkpoint.pt", weights_only=True)["global_step"]
    stopped, command = re.fullmatch(r"stopped after step (\d+); to go on: python (.*)\n", output).groups()
    assert saved <= int(stopped) < 10**9
    more = [*shlex.split(command), "--total-timesteps", str(saved + 256)]
    resumed = run_script("ppo_continuous", *more[1:], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert torch.load(tmp_path / "my run/checkpoint.pt", weights_only=True)["global_step"] == saved + 256


def test_second_signal_ends_a_process_that_is_slow_to_end(tmp_path):
    slow = "import atexit, runpy, sys, time; atexit.register(time.sleep, 60); script = sys.argv.pop(1); "
    slow += "runpy.run_path(script, run_name='__main__')"
    settings = RUNS["ppo_continuous"] | {"total_timesteps": 10**9, "eval_interval": 0}
    command = [
        sys.executable,
        "-c",
        slow,
        script_path("ppo_continuous"),
        *flags(settings),
        "--run-dir",
        "run",
    ]
    process = subprocess.Popen([*map(str, command)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert "run folder" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == -signal.SIGINT
