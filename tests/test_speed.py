"""benchmark/speed.py times each script by what it has. Figures come from idle machines, not from here."""

import dataclasses
import json
import re
import shutil

import ale_py
import gymnasium as gym
import pytest
import speed
import torch
from conftest import REPOSITORY, flags, run_python, script_path
from contests import CONTESTS

SPEED = REPOSITORY / "benchmark" / "speed.py"
# Of each kind of script one, with something of every kind of part; four iterations of it or more.
SHORT = {
    "ppo_continuous": {"num_steps": 32, "num_minibatches": 4, "total_timesteps": 320},
    "crossq_continuous": {"learning_starts": 8, "batch_size": 8, "total_timesteps": 60},
    "qcritic_atari": {"num_envs": 2, "num_steps": 5, "total_timesteps": 200},
    "pqn_atari": {"num_envs": 2, "num_steps": 8, "total_timesteps": 80},
    "qlearning_tabular": {"total_timesteps": 20_000},
}


def test_every_script_is_timed():
    assert {*CONTESTS} == {path.stem for path in (REPOSITORY / "algos").glob("*.py")}


@pytest.mark.parametrize("name", SHORT)
def test_parts_of_a_run_make_up_its_time(tmp_path, name):
    """All calls are found, and the parts make up the whole."""
    command = (SPEED, "--parts", name, script_path(name), *flags(SHORT[name]), "--eval-interval", 0)
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout.splitlines()[-1])
    floors = {part: times.pop(part) for part in [*times] if part.startswith("-")}
    whole = times.pop("whole loop")
    assert {*times} == {*CONTESTS[name].parts} - {*floors} | {"everything else"}
    assert min(times.values()) > 0
    assert sum(times.values()) == pytest.approx(whole)
    assert all(floor > 0 for floor in floors.values())  # on a busy machine no more can be said
    if name == "ppo_continuous":
        assert {*floors} == {"- mj_step alone", "- products alone, gradient"}
    if name == "crossq_continuous":
        gradients = {f"- products alone, gradient of the {part}" for part in ("critics", "policy")}
        assert {*floors} == {"- mj_step alone", *gradients}
    if name.endswith("_atari"):
        assert {*floors} == {f"- products alone, {part}" for part in ("forward passes", "backward pass")}


@pytest.mark.parametrize("name", [name for name, contest in CONTESTS.items() if contest.peer])
def test_peer_has_the_settings_of_the_contest(name):
    gym.register_envs(ale_py)
    contest = CONTESTS[name]
    settings, model = contest.settings, contest.peer.make(contest.settings, contest.env_ids[0], "cpu")
    if name == "pqn_atari":  # Q-learning of another kind
        assert (model.n_envs, model.batch_size, model.train_freq.frequency) == (1, 32, 4)
        return
    assert model.n_envs == settings["num_envs"]
    names = {"num_steps": "n_steps", "update_epochs": "n_epochs"}
    for name in ("num_steps", "update_epochs", "batch_size", "learning_starts"):
        if name in settings:
            assert getattr(model, names.get(name, name)) == settings[name]
    if "num_minibatches" in settings:
        assert model.n_steps * model.n_envs == model.batch_size * settings["num_minibatches"]
    sizes = {layer.out_features for layer in model.policy.modules() if hasattr(layer, "out_features")}
    assert {size for name, size in settings.items() if name.endswith("hidden_size")} <= sizes


def test_products_are_those_of_each_batch_size(monkeypatch):
    """A network that acts on 2 observations and learns from 512 has the products of both."""
    timer = speed.Timer(keep_products=True)
    forward = timer.timed("forward", torch.nn.Linear(64, 512).forward)
    with torch.no_grad():
        for size in [2] * 4 + [512] * 3:
            forward(torch.zeros(size, 64))
    assert timer.calls == {("forward", (2, 64)): 3, ("forward", (512, 64)): 2}  # without the first of each
    sizes = [args[1].shape for products in timer.products.values() for _, args in products.calls]
    assert sizes == [(2, 64), (512, 64)]
    monkeypatch.setattr(speed.Products, "seconds", lambda self: self.calls[0][1][1].shape[0])
    assert timer.products_alone(["forward"]) == 3 * 2 + 2 * 512
    assert timer.products_alone(["backward"]) == 0


def test_tables(tmp_path, capsys):
    """Of a short contest without a peer, beside another copy of the script."""
    shutil.copy(script_path("qlearning_tabular"), tmp_path)
    contest = dataclasses.replace(CONTESTS["qlearning_tabular"], settings={"total_timesteps": 30_000})
    args = speed.Args("qlearning_tabular", repetitions=1, beside=tmp_path)
    speed.compare(args, contest, "FrozenLake-v1")
    output = capsys.readouterr().out
    speeds = re.findall(r"^\| (.+) \| ([\d,]+) \| ([\d.]+) \(.*\) \| \d+ MB \|$", output, re.MULTILINE)
    assert [row[0] for row in speeds] == ["PlainRL", str(tmp_path)]
    ours, theirs = (int(row[1].replace(",", "")) for row in speeds)
    assert min(ours, theirs) > 1000
    assert [float(row[2]) for row in speeds] == [pytest.approx(ours / theirs, abs=0.006), 1]
    shares = re.findall(r"^\| ([a-z ]+) \| [\d.]+ \((\d+)%\) \|$", output, re.MULTILINE)
    assert [part for part, _ in shares] == ["environment", "everything else", "whole loop"]
    assert [int(share) for _, share in shares] == [pytest.approx(50, abs=49), pytest.approx(50, abs=49), 100]


def test_width_that_a_script_does_not_take(tmp_path):
    refused = run_python(SPEED, "--script=a2c_atari", "--hidden-size=64", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: a2c_atari has no --hidden-size\n")
