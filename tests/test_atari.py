"""A2C, the Q critic, PPO and PQN on Atari games: what they share, then what the first two have alone."""

import itertools
import math
import re
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ale_py
import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    KILLER,
    assert_same,
    contents,
    evaluation_seed,
    flags,
    load_script,
    run_python,
    run_script,
    scalars,
)
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3 import A2C
from stable_baselines3.common.vec_env import DummyVecEnv
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPTS = ("a2c_atari", "qcritic_atari", "ppo_atari", "pqn_atari")
with_n_step_returns = pytest.mark.parametrize("atari", SCRIPTS[:2], indirect=True)
with_policy = pytest.mark.parametrize("atari", SCRIPTS[:3], indirect=True)
OWN_SETTINGS = {
    "ppo_atari": {"num_minibatches": 5, "update_epochs": 1},
    "pqn_atari": {"num_minibatches": 5, "update_epochs": 1, "end_e": 0.5},
}
OWN_TAGS = {
    "qcritic_atari": {"values/q_mean", "values/q_spread", "values/state_values", "values/q_gap"},
    "ppo_atari": {"losses/approx_kl", "losses/clipfrac", "charts/clip_coef"},
    "pqn_atari": {"losses/td_loss", "charts/epsilon"},
}
SHORT_RUN = {
    "env_id": "PlainRL/Breakout-v0",
    "total_timesteps": 480,
    "num_envs": 3,
    "num_steps": 5,
    "torch_threads": 1,
    "eval_interval": 180,
    "eval_episodes": 2,
    "checkpoint_interval": 120,
}
TAGS = {
    *("charts/episodic_return", "charts/episodic_return_min", "charts/episodic_return_max"),
    *("charts/episodic_length", "charts/return_mean_100", "charts/SPS", "charts/learning_rate"),
    *("losses/grad_norm", "losses/explained_variance", "values/predictions", "values/targets"),
    *("eval/return_mean", "eval/return_stderr", "eval/length_mean"),
}
POLICY_TAGS = {
    *("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/total", "values/advantages"),
}

# Games of at most 100 frames, which begin without idle frames and without the first shot.
START = {"noop_max": 0, "use_fire_reset": False}
SHORT = {"frameskip": 4, "max_num_frames_per_episode": 100, **START}
gym.register("PlainRL/Breakout-v0", "ale_py.env:AtariEnv", kwargs={"game": "breakout", **SHORT})
LONGER = SHORT | {"max_num_frames_per_episode": 700}
gym.register("PlainRL/SpaceInvaders-v0", "ale_py.env:AtariEnv", kwargs={"game": "space_invaders", **LONGER})


def short_run(atari) -> dict:
    return SHORT_RUN | OWN_SETTINGS.get(atari.SCRIPT, {})


def returns_function(atari) -> str:
    return {"ppo_atari": "gae", "pqn_atari": "q_lambda_returns"}.get(atari.SCRIPT, "n_step_returns")


@pytest.fixture(scope="session", params=SCRIPTS)
def atari(request) -> ModuleType:
    return load_script(request.param)


@pytest.fixture(scope="session")
def a2c() -> ModuleType:
    return load_script("a2c_atari")


@pytest.fixture(scope="session")
def qcritic() -> ModuleType:
    return load_script("qcritic_atari")


