"""What train makes of episodes, seen through environments that know what happened in them."""

import copy
import inspect
import re
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
from conftest import scalars
from gymnasium.spaces import Box
from torch.distributions import Normal


class Ledger(gym.Env):
    """Writes down every step. An observation names the environment, the episode and the step.

    Episodes of 1 to 8 steps end by termination and truncation in turn, on the third turn by both at once.
    """

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Box(-1, 1, (2,))
    ledgers = ()

    def __init__(self):
        self.steps, self.episode, self.number = [], 0, len(Ledger.ledgers)
        Ledger.ledgers += (self.steps,)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.step_number = self.episode + 1, 0
        self.length = self.np_random.integers(1, 9)
        return self.observation(), {}

    def observation(self):
        return np.array([self.number, self.episode, self.step_number], np.float32) / 10

    def step(self, action):
        before, self.step_number = self.observation(), self.step_number + 1
        ends = self.step_number == self.length
        terminated, truncated = bool(ends and self.episode % 3 != 1), bool(ends and self.episode % 3 != 2)
        reward = self.np_random.normal(2)
        self.steps.append((before, action.copy(), reward, self.observation(), terminated, truncated))
        return self.observation(), reward, terminated, truncated, {}


class Clock(gym.Env):
    """Reward 1 at each step; the observation is the time modulo 4; after every 4 steps the episode ends."""

    observation_space = Box(0, 1, (4,))
    action_space = Box(-1, 1, (1,))

    def __init__(self, terminates: bool):
        self.terminates = terminates

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.eye(4, dtype=np.float32)[0], {}

    def step(self, action):
        self.time += 1
        ends = self.time == 4
        obs = np.eye(4, dtype=np.float32)[self.time % 4]
        return obs, 1.0, ends and self.terminates, ends and not self.terminates, {}


