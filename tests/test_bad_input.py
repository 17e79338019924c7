"""Bad input: one line that begins with `error:`, status 2, no traceback, and nothing created or changed.

What tyro refuses itself it says in words and lines of its own.
"""

import ctypes.util
import dataclasses
import math
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHORT_RUN, contents, flags, run_script

TINY_RUN = SHORT_RUN | {"env_id": "InvertedPendulum-v4", "total_timesteps": 128}


@pytest.fixture(scope="session")
def finished_run(ppo, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    ppo.train(ppo.Args(**TINY_RUN, run_dir=run_dir))
    return run_dir


@pytest.fixture
def refusal(ppo, finished_run, tmp_path, monkeypatch, capfd):
    """Runs the script with a finished run in the working directory; returns what it says of the error."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "run")

    def run(*arguments: str, by_tyro: bool = False, **settings) -> str:
        before = contents(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *(arguments or flags(TINY_RUN | settings))])
        with pytest.raises(SystemExit) as stopped:
            ppo.main()
        assert contents(tmp_path) == before
        return check(stopped.value.code, capfd.readouterr().err, by_tyro)

    return run


def check(status: int, stderr: str, by_tyro: bool = False) -> str:
    assert status == 2, stderr
    assert by_tyro or re.fullmatch(r"error: .+\n", stderr), stderr
    assert "Traceback" not in stderr
    return stderr


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("HalfCheeta-v4", "HalfCheetah"),
        ("HalfCheetah-v9", "v5"),
        ("NoSuchEnvironment-v0", "NoSuchEnvironment"),
        ("no_such_module:Environment-v0", "no_such_module"),
        ("CartPole-v1", "Discrete(2)"),
        ("FrozenLake-v1", "Discrete(16)"),
        ("CarRacing-v3", "CarRacing-v3"),
        ("", "--env-id"),
    ],
)
def test_environment(refusal, env_id, hint):
    assert hint in refusal(env_id=env_id)


def numbers_out_of_range():
    """Every number that Args takes: not a number, infinite, or negative where that has no meaning."""
    yield from (
        ("gamma", 1.001),
        ("gae_lambda", 1.001),
        ("gae_lambda", -0.1),
        ("norm_adv_eps", 0),
        ("clip_coef", 0),
        ("target_kl", 0),
    )
    yield from ((name, 0) for name in ("total_timesteps", "num_envs", "num_steps", "num_minibatches"))
    yield from ((name, 0) for name in ("update_epochs", "hidden_size", "torch_threads", "eval_episodes"))
    yield from ((name, 0) for name in ("checkpoint_interval", "learning_rate", "max_grad_norm"))
    for name in ("gamma", "learning_rate", "ent_coef", "vf_coef"):
        yield name, -0.5


@pytest.mark.parametrize(("name", "value"), list(numbers_out_of_range()))
def test_number_out_of_range(refusal, name, value):
    assert f"--{name.replace('_', '-')}" in refusal(**{name: value})


def test_number_that_no_field_takes(ppo, refusal):
    """Not a number, an infinity, or -1 where whole numbers are counted."""
    for field in dataclasses.fields(ppo.Args):
        kind = str(field.type)
        for value in (math.nan, math.inf, -math.inf) if "float" in kind else (-1,) if "int" in kind else ():
            assert f"--{field.name.replace('_', '-')}" in refusal(**{field.name: value})
    assert "--learning-rate must be finite and above 0, not inf" in refusal(learning_rate=math.inf)


def test_text_in_place_of_a_number(refusal):
    assert "--num-envs" in refusal(num_envs="nan", by_tyro=True)


def test_flag_that_there_is_not(refusal):
    assert "--num-env" in refusal("--num-env", "3", by_tyro=True)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_steps": 100, "num_minibatches": 32},
        {"num_steps": 2, "num_minibatches": 4},
        {"num_steps": 16, "num_minibatches": 32},
    ],
)
def test_sizes_that_do_not_divide(refusal, sizes):
    assert "minibatches" in refusal(**sizes)


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_numbers_beside_a_saved_run(refusal, flag):
    assert "--gamma" in refusal(flag, "run", "--gamma", "nan")


def test_cuda_without_cuda(refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in refusal(device="cuda")


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_another_environment(refusal, flag):
    message = refusal(flag, "run", "--env-id", "Hopper-v4")
    assert "InvertedPendulum-v4" in message
    assert "Hopper-v4" in message


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_network_of_another_size(refusal, flag):
    """The first tensor that does not fit, and both shapes."""
    message = refusal(flag, "run", "--hidden-size", "32")
    assert all(text in message for text in ("actor.hidden1.weight", "[64, 4]", "[32, 4]"))
    assert "critic" not in message


@pytest.mark.parametrize("path", ["nowhere", "nowhere/model.pt", "empty"])
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_missing_checkpoint(refusal, tmp_path, flag, path):
    (tmp_path / "empty").mkdir()
    assert path in refusal(flag, path)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:2000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint\n" * 100),
    "a folder": lambda path: path.unlink() or path.mkdir(),
    "another object": lambda path: torch.save(torch.zeros(3), path),
    "without weights": lambda path: edit(path, lambda state: state.pop("agent")),
    "unknown setting": lambda path: edit(path, lambda state: state["args"].update(no_such_setting=1)),
    "malicious pickle": lambda path: path.write_bytes(pickle.dumps(Malicious())),
    "malicious torch file": lambda path: torch.save({"script": Malicious()}, path),
}


def edit(path: Path, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(("flag", "name"), [("--resume", "checkpoint.pt"), ("--evaluate", "model.pt")])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(refusal, flag, name, damage):
    """`refusal` sees to it that a malicious one has not made its folder."""
    DAMAGES[damage](Path("run", name))
    refusal(flag, "run")


def test_policy_in_place_of_a_checkpoint(refusal):
    shutil.copy("run/model.pt", "run/checkpoint.pt")
    refusal("--resume", "run")


@pytest.mark.parametrize(("flag", "name"), [("--resume", "checkpoint.pt"), ("--evaluate", "model.pt")])
def test_checkpoint_of_another_algorithm(refusal, flag, name):
    edit(Path("run", name), lambda state: state.update(script="a2c_atari"))
    message = refusal(flag, "run")
    assert "a2c_atari" in message
    assert "ppo_continuous" in message


@pytest.mark.parametrize("kept", ["checkpoint.pt", "model.pt", "evaluations.csv"])
def test_taken_run_folder(refusal, kept):
    for path in Path("run").iterdir():
        if path.name != kept:
            path.unlink()
    message = refusal(run_dir="run")
    assert "--resume run" in message or kept != "checkpoint.pt"


def test_file_in_place_of_a_run_folder(refusal):
    Path("file").touch()
    assert "file" in refusal(run_dir="file")


@pytest.mark.parametrize("renderer", [None, "osmesa"])
def test_no_renderer(tmp_path, renderer):
    """Unless told otherwise MuJoCo takes GLFW, which needs a display."""
    if renderer == "osmesa" and ctypes.util.find_library("OSMesa"):
        pytest.skip("OSMesa is installed")
    variables = {"MUJOCO_GL": renderer, "DISPLAY": None, "WAYLAND_DISPLAY": None}
    refused = run_script("ppo_continuous", *flags(TINY_RUN), "--capture-video", cwd=tmp_path, **variables)
    message = check(refused.returncode, refused.stderr)
    assert "MUJOCO_GL=egl" in message
    assert "apt install" in message
    assert not list(tmp_path.iterdir())


def test_in_a_process_of_its_own(tmp_path):
    refused = run_script("ppo_continuous", "--env-id", "HalfCheeta-v4", cwd=tmp_path)
    assert "HalfCheetah" in check(refused.returncode, refused.stderr)
    assert not list(tmp_path.iterdir())