@pytest.fixture
def train(atari, tmp_path, monkeypatch):
    """Trains in this process, in a new run folder of tmp_path; returns the checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(run_dir: str = "run", **settings) -> dict:
        atari.train(atari.Args(**(short_run(atari) | settings | {"run_dir": Path(run_dir)})))
        return torch.load(Path(run_dir, "checkpoint.pt"), weights_only=True)

    return run


@pytest.fixture
def main(atari, monkeypatch):
    def run(*arguments) -> None:
        monkeypatch.setattr(sys, "argv", [f"{atari.SCRIPT}.py", *map(str, arguments)])
        atari.main()

    return run


def games(atari, monkeypatch) -> list[list[tuple]]:
    """For each set of games that is made from here on, what its resets and steps took and returned."""
    histories = []

    class Witness(atari.AtariGames):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.history = []
            histories.append(self.history)

        def reset(self, **options):
            result = super().reset(**options)
            self.history.append(("reset", *result))
            return result

        def step(self, actions):
            result = super().step(actions)
            self.history.append((actions.copy(), *result))
            return result

    monkeypatch.setattr(atari, "AtariGames", Witness)
    return histories


def slow_returns(rewards, bootstraps, done, last_value, gamma) -> list[float]:
    """Each return as a sum of its own, for one environment."""
    returns = []
    for t in range(len(rewards)):
        total, discount = 0.0, 1.0
        for k in range(t, len(rewards)):
            total += discount * rewards[k]
            discount *= gamma
            if done[k]:
                total += discount * bootstraps[k]
                break
        else:
            total += discount * last_value
        returns.append(total)
    return returns


@with_n_step_returns
@pytest.mark.parametrize("seed", range(10))
def test_returns_are_those_of_a_slow_reference(atari, seed):
    rng, shape = np.random.default_rng(seed), (12, 4)
    rewards, values, last_values = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=4)
    terminated, truncated = rng.random((2, *shape)) < 0.15
    done, bootstraps = terminated | truncated, np.where(truncated & ~terminated, values, 0)
    tensors = map(torch.from_numpy, (rewards, bootstraps, done, last_values))
    expected = [
        slow_returns(rewards[:, i], bootstraps[:, i], done[:, i], last_values[i], 0.9) for i in range(4)
    ]
    np.testing.assert_allclose(atari.n_step_returns(*tensors, 0.9), np.transpose(expected), rtol=1e-12)


@with_n_step_returns
def test_returns_of_a_known_case(atari):
    rewards = torch.tensor([0.1, 0.2, -0.01, 0.5, 4, -1])[:, None]
    done = torch.tensor([False, False, False, True, False, False])[:, None]
    returns = atari.n_step_returns(rewards, torch.zeros_like(rewards), done, torch.tensor([0.5]), 0.99)
    np.testing.assert_allclose(returns[:, 0], [0.7733, 0.6802, 0.4850, 0.5, 3.5, -0.5050], atol=5e-5)


@with_policy
def test_actions_are_samples_of_the_softmax(atari):
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, -1.0, 0.0]])
    rng, count = torch.Generator().manual_seed(0), 20_000
    samples = torch.stack([atari.sample_actions(logits, rng) for _ in range(count)])
    for column, probs in zip(samples.T, logits.softmax(-1), strict=True):
        frequencies = torch.bincount(column, minlength=3) / count
        assert ((frequencies - probs).abs() < 4 * (probs * (1 - probs) / count).sqrt()).all()


@pytest.mark.parametrize(("game", "name"), [("breakout", "Breakout"), ("pong", "Pong")])
def test_frames_are_those_of_gymnasium(atari, game, name):
    """For the same actions: observations, rewards and ends, over several games of Breakout."""
    ours = atari.AtariGames(1, False, game=game, **START)
    env = AtariPreprocessing(gym.make(f"{name}NoFrameskip-v4"), noop_max=0)
    theirs = FrameStackObservation(env, 4, padding_type="zero")
    rng, (obs, _), (expected, _) = np.random.default_rng(0), ours.reset(seed=0), theirs.reset(seed=0)
    np.testing.assert_array_equal(obs[0], expected)
    ends = 0
    for _ in range(500):
        action = rng.integers(ours.single_action_space.n, size=1)
        obs, reward, terminated, truncated, info = ours.step(action)
        expected, *facts, _ = theirs.step(action[0])
        assert [reward[0], terminated[0], truncated[0]] == facts
        np.testing.assert_array_equal(info["final_obs"][0] if terminated[0] else obs[0], expected)
        if terminated[0]:
            np.testing.assert_array_equal(obs[0], theirs.reset()[0])
            ends += 1
    assert ends > 1 or name == "Pong"


def test_a_life_begins_with_fire(atari):
    """As if the agent pressed it in the step after a lost life, and only then; over games and a reset."""
    ours, theirs = (atari.AtariGames(2, True, game="breakout", life_loss_info=True) for _ in range(2))
    theirs.fires = False
    rng, lost, lives = np.random.default_rng(0), np.zeros(2, bool), 0
    for step in range(250):
        if step in (0, 150):
            obs, expected = (envs.reset(seed=step)[0] for envs in (ours, theirs))
            np.testing.assert_array_equal(obs, expected)
            lost[:] = False
        actions = rng.choice([0, 2, 3], size=2)  # so no ball would fly again
        obs, *facts, info = ours.step(actions)
        expected, *their_facts, _ = theirs.step(np.where(lost, 1, actions))
        np.testing.assert_array_equal(obs, expected)
        np.testing.assert_array_equal(facts, their_facts)
        np.testing.assert_array_equal(ours.picture, theirs.picture)
        lost = facts[1] & (info["lives"] < 5)  # and not the game
        lives += lost.sum()
    assert lives > 10


@pytest.mark.parametrize(("game", "fires"), [("ms_pacman", False), ("pong", True), ("seaquest", True)])
def test_fire_is_where_it_is_looked_for(atari, game, fires):
    for full in (False, True):
        envs = atari.AtariGames(1, False, game=game, full_action_space=full)
        assert envs.fires == (fires or full)
        assert envs.ale.get_action_set()[1].name == ("FIRE" if envs.fires else "UP")


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Pong-v5"])
def test_a_reset_leaves_nothing_of_what_was_before(atari, env_id):
    """On which resuming rests: a seed alone decides the games, sticky actions included."""

    def play(envs, seed: int) -> np.ndarray:
        rng, frames = np.random.default_rng(0), [envs.reset(seed=seed)[0]]
        frames += [envs.step(rng.integers(6, size=2))[0] for _ in range(60)]
        return np.stack(frames)

    envs, others = (atari.make_envs(atari.Args(env_id=env_id), 2) for _ in range(2))
    first = play(envs, 2**32 - 1)
    play(envs, 5)
    np.testing.assert_array_equal(first, play(envs, 2**32 - 1))
    np.testing.assert_array_equal(first, play(others, 2**32 - 1))
    assert (first != play(envs, 6)).any()


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_saved_games_go_on_as_they_would_have(atari, env_id, monkeypatch):
    """Saved in the middle of games, and when one has just begun from a new seed; some have sticky actions."""
    monkeypatch.setattr(atari.AtariGames, "seed_interval", 60)
    envs, others = (atari.make_envs(atari.Args(env_id=env_id), 3, life_loss=True) for _ in range(2))
    others.load_state_dict(envs.state_dict())  # before the first game
    rng, steps, saved = np.random.default_rng(0), 0, 0
    envs.reset(seed=5)
    others.reset(seed=5)
    while saved < 4:
        actions = rng.integers(4, size=3)
        obs, *facts, info = envs.step(actions)
        expected, *their_facts, their_info = others.step(actions)
        np.testing.assert_array_equal(obs, expected)
        np.testing.assert_array_equal(facts, their_facts)
        assert info["games"] == their_info["games"]
        steps += 1
        if steps > 120 * (saved + 1) and saved % 2 == (len(envs.actions) in envs.first):
            others = atari.make_envs(atari.Args(env_id=env_id), 3, life_loss=True)
            others.load_state_dict(envs.state_dict())
            np.testing.assert_array_equal(others.obs, envs.obs)
            assert_same({"games": others.state_dict()}, {"games": envs.state_dict()})
            saved += 1
    assert len(set(envs.first)) > 1
    assert len(envs.actions) < steps
    with pytest.raises(ValueError, match="3 games, not 2"):
        atari.make_envs(atari.Args(env_id=env_id), 2).load_state_dict(envs.state_dict())


def test_a_checkpoint_leaves_the_games_alone(atari, train, monkeypatch):
    """They end by themselves only, after which one has a seed of its own if the last seed is old enough."""
    monkeypatch.setattr(atari.AtariGames, "seed_interval", 40)  # games have 25 steps at most
    histories, seeds, reset = games(atari, monkeypatch), [], atari.AtariVectorEnv.reset

    def record(envs, **given):
        seeds.append(given["seed"])
        return reset(envs, **given)

    monkeypatch.setattr(atari.AtariVectorEnv, "reset", record)
    train(eval_interval=0, total_timesteps=480, checkpoint_interval=60)
    assert len(histories[0]) == 1 + 160
    ends = np.array([entry[3] | entry[4] for entry in histories[0][1:]])
    expected, since = 3, np.zeros(3, int)
    for over in ends:
        since += 1
        expected += (over & (since >= 40)).sum()
        since[over & (since >= 40)] = 0
    assert sum(map(len, seeds)) == expected
    assert 6 < expected < 3 + ends.sum()
    assert len(set(np.concatenate(seeds))) == expected


@with_n_step_returns
def test_every_transition_is_learned_from_once(atari, train, monkeypatch):
    """Observations, actions, signs of rewards, ends by a lost life too, values of what was cut off."""
    histories, passes, calls, losses = games(atari, monkeypatch), [], [], []
    name = f"{atari.SCRIPT.removesuffix('_atari')}_loss"

    def record(function, into):
        def wrapper(*args):
            result = function(*args)
            into.append((tuple(x.clone() if torch.is_tensor(x) else x for x in args), result))
            return result

        return wrapper

    forward = atari.AtariAgent.forward

    def outputs(agent, obs):
        logits, values = forward(agent, obs)
        passes.append((obs.clone(), [logits.detach(), values.detach()]))
        return logits, values

    monkeypatch.setattr(atari.AtariAgent, "forward", outputs)
    monkeypatch.setattr(atari, "n_step_returns", record(atari.n_step_returns, calls))
    monkeypatch.setattr(atari, name, record(getattr(atari, name), losses))
    settings = {"env_id": "PlainRL/SpaceInvaders-v0", "eval_interval": 0, "gamma": 0.9}
    train(**settings, total_timesteps=1440, checkpoint_interval=10_000)
    history = histories[0]  # of the training games; the others are for evaluation
    actions, obs, rewards, terminated, truncated, infos = (list(x) for x in zip(*history[1:], strict=True))
    observations = [history[0][1], *obs]
    assert len(actions) == 1440 / 3
    assert np.max(rewards) > 1
    assert np.any(terminated)
    assert np.any(truncated)

    def value(output) -> torch.Tensor:
        logits, critic = output
        return (logits.softmax(-1) * critic).sum(-1) if critic.shape[-1] > 1 else critic[:, 0]

    queue = iter(passes)
    for update, ((arguments, returns), (loss_arguments, _)) in enumerate(zip(calls, losses, strict=True)):
        bootstraps = np.zeros((5, 3), np.float32)
        for t in range(5):
            step = 5 * update + t
            seen, (logits, critic) = next(queue)
            np.testing.assert_array_equal(seen, observations[step])
            close = {"atol": 1e-6, "rtol": 1e-5}  # of heads over batches of 3 and of 15
            torch.testing.assert_close(loss_arguments[0][3 * t : 3 * t + 3], logits, **close)
            torch.testing.assert_close(
                loss_arguments[1][3 * t : 3 * t + 3].reshape(critic.shape), critic, **close
            )
            assert not (terminated[step] & truncated[step]).any()
            if (cut_off := truncated[step]).any():
                seen, output = next(queue)
                np.testing.assert_array_equal(seen, infos[step]["final_obs"][cut_off])
                bootstraps[t, cut_off] = value(output)
        seen, output = next(queue)
        np.testing.assert_array_equal(seen, observations[5 * update + 5])
        seen, _ = next(queue)  # of the update
        np.testing.assert_array_equal(seen, np.concatenate(observations[5 * update : 5 * update + 5]))
        rows = slice(5 * update, 5 * update + 5)
        np.testing.assert_array_equal(arguments[0], np.sign(rewards[rows]))
        np.testing.assert_allclose(arguments[1], bootstraps, rtol=1e-6)
        np.testing.assert_array_equal(arguments[2], np.array(terminated[rows]) | truncated[rows])
        np.testing.assert_allclose(arguments[3], value(output), rtol=1e-6)
        assert arguments[4] == 0.9
        np.testing.assert_array_equal(loss_arguments[2], np.concatenate(actions[rows]))
        assert torch.equal(loss_arguments[3], returns.flatten())
    assert next(queue, None) is None


def test_reported_scores_are_those_of_the_games(atari, train, monkeypatch):
    """The console, given the same actions, counts the same score for each game with all its lives."""
    long = {"game": "breakout", "frameskip": 4, "max_num_frames_per_episode": 10_000, **START}
    if "PlainRL/LongBreakout-v0" not in gym.registry:
        gym.register("PlainRL/LongBreakout-v0", "ale_py.env:AtariEnv", kwargs=long)
    histories = games(atari, monkeypatch)
    settings = {"env_id": "PlainRL/LongBreakout-v0", "eval_interval": 0, "num_envs": 2, "num_steps": 25}
    checkpoint = train(**settings, total_timesteps=1500, checkpoint_interval=10_000)
    console = ale_py.ALEInterface()
    console.setFloat("repeat_action_probability", 0.0)
    console.loadROM(ale_py.roms.get_rom_path("breakout"))
    scores = []
    for i in range(2):
        console.reset_game()
        score, length, lives = 0, 0, []
        for step, (actions, *_) in enumerate(histories[0][1:]):
            score += sum(console.act(console.getMinimalActionSet()[actions[i]]) for _ in range(4))
            lives.append(console.lives())
            length += 1
            if console.game_over():
                scores.append((step, i, score, length))
                assert len(set(lives)) > 3
                console.reset_game()
                score, length, lives = 0, 0, []
    assert len(scores) >= 4
    assert any(score for _, _, score, _ in scores)
    assert checkpoint["recent"] == [(score, length) for _, _, score, length in sorted(scores)]


class Lamp(gym.vector.VectorEnv):
    """Reward 1 for the action that names the quarter of the picture that is lit, 10 times in each game."""

    single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gym.spaces.Discrete(4)

    def __init__(self, num_envs: int):
        self.num_envs, self.envs = num_envs, [self]

    def state_dict(self) -> dict:
        return {}

    def reset(self, *, seed: int):
        self.rng, self.time, self.returns = np.random.default_rng(seed), 0, np.zeros(self.num_envs)
        return self.light(), {}

    def light(self) -> np.ndarray:
        self.lit, obs = (
            self.rng.integers(4, size=self.num_envs),
            np.zeros((self.num_envs, 4, 84, 84), np.uint8),
        )
        for picture, lit in zip(obs, self.lit, strict=True):
            picture[:, 42 * (lit // 2) :, 42 * (lit % 2) :][:, :42, :42] = 255
        return obs

    def step(self, actions):
        rewards, self.time = (actions == self.lit).astype(np.int32), self.time + 1
        self.returns += rewards
        ends, games = np.full(self.num_envs, self.time % 10 == 0), []
        if ends[0]:
            games, self.returns[:] = [(x, 10) for x in self.returns.tolist()], 0
        return self.light(), rewards, ends, np.zeros_like(ends), {"games": games}


def test_learns_what_chance_does_not_reach(atari, train, monkeypatch):
    """Chance is right in 2.5 of 10; after 300 updates the policy that acts is in 9."""
    monkeypatch.setattr(atari, "make_envs", lambda args, num_envs, *_, **__: Lamp(num_envs))
    settings = {"num_envs": 8, "total_timesteps": 300 * 40, "checkpoint_interval": 100_000}
    if atari.SCRIPT in OWN_SETTINGS:
        settings |= {"num_minibatches": 1, "update_epochs": 2, "total_timesteps": 150 * 40}
    if atari.SCRIPT == "pqn_atari":
        settings |= {"end_e": 0.01, "gamma": 0.5}
    checkpoint = train(**settings, eval_interval=0, learning_rate=3e-4)
    assert np.mean(checkpoint["recent"], axis=0)[0] > 9


def test_same_seed_gives_the_same_bits_whatever_is_evaluated(train):
    first = train("first")
    assert_same(first, train("second", eval_interval=0) | {"args": first["args"]})
    other = train("third", seed=2, eval_interval=0)
    assert not torch.isclose(first["agent"]["hidden.weight"], other["agent"]["hidden.weight"]).all()


def test_killed_twice_and_resumed_equals_uninterrupted(atari, train, tmp_path):
    """In an update, and between the two files of a checkpoint."""
    short = {"env_id": "BreakoutNoFrameskip-v4", "total_timesteps": 240, "eval_interval": 120}
    reference, start = train("whole", **short), [*flags(short_run(atari) | short), "--run-dir", "killed"]
    for function, call in ((returns_function(atari), 10), ("replace", 3)):
        killed = run_python("-c", KILLER, atari.__file__, function, call, *start, cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        start = ["--resume", "killed"]
    resumed = run_script(atari.SCRIPT, *start, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert_same(torch.load(tmp_path / "killed/checkpoint.pt", weights_only=True), reference)
    ours, theirs = (scalars(tmp_path / name) for name in ("killed", "whole"))
    for logged in (ours, theirs):
        logged["charts/SPS"] = [step for step, _ in logged["charts/SPS"]]
    assert ours == theirs
    assert (tmp_path / "killed/evaluations.csv").read_text() == Path("whole/evaluations.csv").read_text()


def test_run_folder(atari, train):
    train()
    names = sorted(re.sub(r"^(events\.out\.tfevents).*", r"\1", path.name) for path in Path("run").iterdir())
    assert names == ["checkpoint.pt", "config.json", "evaluations.csv", "events.out.tfevents", "model.pt"]
    logged = scalars(Path("run"))
    policy_tags = set() if atari.SCRIPT == "pqn_atari" else POLICY_TAGS
    assert logged.keys() == TAGS | policy_tags | OWN_TAGS.get(atari.SCRIPT, set())
    logs = [120, 180, 240, 360, 480]  # at evaluations and checkpoints
    assert [step for step, _ in logged["losses/grad_norm"]] == logs
    assert [step for step, _ in logged["eval/return_mean"]] == [180, 360, 480]
    least, mean, greatest = (logged[f"charts/episodic_return{x}"][-1][1] for x in ("_min", "", "_max"))
    assert least <= mean <= greatest
    rates = [rate for _, rate in logged["charts/learning_rate"]]
    updates = [range(start, end, 15) for start, end in itertools.pairwise([0, *logs])]
    first = atari.Args.learning_rate
    assert rates == pytest.approx([first * (1 - np.mean(steps) / 480) for steps in updates])


@pytest.mark.parametrize("greedy", [False, True])
def test_saved_policy_scores_what_training_reported(atari, train, main, capfd, greedy):
    train(greedy=greedy, capture_video=True)
    capfd.readouterr()
    rows = [line.split(",") for line in Path("run/evaluations.csv").read_text().splitlines()[-2:]]
    seed = evaluation_seed(1, 480)
    options = ["--eval-episodes", 2, "--seed", seed, *(["--greedy"] if greedy else []), "--capture-video"]
    main("--evaluate", "run", *options)
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == [
        f"episode {i}: return {float(row[2]):.2f}, length {row[3]}" for i, row in enumerate(rows)
    ]
    videos = [Path("videos/run/step_480.mp4"), Path("videos/run", "greedy.mp4" if greedy else "sampled.mp4")]
    for video in videos:
        frames = list(iio.imiter(video, plugin="FFMPEG"))
        assert len(frames) == int(rows[0][3])
        assert frames[0].shape == (420, 320, 3)
        assert np.ptp(frames[0].astype(int), axis=-1).max() > 100  # colours


def test_video_shows_the_game_that_is_played(atari):
    """The colours of the first game, in grey and shrunk, are all along the frame that the policy sees."""
    args, rng = atari.Args(env_id="BreakoutNoFrameskip-v4"), np.random.default_rng(0)
    envs = atari.make_envs(args, 2, render=True)
    envs.reset(seed=7)
    differences = []
    for _ in range(150):
        obs = envs.step(rng.integers(4, size=2))[0]
        picture = torch.from_numpy(envs.render() @ np.array([0.299, 0.587, 0.114]))
        small = F.interpolate(picture[None, None], (84, 84), mode="area").numpy()
        differences.append(np.abs(small[0] - obs[:, -1]).mean((1, 2)))
    first, second = np.max(differences, axis=0)
    assert first < 0.2  # grey levels of 255, which shrinking differently makes
    assert second > 1


def test_bf16_is_close_to_float32(atari):
    torch.manual_seed(0)
    space = SimpleNamespace(single_action_space=gym.spaces.Discrete(6))
    agent, obs = atari.make_agent(atari.Args(), space), torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    exact = agent.features(obs)
    agent.bf16 = True
    assert 0 < (agent.features(obs) - exact).norm() < 0.01 * exact.norm()  # 8 bits: 0.004
    assert all(x.dtype == torch.float32 for x in agent(obs))  # the heads' outputs, or those of one head


def test_network_is_its_convolutions_of_pictures_from_0_to_1(atari):
    torch.manual_seed(0)
    space = SimpleNamespace(single_action_space=gym.spaces.Discrete(6))
    agent = atari.make_agent(atari.Args(), space).double()
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    x = obs / 255.0
    for layer, norm in zip(agent.layers, agent.norms, strict=True):
        x = x if layer is not agent.hidden else x.permute(0, 2, 3, 1).flatten(1)
        x = norm(layer(x.double())).relu()
    expected, parameters = x, [y for layer in agent.layers for y in layer.parameters()]
    features = agent.features(obs)
    torch.testing.assert_close(features.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (features, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(agent.features(obs).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_rollout_casts_the_weights_once(atari, train):
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if kwargs and kwargs.get("dtype") == torch.bfloat16 and args[0].shape == (512, 7 * 7 * 64):
                casts.append(function)
            return function(*args, **(kwargs or {}))

    with Casts():
        train(bf16=True, eval_interval=0, total_timesteps=2 * 15)
    assert len(casts) == 2 * (1 + OWN_SETTINGS.get(atari.SCRIPT, {}).get("num_minibatches", 1))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are none here")
def test_a_gigabyte_of_the_heap_may_have_huge_pages(atari, tmp_path):
    code = "import runpy, sys\ntry: runpy.run_path(sys.argv[1], run_name='__main__')\n"
    code += "except SystemExit: print(open('/proc/self/smaps').read())"
    smaps = run_python("-c", code, atari.__file__, "--help", cwd=tmp_path).stdout
    heaps = re.findall(r"\[heap\]\nSize: +(\d+) kB(?:\n\w+: .*)*?\nVmFlags:.* hg ", smaps)
    assert sum(map(int, heaps)) >= 2**20


@pytest.mark.parametrize("env_id", ["ALE/SpaceInvaders-v5", "PongNoFrameskip-v4"])
def test_games_of_gymnasium_and_bf16(train, env_id):
    checkpoint = train(env_id=env_id, eval_interval=0, bf16=True, total_timesteps=30)
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_non_finite_gradient_stops_the_run(atari, train, monkeypatch):
    calls = iter(range(1000))
    name = returns_function(atari)
    returns = getattr(atari, name)
    monkeypatch.setattr(atari, name, lambda *x: returns(*x) * (math.nan if next(calls) == 9 else 1))
    with pytest.raises(SystemExit, match=r"error: losses/\w+ not finite at step 150; .* run/checkpoint.pt"):
        train()
    assert torch.load("run/checkpoint.pt", weights_only=True)["global_step"] == 120


@pytest.fixture
def refusal(atari, main, tmp_path, monkeypatch, capfd):
    """Runs the script beside a finished run; returns its one line of error."""
    monkeypatch.chdir(tmp_path)
    settings = short_run(atari) | {"total_timesteps": 15, "eval_interval": 0}
    atari.train(atari.Args(**settings, run_dir=Path("run")))
    capfd.readouterr()

    def run(*arguments) -> str:
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as stopped:
            main(*arguments)
        stderr = capfd.readouterr().err
        assert contents(tmp_path) == before
        assert stopped.value.code == 2, stderr
        assert re.fullmatch(r"error: .+\n", stderr), stderr
        return stderr

    return run


def test_bad_input(atari, refusal):
    for arguments, hint in {
        ("--env-id", "PongNoFrameskip-v9"): "v4",
        ("--env-id", "PongNoFrameskop-v4"): "PongNoFrameskip",
        ("--env-id", "CartPole-v1"): "Atari",
        ("--env-id", "Pong-v4"): "NoFrameskip-v4",
        ("--gamma", "1.1"): "--gamma",
        ("--learning-rate", "nan"): "--learning-rate",
        ("--num-envs", "0"): "--num-envs",
        ("--eval-interval", "-1"): "--eval-interval",
        ("--run-dir", "run"): "--resume run",
        ("--resume", "nowhere"): "nowhere",
        ("--resume", "run", "--env-id", "PongNoFrameskip-v4"): "PlainRL/Breakout-v0",
        ("--evaluate", "run", "--env-id", "PongNoFrameskip-v4"): "PlainRL/Breakout-v0",
    }.items():
        assert hint in refusal(*arguments)
    for name, file in (("--resume", "checkpoint.pt"), ("--evaluate", "model.pt")):
        state = torch.load(Path("run", file), weights_only=True)
        other = SCRIPTS[SCRIPTS.index(atari.SCRIPT) - 1]
        torch.save(state | {"script": other}, Path("run", file))
        assert other in refusal(name, "run")
        torch.save(state | {"agent": {}}, Path("run", file))
        assert "does not fit" in refusal(name, "run")
        shutil.copy(atari.__file__, Path("run", file))
        assert "damaged" in refusal(name, "run")


# What only A2C has.


class FlatPixels(torch.nn.Flatten):
    """In the order of our hidden layer's weights: rows, columns, channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1))


