"""Same seed, same bits: whatever is evaluated, and however often the run is killed and resumed."""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ALGOS, KILLER, SHORT_RUN, assert_same, flags, run_python, run_script, scalars


def weights(checkpoint: dict) -> torch.Tensor:
    return torch.cat([x.flatten().double() for x in checkpoint["agent"].values()])


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(train):
    first = train("first")
    assert_same(first, train("second"))
    other = train("third", seed=2)
    assert not torch.isclose(weights(first), weights(other)).all()


def test_evaluation_consumes_none_of_training(train):
    """Neither when it happens nor with how many episodes."""
    often, seldom, never = (
        train(run_dir, eval_interval=interval, eval_episodes=episodes)
        for run_dir, interval, episodes in (("often", 128, 5), ("seldom", 512, 1), ("never", 0, 1))
    )
    for part in ("agent", "optimizer", "return_moments", "recent"):
        assert_same({part: often[part]}, {part: never[part]})
        assert_same({part: seldom[part]}, {part: never[part]})


def assert_same_run(run_dir: Path, reference: Path) -> None:
    assert_same(*(torch.load(x / "checkpoint.pt", weights_only=True) for x in (run_dir, reference)))
    assert_same(*(torch.load(x / "model.pt", weights_only=True) for x in (run_dir, reference)))
    assert (run_dir / "evaluations.csv").read_text() == (reference / "evaluations.csv").read_text()
    ours, theirs = scalars(run_dir), scalars(reference)
    speed = "charts/SPS"
    assert [step for step, _ in ours.pop(speed)] == [step for step, _ in theirs.pop(speed)]
    assert ours == theirs


def test_killed_three_times_and_resumed_equals_uninterrupted(tmp_path):
    """Killed in a random minibatch, at an evaluation, and between the two files of a checkpoint.

    There are 8 minibatches in an update, 16 from one checkpoint to the next, and 64 in the whole run.
    """
    script = ALGOS / "ppo_continuous.py"
    whole = run_script("ppo_continuous", *flags(SHORT_RUN), "--run-dir", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    moment, start = random.randrange(17, 60), [*flags(SHORT_RUN), "--run-dir", "killed"]
    for function, call in (("ppo_gradient", moment), ("evaluate", 1), ("replace", 2)):
        killed = run_python("-c", KILLER, script, function, call, *start, cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
        start = ["--resume", "killed"]
    resumed = run_script("ppo_continuous", *start, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert not list(tmp_path.rglob("*.tmp"))


def test_killed_before_the_first_checkpoint_and_resumed_equals_uninterrupted(train, ppo, monkeypatch):
    reference = train("whole")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ppo, "gae", die)
        with pytest.raises(KeyboardInterrupt):
            train("killed")
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", "--resume", "killed"])
    ppo.main()
    assert_same(torch.load("killed/checkpoint.pt", weights_only=True), reference)


def test_crash_while_saving_leaves_the_old_checkpoint(ppo, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    ppo.save({"global_step": 1}, path)

    def crash(state: dict, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        ppo.save({"global_step": 2}, path)
    assert torch.load(path, weights_only=True) == {"global_step": 1}


@pytest.mark.parametrize(
    ("signum", "status", "moment"), [(signal.SIGINT, 130, "evaluation"), (signal.SIGTERM, 143, "run folder")]
)
def test_interrupted_run_saves_and_prints_the_command_that_finishes_it(tmp_path, signum, status, moment):
    """The signal follows the first line of output that tells of the moment."""
    total = 32 * 128
    settings = SHORT_RUN | {"total_timesteps": total, "checkpoint_interval": 10 * total, "eval_interval": 128}
    process = subprocess.Popen(
        [sys.executable, ALGOS / "ppo_continuous.py", *flags(settings), "--run-dir", "my run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(moment in line for line in process.stdout)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    saved = torch.load(tmp_path / "my run" / "checkpoint.pt", weights_only=True)["global_step"]
    assert saved < total
    assert f"saved at step {saved};" in output
    printed = re.search(r"python (.*--resume .*)", output)[1]
    command = f"{shlex.quote(sys.executable)} {printed}"
    resumed = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    final = torch.load(tmp_path / "my run" / "checkpoint.pt", weights_only=True)
    assert final["global_step"] == total


def test_resumed_run_takes_new_settings_from_flags(ppo, train, monkeypatch):
    train(total_timesteps=256)
    arguments = ["--resume", "run", "--total-timesteps", "512", "--ent-coef", "0.5"]
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *arguments])
    ppo.main()
    checkpoint = torch.load("run/checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 512
    expected = SHORT_RUN | {"total_timesteps": 512, "ent_coef": 0.5}
    assert {name: checkpoint["args"][name] for name in expected} == expected
    rows = Path("run/evaluations.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["256"] * 3 + ["384"] * 3 + ["512"] * 3


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_run_is_the_eager_one_up_to_rounding(train, monkeypatch):
    eager = train("eager", total_timesteps=256, eval_interval=0, clip_vloss=True, ent_coef=0.01)
    compiled_functions, compile_function = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiled_functions.append(f) or compile_function(f, **options)
    )
    compiled = train(
        "compiled", total_timesteps=256, eval_interval=0, clip_vloss=True, ent_coef=0.01, compile=True
    )
    assert compiled_functions
    torch.testing.assert_close(weights(compiled), weights(eager), atol=1e-4, rtol=1e-4)
