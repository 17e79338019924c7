"""qlearning_tabular.py against exact references, its updates and its pictures, and what a run must be.

The references are computed here, from the environments' rules: by value iteration and by dynamic programming.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import types
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
from conftest import (
    KILLER,
    contents,
    evaluation_seed,
    flags,
    load_script,
    run_python,
    run_script,
    scalars,
    script_path,
)
from gymnasium.spaces import Discrete, MultiDiscrete, Tuple
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SHORT_RUN = {
    "total_timesteps": 2000,
    "eval_interval": 750,
    "eval_episodes": 4,
    "checkpoint_interval": 500,
}


@pytest.fixture(scope="session")
def ql() -> ModuleType:
    return load_script("qlearning_tabular")


@pytest.fixture
def train(ql, tmp_path, monkeypatch):
    """Trains in this process, in a new run folder of tmp_path, without a picture; returns the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ql, "draw_table", lambda *_: None)

    def run(run_dir: str = "run", **settings) -> dict:
        ql.train(ql.Args(**(SHORT_RUN | settings | {"run_dir": Path(run_dir)})))
        return read(Path(run_dir, "checkpoint.pt"))

    return run


def read(path: Path) -> dict:
    """A checkpoint, with q and visits (states, actions) as arrays."""
    state = torch.load(path, weights_only=True)
    return state | {name: tensor.numpy() for name, tensor in state.pop("agent").items()}


def evaluate(ql: ModuleType, q: np.ndarray, episodes: int, seed: int = 1, **settings) -> tuple:
    """Returns and lengths of what a table q (states, actions) plays."""
    args = ql.Args(**settings)
    envs = ql.make_envs(args, min(episodes, 10))
    table = ql.make_agent(args, envs)
    table.q = q.tolist()
    return ql.evaluate(ql.make_policy(args, table, envs.single_action_space), envs, episodes, seed)


def assert_same_state(a: dict, b: dict) -> None:
    """Every array and number of two checkpoints is equal, bit for bit; the arguments name the folder."""
    assert a.keys() == b.keys()
    for name in a.keys() - {"args"}:
        assert np.array_equal(a[name], b[name]), name


def transitions(env: gym.Env) -> tuple[np.ndarray, np.ndarray]:
    """Probability of going on from s by a to s' (s, a, s'), 0 where that ends; expected reward (s, a)."""
    model = env.unwrapped.P
    probabilities, rewards = (
        np.zeros((len(model), len(model[0]), len(model))),
        np.zeros((len(model), len(model[0]))),
    )
    for state, actions in model.items():
        for action, outcomes in actions.items():
            for probability, next_state, reward, terminated in outcomes:
                rewards[state, action] += probability * reward
                probabilities[state, action, next_state] += probability * (not terminated)
    return probabilities, rewards


def value_iteration(env: gym.Env, gamma: float) -> np.ndarray:
    """The optimal q (s, a), without a time limit."""
    probabilities, rewards = transitions(env)
    q = np.zeros_like(rewards)
    for _ in range(5000):
        q = rewards + gamma * probabilities @ q.max(1)
    return q


def exact_return(q: np.ndarray, env: gym.Env, steps: int) -> float:
    """Expected return of the greedy policy, ties at random, under a time limit of so many steps."""
    probabilities, rewards = transitions(env)
    greedy = (q >= q.max(1, keepdims=True)).astype(float)
    greedy /= greedy.sum(1, keepdims=True)
    values = np.zeros(len(q))
    for _ in range(steps):
        values = (greedy * (rewards + probabilities @ values)).sum(1)
    return env.unwrapped.initial_state_distrib @ values


CARDS = [*((card, 1 / 13) for card in range(1, 10)), (10, 4 / 13)]


def add_card(total: int, ace: int, card: int) -> tuple[int, int]:
    """A hand, its best total and whether an ace counts 11 in it, after one more card."""
    total += card
    if card == 1 and total <= 11:
        total, ace = total + 10, 1
    return (total - 10, 0) if ace and total > 21 else (total, ace)


@functools.cache
def dealer_totals(total: int, ace: int) -> dict[int, float]:
    """Probability of each total that the dealer, who draws up to 17, ends with; 0 stands for all above 21."""
    if total >= 17:
        return {total if total <= 21 else 0: 1.0}
    totals = dict.fromkeys((0, *range(17, 22)), 0.0)
    for card, probability in CARDS:
        for final, conditional in dealer_totals(*add_card(total, ace, card)).items():
            totals[final] += probability * conditional
    return totals


