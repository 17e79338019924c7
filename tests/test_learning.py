"""Each script learns what chance does not reach."""

import numpy as np
import pytest


@pytest.mark.parametrize("num_envs", [1, 4])
def test_ppo_balances_the_pendulum(ppo, train, num_envs):
    """A random policy keeps InvertedPendulum up for fewer than 10 steps of at most 1,000, worth 1 each."""
    settings = {"env_id": "InvertedPendulum-v4", "num_envs": num_envs, "num_steps": 1024 // num_envs}
    settings |= {"update_epochs": 10, "num_minibatches": 16, "learning_rate": 1e-3, "eval_interval": 0}
    checkpoint = train(**settings, total_timesteps=20_480, checkpoint_interval=100_000)
    args = ppo.Args(**checkpoint["args"] | {"greedy": True})
    envs = ppo.make_envs(args, 10)
    agent = ppo.make_agent(args, envs)

    def greedy_return() -> float:
        policy = ppo.make_policy(args, agent, envs.single_action_space)
        return np.mean(ppo.evaluate(policy, envs, episodes=10, seed=0)[0])

    assert greedy_return() < 100
    agent.load_state_dict(checkpoint["agent"])
    assert greedy_return() > 500
