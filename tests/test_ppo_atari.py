"""What only PPO has on Atari games; test_atari.py tests what it shares with the other scripts."""

import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load_script, scalars
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv
from test_atari import FlatPixels, games
from torch.distributions import Categorical

NUM_ENVS, NUM_STEPS = 3, 40
ROLLOUT = NUM_ENVS * NUM_STEPS
SHORT_RUN = {
    "env_id": "PlainRL/SpaceInvaders-v0",
    "num_envs": NUM_ENVS,
    "num_steps": NUM_STEPS,
    "num_minibatches": 4,
    "update_epochs": 2,
    "torch_threads": 1,
    "eval_interval": 0,
    "checkpoint_interval": 100_000,
}


@pytest.fixture(scope="session")
def ppo_atari() -> ModuleType:
    return load_script("ppo_atari")


@pytest.fixture
def train(ppo_atari, tmp_path, monkeypatch):
    """Trains in this process, in tmp_path/run; returns what TensorBoard shows."""
    monkeypatch.chdir(tmp_path)

    def run(**settings) -> dict:
        ppo_atari.train(ppo_atari.Args(**(SHORT_RUN | settings | {"run_dir": Path("run")})))
        return scalars(Path("run"))

    return run


def record(monkeypatch, owner, name: str) -> list[tuple]:
    """Arguments, tensors as they were, and result of each call from here on."""
    function, calls = getattr(owner, name), []

    def copy(x):
        return x.detach().clone() if torch.is_tensor(x) else x

    def wrapper(*args):
        before = [args[0], *map(copy, args[1:])] if isinstance(args[0], torch.nn.Module) else map(copy, args)
        calls.append((before := list(before), None))
        result = function(*args)
        calls[-1] = (before, tuple(map(copy, result)) if isinstance(result, tuple) else copy(result))
        return result

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def row_keys(*columns) -> list[bytes]:
    """Each row's bytes over all columns, (batch, ...) each."""
    columns = [np.ascontiguousarray(column) for column in columns]
    return [b"".join(column[i].tobytes() for column in columns) for i in range(len(columns[0]))]


def test_every_transition_is_learned_from_once_in_each_epoch(ppo_atari, train, monkeypatch):
    """As it was seen, with signs of rewards, ends by a lost life too, values of what was cut off."""
    histories = games(ppo_atari, monkeypatch)
    passes = record(monkeypatch, ppo_atari.AtariAgent, "forward")
    targets, losses = (record(monkeypatch, ppo_atari, name) for name in ("gae", "ppo_loss"))
    logged = train(total_timesteps=6 * ROLLOUT, gamma=0.9, gae_lambda=0.8, norm_adv=True)
    history = histories[0]
    actions, obs, rewards, terminated, truncated, infos = (list(x) for x in zip(*history[1:], strict=True))
    observations, done = [history[0][1], *obs], np.array(terminated) | truncated
    assert len(actions) == 6 * NUM_STEPS
    assert np.max(rewards) > 1
    assert np.any(terminated)
    assert np.any(truncated)

    passes, losses, all_returns = iter(passes), iter(losses), []
    for update, (arguments, advantages) in enumerate(targets):
        first = update * NUM_STEPS
        rows = slice(first, first + NUM_STEPS)
        values, log_probs = [], []
        bootstraps = np.zeros((NUM_STEPS, NUM_ENVS), np.float32)
        for step in range(first, first + NUM_STEPS):
            (_, seen), (logits, value) = next(passes)
            np.testing.assert_array_equal(seen, observations[step])
            values.append(value[:, 0].numpy())
            taken = torch.from_numpy(actions[step])[:, None]
            log_probs.append(logits.log_softmax(-1).gather(-1, taken)[:, 0].numpy())
            if (cut_off := truncated[step]).any():
                (_, seen), (_, value) = next(passes)
                np.testing.assert_array_equal(seen, infos[step]["final_obs"][cut_off])
                bootstraps[step - first, cut_off] = value[:, 0]
        (_, seen), (_, value) = next(passes)
        np.testing.assert_array_equal(seen, observations[first + NUM_STEPS])
        next_values = np.where(done[rows], bootstraps, [*values[1:], value[:, 0].numpy()])
        facts = np.sign(rewards[rows]), values, next_values, terminated[rows], done[rows]
        for x, y in zip(arguments, (*facts, 0.9, 0.8), strict=True):
            np.testing.assert_array_equal(x, y)

        flat_values, flat_advantages = np.concatenate(values), advantages.flatten().numpy()
        all_returns.append(returns := flat_advantages + flat_values)
        columns = (np.concatenate(x) for x in (observations[rows], actions[rows], log_probs))
        keys = row_keys(*columns, flat_values, returns)
        advantage_of, orders = dict(zip(keys, flat_advantages, strict=True)), []
        for epoch in range(2):
            orders.append([])
            for minibatch in range(4):
                (log_ratio, new_values, _, batch, *_), _ = next(losses)
                (_, seen), (logits, value) = next(passes)
                assert batch.obs.dtype == torch.uint8
                np.testing.assert_array_equal(seen, batch.obs)
                np.testing.assert_array_equal(new_values, value[:, 0])
                new_log_probs = Categorical(logits=logits).log_prob(batch.actions)
                np.testing.assert_allclose(log_ratio, new_log_probs - batch.log_probs, atol=1e-6)
                if epoch == minibatch == 0:  # it is still the policy that acted
                    np.testing.assert_allclose(log_ratio, 0, atol=1e-5)
                chosen = row_keys(*batch[:4], batch.returns)
                own = np.array([advantage_of[key] for key in chosen])
                own = (own - own.mean()) / own.std(ddof=1)
                np.testing.assert_allclose(batch.advantages, own, atol=1e-4)
                orders[-1] += chosen
            assert Counter(orders[-1]) == Counter(keys)
        assert len({tuple(order) for order in [keys, *orders]}) == 3
    assert next(passes, None) is next(losses, None) is None
    assert logged["values/targets"] == [(6 * ROLLOUT, pytest.approx(np.mean(all_returns), rel=1e-5))]