def sticking_value(total: int, card: int, natural_hand: bool, sab: bool, natural: bool) -> float:
    """Expected reward of sticking against a dealer who shows a card."""
    value = 0.0
    for hidden, probability in CARDS:
        for final, conditional in dealer_totals(*add_card(*add_card(0, 0, card), hidden)).items():
            reward = np.sign(total - final)
            if natural_hand and sab and {card, hidden} != {1, 10}:
                reward = 1
            if natural_hand and natural and not sab and reward == 1:
                reward = 1.5
            value += probability * conditional * reward
    return value


def blackjack_return(q: np.ndarray | None = None, sab: bool = True, natural: bool = False) -> float:
    """Expected return of the policy that is greedy in q (32, 11, 2, 2), or of the optimal one."""

    @functools.cache
    def value(total: int, card: int, ace: int, natural_hand: bool = False) -> float:
        if total > 21:
            return -1.0
        stick = sticking_value(total, card, natural_hand, sab, natural)
        hit = sum(p * value(*(lambda t, a: (t, card, a))(*add_card(total, ace, new))) for new, p in CARDS)
        if q is None:
            return max(stick, hit)
        preference = np.sign(q[total, card, ace, 1] - q[total, card, ace, 0])
        return (stick, hit)[int(preference > 0)] if preference else (stick + hit) / 2

    expected = 0.0
    for card, p in CARDS:
        for first, p_first in CARDS:
            for second, p_second in CARDS:
                total, ace = add_card(*add_card(0, 0, first), second)
                expected += p * p_first * p_second * value(total, card, ace, {first, second} == {1, 10})
    return expected


def lake(**settings) -> gym.Env:
    return gym.make("FrozenLake-v1", **settings)


@pytest.mark.parametrize(("name", "expected"), [("4x4", 0.740), ("8x8", 0.632)])
def test_reference_for_frozen_lake(name, expected):
    """The figures that the project's documents give."""
    env = lake(map_name=name)
    assert exact_return(value_iteration(env, 0.99), env, steps=100) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("sab", "natural", "expected"),
    [(True, False, -0.0431), (False, False, -0.0466), (False, True, -0.0257)],
)
def test_reference_for_blackjack(ql, sab, natural, expected):
    """The optimum, and what a simple policy scores in the environment: to stick from 15 on."""
    assert blackjack_return(sab=sab, natural=natural) == pytest.approx(expected, abs=5e-5)
    q = np.zeros((32, 11, 2, 2))
    q[:15, ..., 1] = q[15:, ..., 0] = 1
    settings = {"env_id": "Blackjack-v1", "sab": sab, "natural": natural}
    returns, _ = evaluate(ql, q.reshape(-1, 2), 12_000, **settings)
    mean, _, stderr = ql.spread(returns)
    assert abs(mean - blackjack_return(q, sab, natural)) < 3.5 * stderr


def test_target_is_cut_by_termination_alone(ql):
    assert ql.q_target(0.5, [1.0, 3.0, -2.0], False, 0.9) == pytest.approx(0.5 + 0.9 * 3)
    assert ql.q_target(0.5, [1.0, 3.0, -2.0], True, 0.9) == 0.5


def test_step_size_falls_with_the_number_of_updates(ql):
    assert [ql.step_size(n, 0.3, 0.0) for n in (1, 2, 1000)] == [0.3] * 3
    assert [ql.step_size(n, 1.0, 1.0) for n in (1, 2, 4)] == [1, 1 / 2, 1 / 4]
    assert [ql.step_size(n, 0.6, 0.5) for n in (1, 4, 9)] == pytest.approx([0.6, 0.3, 0.2])


def test_exploration_falls_linearly_and_stays(ql):
    args = ql.Args(start_e=0.9, end_e=0.1, exploration_fraction=0.4, total_timesteps=1000)
    epsilons = [ql.exploration(step, args) for step in (0, 100, 200, 400, 999)]
    assert epsilons == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1])
    assert ql.exploration(0, dataclasses.replace(args, exploration_fraction=0.0)) == 0.1


@pytest.mark.parametrize("generator", [random.Random, np.random.default_rng])
@pytest.mark.parametrize(
    ("values", "epsilon", "expected"),
    [
        ([0.0, 2.0, 1.0], 0.0, [0, 1, 0]),
        ([2.0, 1.0, 2.0], 0.0, [1 / 2, 0, 1 / 2]),
        ([0.0, 0.0, 0.0], 0.0, [1 / 3] * 3),
        ([0.0, 2.0, 1.0], 1.0, [1 / 3] * 3),
        ([-1.0, -1.0, -5.0], 0.3, [0.45, 0.45, 0.1]),
    ],
)
def test_actions_are_epsilon_greedy_with_ties_at_random(ql, values, epsilon, expected, generator):
    """With Python's generator, of training, and with NumPy's, of evaluation."""
    rng, counts = generator(1), np.zeros(3)
    for _ in range(6000):
        counts[ql.epsilon_greedy(values, epsilon, rng)] += 1
    assert counts / 6000 == pytest.approx(expected, abs=0.03)  # 4.6 standard deviations
    assert not counts[np.array(expected) == 0].any()