def test_a2c_loss_and_gradient_are_those_of_stable_baselines3(a2c):
    """The same weights, frames, actions and returns in both."""
    num_steps, num_envs, num_actions = 5, 3, 6

    class Still(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        action_space = gym.spaces.Discrete(num_actions)

    torch.manual_seed(0)
    args = a2c.Args(ent_coef=0.03, vf_coef=0.4)
    agent = a2c.AtariAgent(num_actions, 1, False)
    torch.nn.init.normal_(agent.policy.weight, std=0.3)
    settings = {"n_steps": num_steps, "ent_coef": args.ent_coef, "vf_coef": args.vf_coef, "gae_lambda": 1.0}
    peer = A2C("CnnPolicy", DummyVecEnv([Still] * num_envs), **settings, max_grad_norm=1e9, device="cpu")
    peer.policy.features_extractor.cnn[-1] = FlatPixels()
    layers = [*peer.policy.features_extractor.modules(), peer.policy.action_net, peer.policy.value_net]
    layers = [layer for layer in layers if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    for ours, theirs in zip((*agent.layers, agent.policy, agent.critic), layers, strict=True):
        for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
            y.data = x.detach().clone()
    obs = torch.randint(256, (num_steps, num_envs, 4, 84, 84), dtype=torch.uint8)
    actions = torch.randint(num_actions, (num_steps, num_envs))
    rewards, done = torch.randn(num_steps, num_envs), torch.rand(num_steps, num_envs) < 0.2
    last_values, values = torch.randn(num_envs), agent(obs.flatten(0, 1))[1].view(num_steps, num_envs)

    buffer, starts = peer.rollout_buffer, np.zeros(num_envs)
    for t in range(num_steps):
        facts = (obs[t].numpy(), actions[t, :, None].numpy(), rewards[t].numpy(), starts)
        buffer.add(*facts, values[t].detach(), torch.zeros(num_envs))
        starts = done[t].numpy()
    buffer.compute_returns_and_advantage(last_values, starts)
    logged = {}
    peer.set_logger(SimpleNamespace(record=lambda name, value, **_: logged.update({name: value})))
    peer.lr_schedule = lambda _: 0.0
    peer.train()

    returns = a2c.n_step_returns(rewards, torch.zeros_like(rewards), done, last_values, args.gamma)
    logits, values = agent(obs.flatten(0, 1))
    loss, policy_loss, value_loss, entropy = a2c.a2c_loss(
        logits, values.squeeze(-1), actions.flatten(), returns.flatten(), args
    )
    loss.backward()
    assert policy_loss.item() == pytest.approx(logged["train/policy_loss"], abs=1e-5)
    assert value_loss.item() == pytest.approx(logged["train/value_loss"], abs=1e-5)
    assert -entropy.item() == pytest.approx(logged["train/entropy_loss"], abs=1e-5)
    for ours, theirs in zip((*agent.layers, agent.policy, agent.critic), layers, strict=True):
        for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-5)


# What only the Q critic has.


def random_batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Logits and Q values (16, 5), actions and returns (16,)."""
    rng = torch.Generator().manual_seed(seed)
    logits, q_values = torch.randn(2, 16, 5, generator=rng, dtype=torch.float64).requires_grad_().unbind()
    return logits, q_values, torch.randint(5, (16,), generator=rng), torch.randn(16, generator=rng).double()


@pytest.mark.parametrize("baseline", ["none", "value"])
@pytest.mark.parametrize("seed", range(5))
def test_actor_gradient_is_the_closed_form(qcritic, baseline, seed):
    """In each logit, pi(a) (Q(a) - sum pi Q) / batch; and nothing of it reaches the Q values."""
    logits, q_values, actions, returns = random_batch(seed)
    _, policy_loss, *_ = qcritic.qcritic_loss(
        logits, q_values, actions, returns, qcritic.Args(baseline=baseline)
    )
    in_logits, in_q_values = torch.autograd.grad(-policy_loss, (logits, q_values), allow_unused=True)
    probs = logits.softmax(-1)
    expected = probs * (q_values - (probs * q_values).sum(-1, keepdim=True)) / 16
    torch.testing.assert_close(in_logits, expected, atol=1e-14, rtol=1e-10)
    assert in_q_values is None


def test_critic_loss_touches_the_taken_action_alone(qcritic):
    logits, q_values, actions, returns = random_batch(0)
    _, _, value_loss, _ = qcritic.qcritic_loss(logits, q_values, actions, returns, qcritic.Args())
    in_logits, in_q_values = torch.autograd.grad(value_loss, (logits, q_values), allow_unused=True)
    taken = F.one_hot(actions, 5).double()
    torch.testing.assert_close(in_q_values, 2 / 16 * taken * (q_values - returns.unsqueeze(-1)))
    assert in_logits is None


@pytest.mark.parametrize("baseline", ["none", "value"])
def test_policy_loss_is_the_expected_weight(qcritic, baseline):
    """Under the policy the advantages have a mean of 0; the gradient does not tell a wrong baseline."""
    logits, q_values, actions, returns = random_batch(0)
    _, policy_loss, *_ = qcritic.qcritic_loss(
        logits, q_values, actions, returns, qcritic.Args(baseline=baseline)
    )
    expected = -(logits.softmax(-1) * q_values).sum(-1).mean().item() if baseline == "none" else 0
    assert policy_loss.item() == pytest.approx(expected)


def test_total_is_the_weighted_sum(qcritic):
    args = qcritic.Args(pg_coef=0.3, vf_coef=0.7, ent_coef=0.2)
    total, policy_loss, value_loss, entropy = qcritic.qcritic_loss(*random_batch(0), args)
    assert total.item() == pytest.approx((0.3 * policy_loss + 0.7 * value_loss - 0.2 * entropy).item())
    probs = random_batch(0)[0].softmax(-1)
    assert entropy.item() == pytest.approx(-(probs * probs.log()).sum(-1).mean().item())


def test_baselines_give_a_whole_network_the_same_gradient(qcritic):
    torch.manual_seed(0)
    agent = qcritic.AtariAgent(5, 5, False)
    obs = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    _, _, actions, returns = (x[:8] for x in random_batch(0))
    returns = returns.float()

    def gradients(baseline: str) -> list[torch.Tensor]:
        agent.zero_grad()
        logits, q_values = agent(obs)
        args = qcritic.Args(baseline=baseline)
        loss, policy_loss, *_ = qcritic.qcritic_loss(logits, q_values, actions, returns, args)
        heads = (agent.policy.weight, agent.critic.weight)
        in_policy, in_critic = torch.autograd.grad(policy_loss, heads, retain_graph=True, allow_unused=True)
        assert in_policy.abs().max() > 0
        assert in_critic is None
        loss.backward()
        return [p.grad.clone() for p in agent.parameters()]

    for x, y in zip(gradients("none"), gradients("value"), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)


@with_policy
def test_first_action_values_hardly_differ(atari):
    """A policy that follows differences by chance has decided before anything is learned."""
    torch.manual_seed(0)
    agent = atari.make_agent(atari.Args(), SimpleNamespace(single_action_space=gym.spaces.Discrete(5)))
    probs = agent(torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8))[0].softmax(-1)
    torch.testing.assert_close(probs, torch.full_like(probs, 0.2), atol=0.01, rtol=0)
    num_values, gain = (5, 0.01) if atari.SCRIPT == "qcritic_atari" else (1, 1.0)
    product = agent.critic.weight @ agent.critic.weight.T
    torch.testing.assert_close(product, gain**2 * torch.eye(num_values), atol=1e-6, rtol=0)


def test_expected_values(qcritic):
    logits, q_values = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[4.0, 8.0]])
    assert qcritic.expected_values(logits, q_values).tolist() == pytest.approx([7.0])