@pytest.mark.parametrize("norm_adv", [False, True])
def test_update_is_that_of_stable_baselines3(ppo_atari, train, monkeypatch, norm_adv):
    """Loss, gradient and diagnostics on the same rollout: of the policy that acted, and of the next one."""
    steps = []

    class Adam(torch.optim.Adam):
        def step(self):
            parameters = self.param_groups[0]["params"]
            steps.append([(p.detach().clone(), p.grad.clone()) for p in parameters])
            super().step()

    def make_agent(args, envs):  # whose actions depend on what it sees
        agent = ppo_atari.AtariAgent(6, 1, False)
        torch.nn.init.normal_(agent.policy.weight, std=0.1)
        return agent

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    monkeypatch.setattr(ppo_atari, "make_agent", make_agent)
    losses = record(monkeypatch, ppo_atari, "ppo_loss")
    settings = {"ent_coef": 0.03, "norm_adv": norm_adv, "learning_rate": 5e-5, "num_minibatches": 1}
    settings |= {"clip_coef": 0.1, "anneal_clip": False, "total_timesteps": ROLLOUT}
    logged = train(**settings, vf_coef=0.8, max_grad_norm=0.3)

    class Still(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        action_space = gym.spaces.Discrete(6)

    envs, theirs = DummyVecEnv([Still] * NUM_ENVS), {"ent_coef": 0.03, "vf_coef": 0.4, "max_grad_norm": 0.3}
    sizes = {"n_steps": NUM_STEPS, "batch_size": ROLLOUT, "n_epochs": 1, "clip_range": 0.1}
    peer = PPO("CnnPolicy", envs, **sizes, **theirs, normalize_advantage=norm_adv, device="cpu")
    peer.lr_schedule = lambda _: 0.0
    peer.policy.features_extractor.cnn[-1] = FlatPixels()
    layers = [*peer.policy.features_extractor.modules(), peer.policy.action_net, peer.policy.value_net]
    layers = [layer for layer in layers if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    counterparts = [p for layer in layers for p in layer.parameters()]
    fractions = []
    for parameters, ((*_, batch, clip_coef, _), result) in zip(steps, losses, strict=True):
        for (weight, _), p in zip(parameters, counterparts, strict=True):
            p.data = weight.clone()
        peer.rollout_buffer.reset()
        for name, x in batch._asdict().items():
            array = getattr(peer.rollout_buffer, {"obs": "observations"}.get(name, name))
            array[:] = x.numpy().reshape(array.shape)
        peer.rollout_buffer.full = True
        told = {}
        peer.set_logger(SimpleNamespace(record=lambda name, x, told=told, **_: told.update({name: x})))
        peer.train()
        assert clip_coef == 0.1
        assert result[1].item() == pytest.approx(told["train/policy_gradient_loss"], abs=1e-5)
        assert result[2].item() == pytest.approx(told["train/value_loss"] / 2, rel=1e-4)
        assert result[0].item() == pytest.approx(told["train/loss"], abs=1e-5)
        for (_, gradient), p in zip(parameters, counterparts, strict=True):
            torch.testing.assert_close(gradient, p.grad, atol=1e-5, rtol=1e-3)
        fractions.append(told["train/clip_fraction"])
    assert fractions[0] == 0 < fractions[1] < 1
    for ours, name in (("approx_kl", "approx_kl"), ("clipfrac", "clip_fraction")):
        assert logged[f"losses/{ours}"][-1][1] == pytest.approx(told[f"train/{name}"], rel=1e-3)
    assert logged["losses/entropy"][-1][1] == pytest.approx(-told["train/entropy_loss"], abs=1e-5)


@pytest.mark.parametrize("anneal", [False, True])
def test_step_size_and_clip_range_fall_together(ppo_atari, train, monkeypatch, anneal):
    rates = []

    class Adam(torch.optim.Adam):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    losses = record(monkeypatch, ppo_atari, "ppo_loss")
    settings = {"num_steps": 5, "num_minibatches": 1, "total_timesteps": 60}
    logged = train(**settings, anneal_lr=anneal, anneal_clip=anneal, checkpoint_interval=15)
    left = np.array([1, 0.75, 0.5, 0.25] if anneal else [1] * 4)
    assert rates == pytest.approx(5e-4 * left.repeat(2))
    assert [arguments[4] for arguments, _ in losses] == pytest.approx(0.2 * left.repeat(2))
    for tag, first in (("charts/learning_rate", 5e-4), ("charts/clip_coef", 0.2)):
        assert [value for _, value in logged[tag]] == pytest.approx(first * left)


def test_log_probs_and_entropies_are_those_of_torch_distributions(ppo_atari):
    logits, actions = 3 * torch.randn(16, 5), torch.randint(5, (16,))
    reference = Categorical(logits=logits)
    log_probs, entropies = ppo_atari.log_probs_and_entropies(logits, actions)
    torch.testing.assert_close(log_probs, reference.log_prob(actions))
    torch.testing.assert_close(entropies, reference.entropy())


@pytest.mark.parametrize("num_minibatches", [7, 60])
def test_minibatches_must_be_equal_and_have_a_deviation(train, capfd, num_minibatches):
    with pytest.raises(SystemExit) as stopped:
        train(num_steps=20, num_minibatches=num_minibatches)
    assert stopped.value.code == 2
    assert re.fullmatch(rf"error: .*60 .*{num_minibatches} .*\n", capfd.readouterr().err)
    assert not Path("run").exists()