def test_policy_is_greedy_or_epsilon_greedy_in_each_state(ql):
    table, space, rng = ql.Table(2, 3, 0.0), Discrete(3, start=5), np.random.default_rng(1)
    table.q = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    states = np.arange(2).repeat(3000)
    greedy = ql.make_policy(ql.Args(end_e=0.6), table, space)(states, rng)
    assert greedy.tolist() == [6] * 3000 + [7] * 3000
    sampled = ql.make_policy(ql.Args(end_e=0.6, greedy=False), table, space)(states, rng)
    for half, best in ((sampled[:3000], 6), (sampled[3000:], 7)):
        assert set(half) == {5, 6, 7}
        assert (half == best).mean() == pytest.approx(0.6, abs=0.04)


def test_table_is_stored_without_loss(ql):
    table, other = ql.Table(2, 3, 1 / 3), ql.Table(2, 3, 0.0)
    table.q[1][2], table.visits[1][2] = 0.1 + 0.2, 2**40
    other.load_state_dict(table.state_dict())
    assert (other.q, other.visits) == (table.q, table.visits)
    assert [[type(x) for x in row] for row in other.visits] == [[int] * 3] * 2
    for shape in ((3, 2), (2, 4), (1, 3)):
        with pytest.raises(ValueError, match="shape"):
            ql.Table(*shape, 0.0).load_state_dict(table.state_dict())


class Ledger(gym.Env):
    """Writes down every step: a list for each seed, of an episode each, of steps.

    Rewards and observations are random; episodes of 1 to 6 steps end by termination, truncation or both.
    """

    action_space = Discrete(3, start=5)
    ledgers = ()

    def __init__(self, space: gym.Space):
        self.observation_space, self.batches = space, []
        Ledger.ledgers += (self.batches,)

    def observe(self):
        self.obs = self.observation_space.sample()
        return self.obs

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.batches.append([])
        self.batches[-1].append([])
        self.remaining, self.end = self.np_random.integers(1, 7), self.np_random.integers(1, 4)
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        before, obs, reward = self.obs, self.observe(), np.float32(self.np_random.normal(1))
        self.remaining -= 1
        terminated, truncated = (np.bool_(self.remaining == 0 and self.end & kind) for kind in (1, 2))
        self.batches[-1][-1].append((key(before), action - 5, float(reward), key(obs), terminated, truncated))
        return obs, reward, terminated, truncated, {}


def key(obs) -> tuple[int, ...]:
    return tuple(np.ravel(obs).tolist())


SPACES = {
    "Discrete": Discrete(5, start=-2),
    "Tuple": Tuple((Discrete(3, start=1), Discrete(2))),
    "MultiDiscrete": MultiDiscrete([2, 3], start=[4, 0]),
}
NUMBERS = {
    "Discrete": [range(-2, 3)],
    "Tuple": [range(1, 4), range(2)],
    "MultiDiscrete": [range(4, 6), range(3)],
}
for space_name, ledger_space in SPACES.items():
    gym.register(f"Ledger{space_name}-v0", Ledger, kwargs={"space": ledger_space})


@pytest.mark.parametrize("alpha_decay", [0.0, 0.7])
@pytest.mark.parametrize("space", SPACES)
def test_training_equals_a_slow_reference(train, space, alpha_decay):
    """Each step of the environment is one update, by the formula, of the entry that it concerns.

    In the second half of the run epsilon is 0: all actions are greedy.
    """
    settings = {"alpha": 0.5, "alpha_decay": alpha_decay, "gamma": 0.9, "initial_value": 0.7}
    settings |= {"end_e": 0.0, "exploration_fraction": 0.5, "eval_interval": 0}
    Ledger.ledgers = ()
    checkpoint = train(env_id=f"Ledger{space}-v0", **settings)
    (batches,) = (ledger for ledger in Ledger.ledgers if ledger)
    assert [sum(map(len, batch)) for batch in batches] == [500] * 4

    states = list(itertools.product(*NUMBERS[space]))
    q = {(state, action): 0.7 for state in states for action in range(3)}
    visits, greedy, errors = dict.fromkeys(q, 0), [], []
    for state, action, reward, next_state, terminated, _ in (
        step for batch in batches for episode in batch for step in episode
    ):
        greedy.append(q[state, action] >= max(q[state, a] for a in range(3)) - 1e-9)
        visits[state, action] += 1
        target = reward
        if not terminated:
            target += 0.9 * max(q[next_state, a] for a in range(3))
        errors.append(target - q[state, action])
        alpha = 0.5 * visits[state, action] ** -alpha_decay
        q[state, action] = (1 - alpha) * q[state, action] + alpha * target
    assert checkpoint["visits"].tolist() == [[visits[state, a] for a in range(3)] for state in states]
    np.testing.assert_allclose(checkpoint["q"], [[q[state, a] for a in range(3)] for state in states], 1e-9)
    assert all(greedy[1000:])
    assert np.mean(greedy[:100]) < 0.6

    ended = [[episode for episode in batch if episode and any(episode[-1][4:])] for batch in batches]
    ends = {tuple(map(bool, episode[-1][4:])) for batch in ended for episode in batch}
    assert ends == {(False, True), (True, False), (True, True)}
    scores = [[(sum(step[2] for step in episode), len(episode)) for episode in batch] for batch in ended]
    np.testing.assert_allclose(checkpoint["recent"], [x for batch in scores for x in batch][-100:], 1e-9)
    logged = {tag: [value for _, value in points] for tag, points in scalars(Path("run")).items()}
    returns, lengths = zip(*(np.mean(batch, axis=0) for batch in scores), strict=True)
    assert logged["charts/episodic_return"] == pytest.approx(returns, 1e-5)
    assert logged["charts/episodic_length"] == pytest.approx(lengths, 1e-5)
    squares = np.square(errors).reshape(4, 500)
    assert logged["losses/td_loss"] == pytest.approx(squares.mean(1), 1e-5)


