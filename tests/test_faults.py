"""Faults of an environment, of the user's code and of the disk: what is said of them, what is left behind."""

import itertools
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import LIMITED, RUNS, SHORT_RUN, flags, load_script, run_python, run_script, script_path


class Faulty(gym.Env):
    """Episodes of 10 steps; the 60th step is not a number or an infinity, in what `fault` names."""

    observation_space = gym.spaces.Box(-10, 10, (3,))

    def __init__(self, fault: str, discrete: bool):
        self.fault, self.steps = fault, 0
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert np.isfinite(action).all()
        self.steps += 1
        obs, reward = np.full(3, self.steps % 10, np.float32), 1.0
        if self.steps == 60:
            obs, reward = (obs + np.nan, reward) if self.fault == "observation" else (obs, np.inf)
        return obs, reward, False, self.steps % 10 == 0, {}


for fault in ("observation", "reward"):
    for discrete in (False, True):
        name = f"PlainRL/Faulty-{fault}-{'discrete' if discrete else 'continuous'}-v0"
        gym.register(name, Faulty, kwargs={"fault": fault, "discrete": discrete}, disable_env_checker=True)


@pytest.mark.parametrize("fault", ["observation", "reward"])
@pytest.mark.parametrize(
    "name", ["ppo_continuous", "sac_continuous", "crossq_continuous", "reinforce_cartpole"]
)
def test_number_that_is_not_finite_ends_the_run_with_its_name_and_step(name, fault, tmp_path):
    """In the first rollout or batch of a run; steps 119 and 120 are taken at once."""
    script = load_script(name)
    env_id = f"PlainRL/Faulty-{fault}-{'discrete' if name == 'reinforce_cartpole' else 'continuous'}-v0"
    settings = RUNS[name] | {"env_id": env_id, "eval_interval": 0, "run_dir": tmp_path / "run"}
    settings |= {"batch_episodes": 20} if name == "reinforce_cartpole" else {}
    with pytest.raises(SystemExit) as stopped:
        script.train(script.Args(**settings))
    last = tmp_path / "run" / "checkpoint.pt"
    assert stopped.value.code == f"error: {fault} not finite at step 120; the last checkpoint is {last}"
    checkpoint = torch.load(last, weights_only=True)
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


RAISES = """
import gymnasium as gym
from gymnasium.envs.classic_control import PendulumEnv
class Raises(PendulumEnv):
    steps = 0
    def step(self, action):
        Raises.steps += 1
        if Raises.steps == 300:
            raise RuntimeError("the motor is hot")
        return super().step(action)
gym.register("Raises-v0", Raises, max_episode_steps=50)
"""


def test_exception_of_an_environment_keeps_its_traceback_and_says_how_to_go_on(tmp_path):
    (tmp_path / "hot.py").write_text(RAISES)
    settings = SHORT_RUN | {"env_id": "hot:Raises-v0", "eval_interval": 0}
    failed = run_script(
        "ppo_continuous", *flags(settings), "--run-dir", "my run", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert failed.returncode == 1
    *_, raised, last = failed.stderr.splitlines()
    assert "Traceback" in failed.stderr
    assert raised == "RuntimeError: the motor is hot"
    assert re.fullmatch(
        "the run folder is my run; to go on: python .*ppo_continuous.py --resume 'my run'", last
    )


def test_fault_of_code_keeps_its_traceback(tmp_path):
    text = script_path("ppo_continuous").read_text()
    changed = text.replace("    vector_kwargs = {", "    undefined_name\n    vector_kwargs = {", 1)
    assert changed != text
    (tmp_path / "mine.py").write_text(changed)
    failed = run_python("mine.py", *flags(SHORT_RUN), cwd=tmp_path)
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert failed.stderr.endswith("NameError: name 'undefined_name' is not defined\n")
    assert not (tmp_path / "runs").exists()


def test_disk_that_is_full_from_the_start_leaves_no_folder(tmp_path):
    command = ("-c", LIMITED, 1000, script_path("ppo_continuous"), *flags(SHORT_RUN), "--run-dir", "run")
    failed = run_python(*command, cwd=tmp_path)
    assert failed.returncode == 2
    assert re.fullmatch("error: cannot write the run folder: .*File too large.*\n", failed.stderr)
    assert not list(tmp_path.iterdir())


def test_diverged_losses_are_named_before_what_follows_from_them(tmp_path, monkeypatch):
    """SAC's losses are looked at every 1,000 steps; a policy of them acts sooner."""
    sac = load_script("sac_continuous")
    gradient, updates = sac.critic_gradient, itertools.count(1)

    def diverge(*args):
        gradients, scalars = gradient(*args)
        return [g * np.nan if next(updates) == 20 else g for g in gradients], scalars

    monkeypatch.setattr(sac, "critic_gradient", diverge)
    settings = RUNS["sac_continuous"] | {"checkpoint_interval": 10_000, "eval_interval": 0}
    with pytest.raises(SystemExit) as stopped:
        sac.train(sac.Args(**settings, run_dir=tmp_path / "run"))
    assert re.match(r"error: losses/(qf|actor)_loss not finite at step \d\d;", stopped.value.code)


def test_evaluation_takes_threads_from_the_command_line(ppo, train, monkeypatch):
    train(total_timesteps=128)
    before = torch.get_num_threads()
    monkeypatch.setattr(
        sys, "argv", ["ppo.py", "--evaluate", "run", "--eval-episodes", "1", "--torch-threads", "3"]
    )
    ppo.main()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)
    assert Path("run/model.pt").exists()
