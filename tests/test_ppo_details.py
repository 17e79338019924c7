"""benchmark/grids/ppo_details.py leaves out what it says, and nothing else."""

import pytest
import torch
from conftest import REPOSITORY, SHORT_RUN, flags, load_script, run_python

BENCHMARK = REPOSITORY / "benchmark"


@pytest.mark.parametrize("detail", ["nothing", "observation-statistics", "reward-scaling", "bootstrap"])
def test_detail_is_left_out(tmp_path, detail):
    """A run of the script itself differs by that detail alone, and by nothing if nothing is left out.

    Pendulum's episodes are truncated after 200 steps.
    """
    script, details = BENCHMARK.parent / "algos" / "ppo_continuous.py", BENCHMARK / "grids" / "ppo_details.py"
    pendulum = {"env_id": "Pendulum-v1", "total_timesteps": 512, "num_envs": 1, "eval_interval": 0}
    settings = flags(SHORT_RUN | pendulum)
    runs = {"own": (script, *settings), "detail": (details, *settings, "--without", detail)}
    states = {}
    for name, command in runs.items():
        done = run_python(*command, "--run-dir", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        states[name] = torch.load(tmp_path / name / "checkpoint.pt")
    own, other = states.values()
    same_weights = torch.equal(own["agent"]["actor.hidden1.weight"], other["agent"]["actor.hidden1.weight"])
    assert same_weights == (detail == "nothing")
    assert (other["agent"]["obs_moments.var"] == 1).all() == (detail == "observation-statistics")
    assert (other["return_moments"]["var"] == 1).item() == (detail == "reward-scaling")
    assert other["script"] == "ppo_details"


def test_truncated_steps_have_no_future_without_bootstrap():
    details = load_script("ppo_details", BENCHMARK / "grids")
    gae, ones = details.ppo.gae, torch.ones(3, 1)
    done, terminated = torch.tensor([[False], [True], [False]]), torch.zeros(3, 1, dtype=torch.bool)
    details.leave_out("bootstrap")
    left_out = details.ppo.gae(ones, ones, 2 * ones, terminated, done, 0.5, 1.0)
    assert left_out.flatten().tolist() == [1.0, 0.0, 1.0]
    assert gae(ones, ones, 2 * ones, terminated, done, 0.5, 1.0).flatten().tolist() == [1.5, 1.0, 1.0]