def test_learns_frozen_lake(train):
    """A table of zeros acts at random, which reaches the goal in 14 of 1,000 episodes."""
    assert exact_return(np.zeros((16, 4)), lake(), steps=100) < 0.02
    assert exact_return(train(total_timesteps=200_000, eval_interval=0)["q"], lake(), steps=100) > 0.73


def test_learns_frozen_lake_that_is_not_slippery(train):
    q = train(is_slippery=False, total_timesteps=30_000, eval_interval=0)["q"]
    assert exact_return(q, lake(is_slippery=False), steps=100) == 1


def test_learns_blackjack(train):
    """By chance -0.4; sticking at once and always -0.16."""
    settings = {"env_id": "Blackjack-v1", "gamma": 1.0, "alpha_decay": 0.8, "eval_interval": 0}
    q = train(**settings, total_timesteps=60_000)["q"].reshape(32, 11, 2, 2)
    assert blackjack_return(q) > blackjack_return() - 0.02


def test_learns_to_walk_along_the_cliff(train):
    """The shortest path is 13 steps long; the episodes of a random walk last thousands."""
    settings = {
        "alpha": 0.5,
        "alpha_decay": 0.0,
        "start_e": 0.1,
        "total_timesteps": 30_000,
        "eval_interval": 0,
    }
    q = train(env_id="CliffWalking-v1", **settings)["q"]
    assert exact_return(q, gym.make("CliffWalking-v1"), steps=100) == -13


def test_learns_to_drive_a_taxi(train):
    """By chance -770; the optimum is 7.9."""
    settings = {"alpha_decay": 0.0, "start_e": 0.1, "total_timesteps": 120_000, "eval_interval": 0}
    q = train(env_id="Taxi-v4", **settings)["q"]
    assert exact_return(q, gym.make("Taxi-v4"), steps=200) > 5


def test_optimistic_start_explores(train):
    """Never acting at random, a table of zeros walks at random until it first finds the goal."""
    settings = {"map_name": "8x8", "is_slippery": False, "start_e": 0.0, "end_e": 0.0, "alpha": 0.5}
    settings |= {"alpha_decay": 0.0, "total_timesteps": 15_000, "eval_interval": 0}
    env = lake(map_name="8x8", is_slippery=False)
    optimistic, neutral = (train(f"{x}", initial_value=x, **settings)["q"] for x in (1.0, 0.0))
    assert exact_return(optimistic, env, steps=100) == 1
    assert exact_return(neutral, env, steps=100) < 1


def test_environments_without_a_time_limit_get_one(ql):
    for settings, limit in (({"env_id": "CliffWalking-v1"}, 1000), ({}, 100), ({"max_episode_steps": 7}, 7)):
        env = ql.make_envs(ql.Args(is_slippery=False, **settings), 1).envs[0]
        env.reset()
        ends = [env.step(3 if "Lake" in env.spec.id else 0)[2:4] for _ in range(limit)]
        assert ends == [(False, False)] * (limit - 1) + [(False, True)]


def test_environment_settings_reach_the_environment(ql):
    def make_env(**settings) -> gym.Env:
        return ql.make_envs(ql.Args(**settings), 1).envs[0].unwrapped

    env = make_env(map_name="8x8", is_slippery=False)
    assert env.desc.shape == (8, 8)
    assert all(len(outcomes) == 1 for actions in env.P.values() for outcomes in actions.values())
    assert len(make_env().P[0][0]) == 3
    env = make_env(env_id="Blackjack-v1", sab=False, natural=True)
    assert (env.sab, env.natural) == (False, True)