class Uneven(gym.Env):
    """Episodes of 2 steps after an even seed and of 20 after an odd one, with reward 1 at each step."""

    observation_space = Box(-np.inf, np.inf, (1,))
    action_space = Box(-1, 1, (1,))
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def render(self):
        return np.full((16, 16, 3), 10 * self.time, np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.length = 2 if self.np_random_seed % 2 == 0 else 20
        self.time = 0
        return self.np_random.standard_normal(1, dtype=np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, self.time == self.length, False, {}


class Jackpot(Uneven):
    """Nothing but 1,000 at the 100th step of all and -1,000 at the 300th."""

    steps = 0

    def step(self, action):
        obs, _, *rest = super().step(action)
        self.steps += 1
        return obs, {100: 1000.0, 300: -1000.0}.get(self.steps, 0.0), *rest


class Broken(Uneven):
    """The 300th reward is not a number."""

    rewards = 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.rewards += 1
        return obs, np.nan if self.rewards == 300 else reward, *rest


gym.register("PlainRL/Ledger-v0", Ledger)
gym.register("PlainRL/TerminatingClock-v0", Clock, kwargs={"terminates": True})
gym.register("PlainRL/TruncatingClock-v0", Clock, kwargs={"terminates": False})
gym.register("PlainRL/Uneven-v0", Uneven)
gym.register("PlainRL/Jackpot-v0", Jackpot)
gym.register("PlainRL/Broken-v0", Broken)


@pytest.fixture
def spy(ppo, monkeypatch):
    """Records what a function of the script was called with, as it was then, and what it returned."""

    def record(name: str) -> list[dict]:
        function, calls = getattr(ppo, name), []

        def wrapper(*args, **kwargs):
            arguments = copy.deepcopy(inspect.signature(function).bind(*args, **kwargs).arguments)
            calls.append(arguments | {"result": function(*args, **kwargs)})
            return calls[-1]["result"]

        monkeypatch.setattr(ppo, name, wrapper)
        return calls

    return record


@pytest.mark.parametrize("norm_adv", [True, False])
def test_every_transition_is_used_once_with_the_value_of_what_it_led_to(ppo, train, spy, norm_adv):
    num_envs, num_steps, updates, epochs, minibatches = 3, 16, 4, 2, 4
    acting, gae_calls, gradient_calls = spy("numpy_actor"), spy("gae"), spy("ppo_gradient")
    Ledger.ledgers = ()
    train(
        env_id="PlainRL/Ledger-v0",
        num_envs=num_envs,
        num_steps=num_steps,
        total_timesteps=updates * num_steps * num_envs,
        num_minibatches=minibatches,
        update_epochs=epochs,
        gamma=0.9,
        gae_lambda=0.8,
        log_std_init=-0.3,
        norm_adv=norm_adv,
        norm_adv_eps=0.2,
        eval_interval=0,
        checkpoint_interval=2 * num_steps * num_envs,
    )
    ledgers = [ledger for ledger in Ledger.ledgers if ledger]
    assert [len(ledger) for ledger in ledgers] == [updates * num_steps] * num_envs
    before, actions, rewards, after, terminated, truncated = (
        np.stack([[step[part] for step in ledger] for ledger in ledgers], axis=1) for part in range(6)
    )  # (updates * num_steps, num_envs, ...)
    done = terminated | truncated
    assert set(np.unique(2 * terminated + truncated)) == {0, 1, 2, 3}
    assert not done[num_steps - 1 :: num_steps].all()
    cut = done.copy()
    cut[len(done) // 2 - 1] = True  # the checkpoint resets the environments
    np.testing.assert_array_equal(before[1:][~cut[:-1]], after[:-1][~cut[:-1]])
    discounted_returns = rewards.copy()
    for t in range(1, len(rewards)):
        discounted_returns[t] += 0.9 * discounted_returns[t - 1] * ~cut[t - 1]

    gradient_calls = np.array(gradient_calls).reshape(updates, epochs, minibatches)
    for update, (gae_call, calls) in enumerate(zip(gae_calls, gradient_calls, strict=True)):
        rows, agent = slice(update * num_steps, (update + 1) * num_steps), acting[update]["agent"]
        with torch.no_grad():
            obs = agent.normalize(torch.from_numpy(before[rows]))
            means, values = agent(obs)
            next_values = agent(agent.normalize(torch.from_numpy(after[rows])))[1]
        assert (gae_call["gamma"], gae_call["lam"]) == (0.9, 0.8)
        np.testing.assert_array_equal(gae_call["terminated"], terminated[rows])
        np.testing.assert_array_equal(gae_call["done"], done[rows])
        scale = discounted_returns[: rows.stop].std()
        np.testing.assert_allclose(gae_call["rewards"], rewards[rows] / scale, rtol=1e-4)
        torch.testing.assert_close(gae_call["values"], values)
        torch.testing.assert_close(gae_call["next_values"], next_values)

        policy = Normal(means, agent.log_std.detach().exp())
        for batches in ([call["batch"] for call in epoch] for epoch in calls):
            used = ppo.Rollout(*map(torch.cat, zip(*batches, strict=True)))
            order = np.lexsort(used.obs.numpy().T)[np.lexsort(obs.numpy().reshape(-1, 3).T).argsort()]
            used = ppo.Rollout(*(x[order].unflatten(0, obs.shape[:2]) for x in used))
            torch.testing.assert_close(used.obs, obs)
            np.testing.assert_allclose(used.actions.clamp(-1, 1), actions[rows], atol=1e-6)
            noise = (used.actions - policy.mean) / policy.stddev
            assert used.actions.abs().max() > 1
            assert noise.std().item() == pytest.approx(1, abs=0.25)
            torch.testing.assert_close(used.log_probs, policy.log_prob(used.actions).sum(-1))
            torch.testing.assert_close(used.values, values)
            torch.testing.assert_close(used.returns, values + gae_call["result"])
            for batch in batches:
                advantages = batch.returns - batch.values
                if norm_adv:
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 0.2)
                torch.testing.assert_close(batch.advantages, advantages, atol=1e-4, rtol=1e-4)
        assert not torch.equal(calls[0, 0]["batch"].obs, calls[1, 0]["batch"].obs)  # shuffled anew


def test_scaled_rewards_are_clipped_at_10(train, spy):
    """With gamma 0 the scale is the rewards' own deviation, 1,000 / sqrt(200): unclipped, 14 and -14."""
    calls = spy("gae")
    train(
        env_id="PlainRL/Jackpot-v0",
        total_timesteps=400,
        num_envs=1,
        num_steps=400,
        gamma=0.0,
        eval_interval=0,
        checkpoint_interval=999,
    )
    [rewards] = [call["rewards"].flatten() for call in calls]
    assert rewards.nonzero().flatten().tolist() == [99, 299]
    assert rewards[rewards != 0].tolist() == [10, -10]


def test_logged_returns_are_the_raw_ones_of_whole_episodes(train):
    Ledger.ledgers = ()
    train(
        env_id="PlainRL/Ledger-v0",
        total_timesteps=384,
        num_steps=64,
        eval_interval=0,
        checkpoint_interval=999,
    )
    episodes = []  # (global step of the rollout in which it ended, return, length)
    for ledger in filter(None, Ledger.ledgers):
        rewards = []
        for t, (_, _, reward, _, terminated, truncated) in enumerate(ledger):
            rewards.append(reward)
            if terminated or truncated:
                episodes.append((128 * (t // 64 + 1), sum(rewards), len(rewards)))
                rewards = []
    logged = scalars(Path("run"))
    for step in (128, 256, 384):
        mean_return, mean_length = np.mean(
            [episode[1:] for episode in episodes if episode[0] == step], axis=0
        )
        returns = [episode[1] for episode in episodes if episode[0] == step]
        for tag, value in (("", mean_return), ("_min", min(returns)), ("_max", max(returns))):
            assert dict(logged[f"charts/episodic_return{tag}"])[step] == pytest.approx(value)
        assert dict(logged["charts/episodic_length"])[step] == pytest.approx(mean_length)
    first_100 = [episode[1] for episode in episodes if episode[0] == 128]
    assert len(first_100) < 100
    assert dict(logged["charts/return_mean_100"])[128] == pytest.approx(np.mean(first_100))


@pytest.mark.parametrize(("target_kl", "epochs"), [(None, 3), (1e-12, 1), (1e3, 3)])
def test_target_kl_ends_an_update_after_the_epoch_that_exceeds_it(train, spy, target_kl, epochs):
    calls = spy("ppo_gradient")
    train(
        env_id="PlainRL/Uneven-v0", total_timesteps=256, update_epochs=3, target_kl=target_kl, eval_interval=0
    )
    assert len(calls) == 2 * epochs * 4


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_learning_rate_falls_linearly(train, anneal_lr):
    train(
        env_id="PlainRL/Uneven-v0",
        total_timesteps=512,
        learning_rate=4e-3,
        anneal_lr=anneal_lr,
        eval_interval=0,
    )
    rates = [value for _, value in scalars(Path("run"))["charts/learning_rate"]]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3] if anneal_lr else [4e-3] * 4)


@pytest.mark.parametrize("terminates", [False, True])
def test_value_of_a_state_depends_on_how_episodes_end(ppo, train, terminates):
    """With gamma 0.9 an endless stream of rewards of 1 is worth 10, wherever time limits cut it."""
    env_id = f"PlainRL/{'Terminating' if terminates else 'Truncating'}Clock-v0"
    checkpoint = train(
        env_id=env_id,
        total_timesteps=8192,
        num_envs=1,
        num_steps=128,
        update_epochs=10,
        gamma=0.9,
        eval_interval=0,
        checkpoint_interval=10_000,
    )
    args = ppo.Args(**checkpoint["args"])
    agent = ppo.make_agent(args, ppo.make_envs(args, 1))
    agent.load_state_dict(checkpoint["agent"])
    moments = ppo.RunningMoments(())
    moments.load_state_dict(checkpoint["return_moments"])
    with torch.no_grad():
        values = agent(agent.normalize(torch.eye(4)))[1] * moments.std()
    expected = [(1 - 0.9**steps) / 0.1 if terminates else 10 for steps in (4, 3, 2, 1)]
    np.testing.assert_allclose(values, expected, rtol=0.05)


def test_non_finite_reward_stops_the_run_and_names_step_and_checkpoint(train, capfd):
    """The reward of the 300th step is not a number; the checkpoint is that of the second update."""
    with pytest.raises(SystemExit) as stopped:
        train(env_id="PlainRL/Broken-v0", num_envs=1, num_steps=128, checkpoint_interval=256)
    message = str(stopped.value.code)
    assert re.match("error: reward .*300.*run/checkpoint.pt", message)
    checkpoint = torch.load("run/checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 256
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@pytest.mark.parametrize(("episodes", "expected"), [(6, [2] * 3 + [20] * 3), (3, [2, 2, 20]), (1, [2])])
def test_each_environment_plays_its_share_of_an_evaluation(ppo, episodes, expected):
    """Counted as they end, the long episodes of the second environment would hardly be seen."""
    envs = ppo.make_envs(ppo.Args(env_id="PlainRL/Uneven-v0"), 2)
    returns, lengths = ppo.evaluate(lambda obs, rng: np.zeros((2, 1)), envs, episodes, seed=4)
    assert sorted(lengths) == expected
    assert sorted(returns) == expected


def test_video_is_the_first_episode_of_the_first_environment(ppo, tmp_path):
    video = tmp_path / "folder" / "video.mp4"
    envs = ppo.make_envs(ppo.Args(env_id="PlainRL/Uneven-v0"), 2, render=True)
    ppo.evaluate(lambda obs, rng: np.zeros((2, 1)), envs, episodes=4, seed=4, video=video)
    assert len(list(iio.imiter(video, plugin="FFMPEG"))) == 2


def test_evaluation_samples_actions_independently_of_the_environment(ppo):
    seen = []

    def policy(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        seen.append((obs.copy(), rng.standard_normal(obs.shape, dtype=np.float32)))
        return np.zeros_like(obs)

    envs = ppo.make_envs(ppo.Args(env_id="PlainRL/Uneven-v0"), 2)
    ppo.evaluate(policy, envs, episodes=2, seed=4)
    first_obs, noise = seen[0]
    assert not np.isin(first_obs, noise).any()
