"""Same seed, same bits: whatever is evaluated, and however often the run is killed and resumed."""

import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    KILLER,
    LIMITED,
    RUNS,
    SHORT_RUN,
    assert_same,
    flags,
    load_script,
    run_python,
    run_script,
    scalars,
    script_path,
)


def weights(checkpoint: dict) -> torch.Tensor:
    return torch.cat([x.flatten().double() for x in checkpoint["agent"].values()])


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(train):
    first = train("first")
    assert_same(first, train("second"))
    other = train("third", seed=2)
    assert not torch.isclose(weights(first), weights(other)).all()


@pytest.mark.parametrize("name", RUNS)
def test_every_generator_is_seeded_anew_at_each_checkpoint(name, tmp_path, monkeypatch):
    """A seed that stayed the same would repeat the same noise after each of them, to the same bits."""
    script, seeds = load_script(name), {}
    seed_of = script.Run.seed

    def seed(run, stream: int) -> int:
        seeds[run.global_step, stream] = seed_of(run, stream)
        return seeds[run.global_step, stream]

    monkeypatch.setattr(script.Run, "seed", seed)
    script.train(script.Args(**RUNS[name] | {"eval_interval": 0}, run_dir=tmp_path / "run"))
    own = {0, 1}
    if name.endswith("_atari"):
        del seeds[0, 0]  # of the games, which go on
        own = {1}
    steps = {step for step, _ in seeds}
    streams = {stream for _, stream in seeds}
    assert len(steps) > 1
    assert streams >= own
    assert seeds.keys() == {(step, stream) for step in steps for stream in streams}
    assert len(set(seeds.values())) == len(seeds)


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
    script = script_path("ppo_continuous")
    whole = run_script("ppo_continuous", *flags(SHORT_RUN), "--run-dir", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    moment, start = random.randrange(17, 60), [*flags(SHORT_RUN), "--run-dir", "killed"]
    # A resumed process moves config.json and evaluations.csv into place, then model.pt and checkpoint.pt.
    for function, call in (("ppo_gradient", moment), ("evaluate", 1), ("replace", 4)):
        killed = run_python("-c", KILLER, script, function, call, *start, cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
        start = ["--resume", "killed"]
    saved = [torch.load(tmp_path / "killed" / f"{x}.pt", weights_only=True) for x in ("checkpoint", "model")]
    assert saved[0]["global_step"] < saved[1]["global_step"]
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
    ppo.write(path, {"global_step": 1})

    def crash(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", crash)
    with pytest.raises(KeyboardInterrupt):
        ppo.write(path, {"global_step": 2})
    assert torch.load(path, weights_only=True) == {"global_step": 1}


@pytest.mark.parametrize(
    ("hidden_size", "limit", "file"), [(64, 80_000, "checkpoint"), (8, 25_000, "events")]
)
def test_full_disk_ends_the_run_in_one_line_and_the_rest_equals_uninterrupted(
    ppo, train, tmp_path, monkeypatch, hidden_size, limit, file
):
    """Where there is no room for the checkpoint that has Adam's moments, and where TensorBoard finds none."""
    settings = SHORT_RUN | {"hidden_size": hidden_size, "num_steps": 16, "eval_interval": 96}
    train("whole", **settings)
    command = ("-c", LIMITED, limit, script_path("ppo_continuous"), *flags(settings), "--run-dir", "full")
    full = run_python(*command, cwd=tmp_path)
    assert full.returncode == 1, full.stderr
    ending = "the last checkpoint is full/checkpoint.pt"
    failed = re.fullmatch(
        rf"error: cannot write \(.*File too large.*\) at step (\d+); {ending}\n", full.stderr
    )
    assert failed, full.stderr
    assert max(Path("full").iterdir(), key=lambda path: path.stat().st_size).name.startswith(file)
    saved = torch.load("full/checkpoint.pt", weights_only=True)["global_step"]
    assert (
        (saved, int(failed[1])) == (0, 256) if file == "checkpoint" else 256 <= saved < int(failed[1]) < 1024
    )
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", "--resume", "full"])
    time.sleep(1)  # TensorBoard orders files by the second in which they were begun
    ppo.main()
    assert_same_run(Path("full"), Path("whole"))


def test_row_that_a_full_disk_cut_off_is_dropped(ppo, train, monkeypatch):
    train(total_timesteps=256)
    with Path("run/evaluations.csv").open("a") as file:
        file.write("25")
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", "--resume", "run", "--total-timesteps", "512"])
    ppo.main()
    rows = [row.split(",") for row in Path("run/evaluations.csv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == ["256"] * 3 + ["384"] * 3 + ["512"] * 3


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