def test_evaluation_plays_whole_episodes(ql):
    """A walk straight into the first hole, and straight to the goal."""
    into_the_hole, to_the_goal = np.zeros((2, 16, 4))
    into_the_hole[[0, 1], [2, 1]] = 1
    to_the_goal[[0, 4, 8, 9, 13, 14], [1, 1, 2, 1, 2, 2]] = 1
    returns, lengths = evaluate(ql, into_the_hole, 3, is_slippery=False)
    assert (returns.tolist(), lengths.tolist()) == ([0, 0, 0], [2, 2, 2])
    returns, lengths = evaluate(ql, to_the_goal, 3, is_slippery=False)
    assert (returns.tolist(), lengths.tolist()) == ([1, 1, 1], [6, 6, 6])
    at_random = {"is_slippery": False, "greedy": False, "end_e": 1.0}
    _, lengths = evaluate(ql, to_the_goal, 3, **at_random, max_episode_steps=1)
    assert lengths.tolist() == [1, 1, 1]
    returns, _ = evaluate(ql, to_the_goal, 100, **at_random)
    assert returns.mean() < 0.2
    assert returns.tolist() == evaluate(ql, to_the_goal, 100, **at_random)[0].tolist()


@pytest.fixture
def picture(ql, monkeypatch):
    """Draws a table, q and visits (states, actions); returns what is drawn."""

    def draw(env: gym.Env, q: np.ndarray, visits: np.ndarray) -> Axes | None:
        drawn, table = [], ql.Table(*q.shape, 0.0)
        table.q, table.visits = q.tolist(), visits.tolist()
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes))
            ql.draw_table(table, env, Path("table.png"))
        return drawn[0] if drawn else None

    return draw


def texts(axes: Axes) -> dict[tuple[int, int], str]:
    """What is written in each cell (row, column) that has a text."""
    return {text.get_position()[::-1]: text.get_text() for text in axes.texts if text.get_text()}


ARROWS = {"←": (0, -1), "→": (0, 1), "↑": (-1, 0), "↓": (1, 0)}


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1"])
def test_arrows_of_a_map_point_where_the_actions_lead(picture, env_id):
    """Cells that were tried have an arrow and a value, others the map's letter or nothing."""
    env = gym.make(env_id, is_slippery=False)
    model = env.unwrapped.P
    letters = (
        env.unwrapped.desc.astype(str)
        if "Lake" in env_id
        else np.array([["F"] * 12] * 3 + [["S"] + ["H"] * 11])
    )
    tried = np.isin(letters, ("S", "F")).ravel()
    tried[3] = False
    for action in range(4):
        best = np.arange(len(model)) / 100
        q = best[:, None] - (0.001 * (np.arange(4) != action))
        axes = picture(env, q, tried[:, None] * np.eye(4, dtype=int)[2])
        written = texts(axes)
        for state, cell in enumerate(np.ndindex(letters.shape)):
            if not tried[state]:
                assert written.get(cell) == (letters[cell] if "Lake" in env_id else None)
                continue
            arrow, value = written[cell].split("\n")
            assert value == f"{best[state]:.2f}"
            _, next_state, reward, _ = model[state][action][0]
            if next_state != state and reward > -100:
                assert np.add(cell, ARROWS[arrow]).tolist() == [*divmod(next_state, letters.shape[1])]
        assert axes.yaxis_inverted()


def test_picture_shows_all_of_the_best_actions(picture):
    q = np.tile([0.5, -0.001, 0.5, 0.0], (16, 1))
    assert texts(picture(lake(), q, np.ones((16, 4))))[0, 0] == "←→\n0.50"
    assert texts(picture(lake(), q - 0.501, np.ones((16, 4))))[0, 0] == "←→\n0.00"  # not -0.00


def test_letters_of_the_blackjack_chart_are_the_greedy_actions(picture):
    rng = np.random.default_rng(1)
    q, tried = rng.normal(size=(32, 11, 2, 2)), np.ones((32, 11, 2, 2), int)
    tried[:12, :, 1] = tried[:, 0] = 0
    axes = picture(gym.make("Blackjack-v1"), q.reshape(-1, 2), tried.reshape(-1, 2))
    for axis, name in ((axes.xaxis, "dealer's card"), (axes.yaxis, "player's sum")):
        assert axis.get_label_text() == name
    cards, totals = (
        [label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)
    )
    assert (axes.get_xticks().tolist(), axes.get_yticks().tolist()) == ([*range(22)], [*range(18)])
    expected = {}
    for total, card, ace in itertools.product(range(4, 22), range(1, 11), range(2)):
        cell = 21 - total, 11 * ace + card
        assert (totals[cell[0]], cards[cell[1]]) == (str(total), "ace" if card == 1 else str(card))
        if tried[total, card, ace].any():
            best = q[total, card, ace].argmax()
            expected[cell] = f"{'SH'[best]}\n{q[total, card, ace, best]:.2f}".replace("-0.00", "0.00")
    assert texts(axes) == expected
    assert re.search("S: stick, H: hit.*Left: no usable ace", axes.get_title())


def test_other_environments_have_no_picture(picture):
    assert picture(gym.make("Taxi-v4"), np.zeros((500, 6)), np.ones((500, 6), int)) is None


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(train):
    first = train("first")
    assert_same_state(first, train("second"))
    assert not np.array_equal(first["visits"], train("third", seed=2)["visits"])


def test_evaluation_consumes_none_of_training(train):
    often, never = train("often", eval_interval=250, eval_episodes=9), train("never", eval_interval=0)
    assert_same_state(often, never)


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """Killed at a random step, at an evaluation, and between the two files of a checkpoint."""
    whole = run_script("qlearning_tabular", *flags(SHORT_RUN), "--run-dir", "whole", cwd=tmp_path)
    assert (whole.returncode, whole.stderr) == (0, "")
    step, start = random.randrange(501, 1000), [*flags(SHORT_RUN), "--run-dir", "killed"]
    for function, call in (("q_target", step), ("evaluate", 1), ("replace", 4)):
        script = script_path("qlearning_tabular")
        killed = run_python("-c", KILLER, script, function, call, *start, cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL, (step, killed.stderr)
        assert (tmp_path / "killed" / "checkpoint.tmp").exists() == (function == "replace")
        start = ["--resume", "killed"]
    resumed = run_script("qlearning_tabular", *start, cwd=tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    for name in ("checkpoint.pt", "model.pt"):
        assert_same_state(*(read(tmp_path / run_dir / name) for run_dir in ("killed", "whole")))
    for name in ("evaluations.csv", "table.png"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    ours, theirs = scalars(tmp_path / "killed"), scalars(tmp_path / "whole")
    speeds = (logged.pop("charts/SPS") for logged in (ours, theirs))
    assert [[point for point, _ in speed] for speed in speeds] == [[500, 750, 1000, 1500, 2000]] * 2
    np.testing.assert_equal(ours, theirs)  # an explained variance may be no number
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """An empty folder but for a copy of the script, which has trained in it."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(script_path("qlearning_tabular"), folder)
    done = run_python("qlearning_tabular.py", *flags(SHORT_RUN), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="session")
def run_dir(folder) -> Path:
    return next((folder / "runs").iterdir())


@pytest.fixture
def play(ql, monkeypatch, capfd):
    """Plays a saved table in this process; returns what each episode scored, and the summary's figures."""

    def run(*arguments) -> tuple[list[float], list[float]]:
        monkeypatch.setattr(sys, "argv", ["qlearning_tabular.py", "--evaluate", *map(str, arguments)])
        capfd.readouterr()
        ql.main()
        *episodes, summary = re.findall(r"^(?:episode|mean).*", capfd.readouterr().out, re.MULTILINE)
        pattern = r"mean (\S+), standard deviation (\S+), standard error (\S+)"
        returns = [float(re.fullmatch(r"episode \d+: return (\S+), length \d+", x)[1]) for x in episodes]
        return returns, [float(x) for x in re.fullmatch(pattern, summary).groups()]

    return run


def test_run_folder(ql, folder, run_dir):
    assert {path.name for path in folder.iterdir()} == {"qlearning_tabular.py", "runs"}
    assert re.fullmatch(r"FrozenLake-v1__qlearning_tabular__seed1__\d{10}", run_dir.name)
    names = sorted(re.sub(r"^(events\.out\.tfevents).*", r"\1", path.name) for path in run_dir.iterdir())
    expected = ["checkpoint.pt", "config.json", "evaluations.csv", "events.out.tfevents", "model.pt"]
    assert names == [*expected, "table.png"]
    config = json.loads((run_dir / "config.json").read_text())
    arguments = json.loads(json.dumps(vars(ql.Args(**SHORT_RUN)), default=str))
    assert {name: config[name] for name in arguments} == arguments
    assert {"python", "numpy", "gymnasium", "torch", "git_commit", "cpu"} < config.keys()


TAGS = {
    *("charts/episodic_return", "charts/episodic_return_min", "charts/episodic_return_max"),
    *("charts/episodic_length", "charts/return_mean_100", "charts/SPS", "charts/learning_rate"),
    *("charts/epsilon", "losses/td_loss", "losses/explained_variance"),
    *("values/predictions", "values/targets"),
}
EVALUATION_TAGS = {"eval/return_mean", "eval/return_stderr", "eval/length_mean"}


def test_logs_hold_what_the_contract_asks_for(ql, run_dir):
    header, *rows = (line.split(",") for line in (run_dir / "evaluations.csv").read_text().splitlines())
    assert header == ["global_step", "episode", "return", "length"]
    steps = [step for step in ("750", "1500", "2000") for _ in range(4)]
    assert [row[:2] for row in rows] == [[step, str(i % 4)] for i, step in enumerate(steps)]
    logged = scalars(run_dir)
    assert logged.keys() == TAGS | EVALUATION_TAGS
    assert all([step for step, _ in logged[tag]] == [500, 750, 1000, 1500, 2000] for tag in TAGS)
    last = [ql.exploration(step, ql.Args(**SHORT_RUN)) for step in (249, 499, 749, 999)]
    epsilons = [np.mean(last[:2]), *last[2:], 0.1, 0.1]
    assert [value for _, value in logged["charts/epsilon"]] == pytest.approx(epsilons)
    for tag, column in (("eval/return_mean", 2), ("eval/length_mean", 3)):
        means = [np.mean([float(row[column]) for row in rows[i : i + 4]]) for i in (0, 4, 8)]
        assert [value for _, value in logged[tag]] == pytest.approx(means)


def test_saved_table_scores_what_training_reported(ql, play, folder, run_dir):
    before = contents(folder)
    seed = evaluation_seed(1, 2000)
    returns, summary = play(run_dir, "--eval-episodes", 4, "--seed", seed)
    rows = (run_dir / "evaluations.csv").read_text().splitlines()[-4:]
    assert returns == [float(row.split(",")[2]) for row in rows]
    deviation = np.std(returns, ddof=1)
    assert summary == pytest.approx([np.mean(returns), deviation, deviation / 2], abs=1e-4)
    played = [
        play(run_dir / "model.pt", "--eval-episodes", 50, *options)
        for options in ([], ["--end-e", "1"], ["--no-greedy"], ["--no-greedy", "--end-e", "1"])
    ]
    assert played[0] == played[1] != played[2] != played[3] != played[0]
    assert contents(folder) == before


@pytest.mark.parametrize(("goal", "last_step"), [(-1.0, 750), (2.0, 2000)])
def test_stop_at_return(train, goal, last_step):
    assert train(stop_at_return=goal)["global_step"] == last_step


def test_resumed_run_takes_new_settings_from_flags(ql, train, monkeypatch):
    before = train(total_timesteps=500)
    arguments = ["--resume", "run", "--total-timesteps", "1000", "--alpha", "0.25"]
    monkeypatch.setattr(sys, "argv", ["qlearning_tabular.py", *arguments])
    ql.main()
    after = read(Path("run/checkpoint.pt"))
    assert after["visits"].sum() == 1000
    assert (after["visits"] >= before["visits"]).all()
    assert (after["args"]["alpha"], after["args"]["checkpoint_interval"]) == (0.25, 500)


def test_track_starts_a_run_of_weights_and_biases(train, monkeypatch):
    """It gets what TensorBoard gets: test_run_folder.py sees to it that this arrives."""
    started, ignore = [], lambda *_, **__: None
    run = types.SimpleNamespace(log=ignore, define_metric=ignore)
    wandb = types.SimpleNamespace(init=lambda **settings: started.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(track=True, wandb_project="a_project")
    [settings] = started
    assert (settings["project"], settings["id"]) == ("a_project", "run")
    assert settings["config"]["alpha_decay"] == 0.6


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Blackjack-v1"])
def test_records_the_first_episode_of_each_evaluation(train, play, env_id):
    pytest.importorskip("pygame")
    train(env_id=env_id, capture_video=True, eval_interval=1000, eval_episodes=1)
    rows = [line.split(",") for line in Path("run/evaluations.csv").read_text().splitlines()[1:]]
    videos = {
        path.name: len(list(iio.imiter(path, plugin="FFMPEG"))) for path in Path("videos/run").iterdir()
    }
    assert videos == {f"step_{row[0]}.mp4": int(row[3]) for row in rows}
    play("run", "--capture-video", "--eval-episodes", 1)
    assert Path("videos/run/greedy.mp4").exists()


class Broken(gym.Env):
    """Its rewards are no numbers from the 700th step on."""

    observation_space, action_space = Discrete(2), Discrete(2)
    steps = 0

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.steps += 1
        return 0, math.nan if self.steps > 700 else 1.0, False, False, {}


def test_non_finite_value_stops_the_run(train):
    gym.register("Broken-v0", Broken)
    with pytest.raises(SystemExit, match=r"reward not finite.*step \d+; .*.*run/checkpoint\.pt"):
        train(env_id="Broken-v0")
    assert np.isfinite(read(Path("run/checkpoint.pt"))["q"]).all()


@pytest.fixture
def refusal(ql, run_dir, tmp_path, monkeypatch, capfd):
    """Runs the script beside a finished run; returns its one line of error. Nothing has changed.

    tyro has lines of its own.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run_dir, "run")

    def run(*arguments, by_tyro: bool = False) -> str:
        before = contents(tmp_path)
        monkeypatch.setattr(sys, "argv", ["qlearning_tabular.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            ql.main()
        assert contents(tmp_path) == before
        stderr = capfd.readouterr().err
        assert stopped.value.code == 2, stderr
        assert by_tyro or re.fullmatch(r"error: .+\n", stderr), stderr
        return stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--env-id FrozenLak-v1", "FrozenLake"),
        ("--env-id Taxi-v3", "v4"),
        ("--env-id CartPole-v1", "Box("),
        ("--env-id Pendulum-v1", "Box("),
        ("--env-id Taxi-v4 --map-name 4x4", "map_name"),
        ("--sab True", "sab"),
        ("--alpha 0", "--alpha"),
        ("--alpha 1.1", "--alpha"),
        ("--alpha-decay 1.5", "--alpha-decay"),
        ("--gamma 1.01", "--gamma"),
        ("--start-e -0.1", "--start-e"),
        ("--end-e 2", "--end-e"),
        ("--total-timesteps 0", "--total-timesteps"),
        ("--eval-episodes 0", "--eval-episodes"),
        ("--max-episode-steps 0", "--max-episode-steps"),
        ("--run-dir run", "--resume run"),
        ("--resume nowhere", "nowhere"),
        ("--evaluate nowhere", "nowhere"),
        ("--resume run --run-dir other", "--run-dir"),
        ("--run-dir run/model.pt/run", "run folder"),
        ("--resume run --env-id FrozenLake8x8-v1 --map-name 4x4", "FrozenLake8x8-v1"),
        ("--evaluate run --env-id FrozenLake8x8-v1 --map-name 4x4", "FrozenLake8x8-v1"),
        ("--resume run --map-name 8x8", "q has shape"),
        ("--evaluate run --map-name 8x8", "q has shape"),
        ("--resume run --gamma nan", "--gamma"),
    ],
)
def test_bad_input(refusal, arguments, hint):
    assert hint in refusal(*arguments.split())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [("--map-name 5x5", "5x5"), ("--checkpoint-interval x", "--checkpoint-interval"), ("--device cuda", "")],
)
def test_bad_input_that_tyro_refuses(refusal, arguments, hint):
    assert hint in refusal(*arguments.split(), by_tyro=True)


def test_number_that_no_field_takes(ql, refusal):
    for field in dataclasses.fields(ql.Args):
        flag, kind = f"--{field.name.replace('_', '-')}", str(field.type)
        for value in (math.nan, math.inf, -math.inf) if "float" in kind else (-1,) if "int" in kind else ():
            assert flag in refusal(flag, value)


class Continuous(gym.Env):
    observation_space, action_space = Discrete(2), gym.spaces.Box(-1, 1)


def test_continuous_actions(refusal):
    gym.register("Continuous-v0", Continuous)
    assert "Box(" in refusal("--env-id", "Continuous-v0")


def test_video_without_a_renderer(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert "gymnasium[toy-text]" in refusal("--capture-video")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def edit(path: Path, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:500]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint\n" * 100),
    "a folder": lambda path: path.unlink() or path.mkdir(),
    "another object": lambda path: torch.save(torch.zeros(3), path),
    "without a table": lambda path: edit(path, lambda state: state.pop("agent")),
    "without a part of the table": lambda path: edit(path, lambda state: state["agent"].pop("q")),
    "unknown setting": lambda path: edit(path, lambda state: state["args"].update(no_such_setting=1)),
    "malicious pickle": lambda path: path.write_bytes(pickle.dumps(Malicious())),
    "malicious torch file": lambda path: torch.save({"script": Malicious()}, path),
}


@pytest.mark.parametrize(("flag", "name"), [("--resume", "checkpoint.pt"), ("--evaluate", "model.pt")])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(refusal, flag, name, damage):
    """`refusal` sees to it that a malicious one has not made its folder."""
    DAMAGES[damage](Path("run", name))
    assert name in refusal(flag, "run")


def test_policy_in_place_of_a_checkpoint(refusal):
    shutil.copy("run/model.pt", "run/checkpoint.pt")
    refusal("--resume", "run")


@pytest.mark.parametrize(("flag", "name"), [("--resume", "checkpoint.pt"), ("--evaluate", "model.pt")])
def test_checkpoint_of_another_script(refusal, flag, name):
    edit(Path("run", name), lambda state: state.update(script="a2c_atari"))
    message = refusal(flag, "run")
    assert "a2c_atari" in message
    assert "qlearning_tabular" in message
