"""reinforce_cartpole.py: the four estimators, the episodes they are computed from, and what a run must be."""

import copy
import dataclasses
import inspect
import itertools
import math
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    assert_same,
    contents,
    evaluation_seed,
    flags,
    load_script,
    run_python,
    scalars,
    script_path,
)
from gymnasium.spaces import Box, Discrete

ESTIMATORS = ("total", "discounted", "reward-to-go", "baseline")
# Episodes of some 20 steps, so that each interval takes a few batches of 4.
SHORT_RUN = {
    "total_episodes": 40,
    "num_envs": 2,
    "batch_episodes": 4,
    "hidden_size": 16,
    "eval_interval": 250,
    "eval_episodes": 3,
    "greedy": False,
    "checkpoint_interval": 200,
}


class Ledger(gym.Env):
    """Writes down every step: batches, which begin with a seed, of episodes of steps.

    Episodes of 1 to 8 steps end by termination, truncation or both.
    """

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Discrete(3, start=5)
    ledgers = ()

    def __init__(self):
        self.batches = []
        Ledger.ledgers += (self.batches,)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.batches.append([])
        self.batches[-1].append([])
        self.remaining, self.end = self.np_random.integers(1, 9), self.np_random.integers(1, 4)
        self.obs = self.np_random.standard_normal(3, dtype=np.float32)
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action)
        before, self.obs = self.obs, self.np_random.standard_normal(3, dtype=np.float32)
        self.remaining -= 1
        terminated, truncated = (bool(self.remaining == 0 and self.end & kind) for kind in (1, 2))
        reward = self.np_random.normal(2)
        self.batches[-1][-1].append((before, action - 5, reward, self.obs, terminated, truncated))
        return self.obs, reward, terminated, truncated, {}


class Clock(gym.Env):
    """Reward 1 at each step; the observation is the time modulo 4; after every 4 steps the episode ends."""

    observation_space = Box(0, 1, (4,))
    action_space = Discrete(2)

    def __init__(self, terminates: bool):
        self.terminates = terminates

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.eye(4, dtype=np.float32)[0], {}

    def step(self, action):
        self.time += 1
        ends, obs = self.time == 4, np.eye(4, dtype=np.float32)[self.time % 4]
        return obs, 1.0, ends and self.terminates, ends and not self.terminates, {}


class Broken(Clock):
    """The 100th reward is not a number."""

    rewards = 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.rewards += 1
        return obs, math.nan if self.rewards == 100 else reward, *rest


gym.register("PlainRL/DiscreteLedger-v0", Ledger)
gym.register("PlainRL/TerminatingDiscreteClock-v0", Clock, kwargs={"terminates": True})
gym.register("PlainRL/TruncatingDiscreteClock-v0", Clock, kwargs={"terminates": False})
gym.register("PlainRL/BrokenDiscreteClock-v0", Broken, kwargs={"terminates": True})


@pytest.fixture(scope="session")
def reinforce() -> ModuleType:
    return load_script("reinforce_cartpole")


@pytest.fixture
def train(reinforce, tmp_path, monkeypatch):
    """Trains in this process, in a new run folder of tmp_path; returns the checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(run_dir: str = "run", **settings) -> dict:
        reinforce.train(reinforce.Args(**(SHORT_RUN | settings | {"run_dir": Path(run_dir)})))
        return torch.load(Path(run_dir, "checkpoint.pt"), weights_only=True)

    return run


@pytest.fixture
def main(reinforce, monkeypatch):
    """Runs the script's main function in this process, with a command line."""

    def run(*flags) -> None:
        monkeypatch.setattr(sys, "argv", ["reinforce_cartpole.py", *map(str, flags)])
        reinforce.main()

    return run


@pytest.fixture
def spy(reinforce, monkeypatch):
    """Records what a function of the script was called with, as it was then, and what it returned."""

    def record(name: str) -> list[dict]:
        function, calls = getattr(reinforce, name), []

        def wrapper(*args, **kwargs):
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            copies = {
                k: v.detach().clone() if torch.is_tensor(v) else copy.deepcopy(v)
                for k, v in arguments.items()
            }
            calls.append(copies | {"result": function(*args, **kwargs)})
            return calls[-1]["result"]

        monkeypatch.setattr(reinforce, name, wrapper)
        return calls

    return record


def reference_weights(estimator, rewards, values, gamma, bootstrap=0.0) -> list[float]:
    """Weights of one episode's steps, from their definitions; bootstrap is the value of what follows it."""
    steps = range(len(rewards))
    if estimator == "total":
        return [sum(rewards) for _ in steps]
    if estimator == "discounted":
        return [sum(gamma**k * rewards[k] for k in steps) for _ in steps]
    to_go = [sum(gamma ** (k - t) * rewards[k] for k in steps[t:]) for t in steps]
    if estimator == "reward-to-go":
        return to_go
    return [to_go[t] + gamma ** (len(steps) - t) * bootstrap - values[t] for t in steps]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_the_defined_ones(reinforce, estimator, seed):
    """Several episodes of 1 to 9 steps in each column, and the beginning of one, which no weight may see."""
    rng, gamma, shape, expected = np.random.default_rng(seed), 0.93, (40, 3), []
    rewards, values, done = rng.normal(1, 2, shape), rng.normal(size=shape), np.zeros(shape, bool)
    for column in range(shape[1]):
        start = 0
        while (end := start + rng.integers(1, 10)) <= 35:
            done[end - 1, column] = True
            episode = slice(start, end), column
            weights = reference_weights(estimator, rewards[episode], values[episode], gamma)
            expected.append((episode, weights))
            start = end
    tensors = map(torch.from_numpy, (rewards, done, values))
    weights = reinforce.estimator_weights(estimator, *tensors, gamma)
    assert weights.shape == shape
    assert len(expected) > 10
    for episode, reference in expected:
        np.testing.assert_allclose(weights[episode], reference, rtol=0, atol=1e-12)


class TinyMDP:
    """3 states, 2 actions, and an end (s' = 3) after 3 steps or before: every trajectory can be enumerated.

    The policy is an agent's, in float64. What an estimator makes of each trajectory gives its exact mean and
    variance; what they should be comes from backward induction, which knows nothing of trajectories.
    """

    def __init__(self, reinforce: ModuleType):
        rng = np.random.default_rng(5)
        self.transitions = torch.from_numpy(rng.dirichlet(np.ones(4), (3, 2)))  # [s, a, s']
        self.rewards = torch.from_numpy(rng.uniform(0.5, 2, (3, 2, 4)))
        self.starts = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        self.reinforce = reinforce
        torch.manual_seed(0)
        agent = reinforce.CategoricalAgent(obs_dim=3, num_actions=2, hidden_size=4).double()
        self.parameters = list(agent.actor.parameters())
        with torch.no_grad():
            for p in self.parameters:
                p += 0.7 * torch.randn_like(p)
        self.logits = agent.actor(torch.eye(3).double())
        self.log_probs = self.logits.log_softmax(-1)
        self.enumerate()

    def enumerate(self) -> None:
        """All trajectories as columns of 3 steps; those after the end have rewards that must not count."""
        paths, finished = [[step] for step in np.ndindex(3, 2, 4)], []
        while paths:
            path = paths.pop()
            if path[-1][2] == 3 or len(path) == 3:
                finished.append(path)
            else:
                paths += [[*path, (path[-1][2], a, n)] for a, n in np.ndindex(2, 4)]
        self.paths, shape = finished, (3, len(finished))
        self.path_states, self.path_actions = torch.zeros(2, *shape, dtype=torch.long)
        self.path_rewards, self.done = 100 * torch.randn(shape).double(), torch.ones(shape, dtype=torch.bool)
        self.probs = torch.ones(len(finished)).double()
        for k, path in enumerate(finished):
            self.probs[k] *= self.starts[path[0][0]]
            for t, (s, a, n) in enumerate(path):
                self.path_states[t, k], self.path_actions[t, k] = s, a
                self.path_rewards[t, k], self.done[t, k] = self.rewards[s, a, n], t == len(path) - 1
                self.probs[k] *= self.log_probs[s, a].exp().item() * self.transitions[s, a, n]

    def flat_gradient(self, outputs: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        """Of each row of outer, summed over its products with outputs, in the policy's parameters."""
        gradients = torch.autograd.grad(
            outputs, self.parameters, outer, retain_graph=True, is_grads_batched=True
        )
        return torch.cat([g.flatten(1) for g in gradients], 1)

    def estimates(self, estimator: str, gamma: float, values: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Exact mean and total variance of the gradient estimate from one episode; values are (3,)."""
        weights = self.reinforce.estimator_weights(
            estimator, self.path_rewards, self.done, values[self.path_states], gamma
        )
        log_probs = self.log_probs.detach()[self.path_states, self.path_actions].requires_grad_()
        losses = [
            self.reinforce.policy_loss(log_probs[: len(path), k], weights[: len(path), k], 1)
            for k, path in enumerate(self.paths)
        ]
        (in_log_probs,) = torch.autograd.grad(sum(losses), log_probs)  # a column for each trajectory's loss
        scores = self.flat_gradient(self.log_probs.flatten(), torch.eye(6).double()).unflatten(0, (3, 2))
        estimates = -(in_log_probs[..., None] * scores[self.path_states, self.path_actions]).sum(0)
        mean = self.probs @ estimates
        return mean, (self.probs @ (estimates - mean).square().sum(1)).item()

    def gradient(self, gamma: float, scale: float = 1.0) -> torch.Tensor:
        """Of the exact expected return with discount gamma; the part through a_t is divided by scale**t."""
        decisions = [self.logits.detach().clone().requires_grad_() for _ in range(3)]
        values = torch.zeros(4).double()  # of the states after the last step, and of the end
        for logits in reversed(decisions):
            action_values = (self.transitions * (self.rewards + gamma * values)).sum(-1)
            values = torch.cat([(logits.softmax(-1) * action_values).sum(-1), torch.zeros(1).double()])
        parts = torch.autograd.grad(self.starts @ values[:3], decisions)
        return self.flat_gradient(self.logits, sum(part / scale**t for t, part in enumerate(parts))[None])[0]

    def state_values(self, gamma: float) -> torch.Tensor:
        """Expected reward-to-go (3,) in each state, at whichever step it is visited."""
        to_go = self.reinforce.estimator_weights(
            "reward-to-go", self.path_rewards, self.done, self.path_rewards, gamma
        )
        visits, sums = torch.zeros(2, 3).double()
        for k, path in enumerate(self.paths):
            for t, (s, _, _) in enumerate(path):
                visits[s] += self.probs[k]
                sums[s] += self.probs[k] * to_go[t, k]
        return sums / visits


@pytest.fixture(scope="session")
def mdp(reinforce) -> TinyMDP:
    mdp = TinyMDP(reinforce)
    assert mdp.probs.sum().item() == pytest.approx(1, abs=1e-12)
    return mdp


@pytest.mark.parametrize("gamma", [0.6, 1.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_estimate_is_unbiased(mdp, estimator, gamma):
    """total: for the gradient of the expected return. discounted: for that of the expected discounted return.

    reward-to-go, and baseline with any values: for the latter, with its part through a_t divided by gamma**t.
    """
    values = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    expected = {
        "total": mdp.gradient(1.0),
        "discounted": mdp.gradient(gamma),
        "reward-to-go": mdp.gradient(gamma, scale=gamma),
        "baseline": mdp.gradient(gamma, scale=gamma),
    }[estimator]
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(mdp.estimates(estimator, gamma, values)[0], expected, rtol=0, atol=1e-10)


def test_each_estimator_has_less_variance_than_the_one_before(mdp):
    values = mdp.state_values(0.6)
    variances = [mdp.estimates(estimator, 0.6, values)[1] for estimator in ESTIMATORS]
    assert variances == sorted(variances, reverse=True)
    assert variances[-1] < 0.5 * variances[-2]


def test_loss_is_a_mean_over_episodes(reinforce):
    """Not over steps: then the 2 long episodes here would count for less than the short ones."""
    log_probs, weights = torch.randn(2, 50).double().requires_grad_()
    loss = reinforce.policy_loss(log_probs, weights.detach(), 10)
    assert loss.item() == pytest.approx(-(log_probs * weights).sum().item() / 10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_environment_gives_its_first_episodes_whole_and_once(train, spy, estimator):
    Ledger.ledgers = ()
    policies, losses = spy("numpy_logits"), spy("policy_loss")
    updates, num_envs, share = 4, 3, 2
    checkpoint = train(
        env_id="PlainRL/DiscreteLedger-v0",
        estimator=estimator,
        num_envs=num_envs,
        batch_episodes=share * num_envs,
        total_episodes=updates * share * num_envs,
        gamma=0.9,
        eval_interval=0,
    )
    ledgers = [ledger for ledger in Ledger.ledgers if ledger]
    assert [len(ledger) for ledger in ledgers] == [updates] * num_envs
    assert max(len(batch) for ledger in ledgers for batch in ledger) > share + 1  # what is not counted
    steps, all_episodes, ends = 0, [], set()
    for update, (made, loss) in enumerate(zip(policies, losses, strict=True)):
        agent, rows = made["agent"], []
        for column, ledger in enumerate(ledgers):
            episodes = ledger[update][:share]
            assert all(episode[-1][4] or episode[-1][5] for episode in episodes)
            weights, all_episodes = [], all_episodes + episodes
            for episode in episodes:
                before, _, rewards, after, terminated, truncated = zip(*episode, strict=True)
                ends.add((terminated[-1], truncated[-1]))
                with torch.no_grad():
                    values = agent.critic(torch.from_numpy(np.stack(before)))[:, 0].tolist()
                    future = 0.0 if terminated[-1] else agent.critic(torch.from_numpy(after[-1])).item()
                weights += reference_weights(estimator, rewards, values, 0.9, future)
            played = enumerate(zip(itertools.chain(*episodes), weights, strict=True))
            rows += [(t, column, step[0], step[1], weight) for t, (step, weight) in played]
        rows.sort(key=lambda row: row[:2])  # as in arrays (num_steps, num_envs)
        _, _, obs, actions, weights = zip(*rows, strict=True)
        with torch.no_grad():
            log_probs = agent.actor(torch.from_numpy(np.stack(obs))).log_softmax(-1)
        assert loss["num_episodes"] == share * num_envs
        torch.testing.assert_close(loss["log_probs"], log_probs[range(len(actions)), actions])
        np.testing.assert_allclose(loss["weights"], weights, rtol=1e-4, atol=1e-4)
        steps += len(rows)
    assert ends == {(True, False), (False, True), (True, True)}
    assert len({tuple(episode[0][0]) for episode in all_episodes}) == updates * share * num_envs
    assert (checkpoint["global_step"], checkpoint["episodes"]) == (steps, len(all_episodes))
    returns_and_lengths = sorted((sum(step[2] for step in episode), len(episode)) for episode in all_episodes)
    np.testing.assert_allclose(sorted(checkpoint["recent"]), returns_and_lengths, rtol=1e-6)
    logged = scalars(Path("run"))
    assert logged["charts/episodes"][-1] == (steps, len(all_episodes))
    mean_return, mean_length = np.mean(returns_and_lengths, axis=0)
    assert logged["charts/return_mean_100"][-1][1] == pytest.approx(mean_return)
    assert np.mean([v for _, v in logged["charts/episodic_return"]]) == pytest.approx(mean_return)
    assert np.mean([v for _, v in logged["charts/episodic_length"]]) == pytest.approx(mean_length)


@pytest.mark.parametrize("terminates", [False, True])
def test_value_of_a_state_depends_on_how_episodes_end(reinforce, train, terminates):
    """With gamma 0.9 an endless stream of rewards of 1 is worth 10, wherever time limits cut it."""
    env_id = f"PlainRL/{'Terminating' if terminates else 'Truncating'}DiscreteClock-v0"
    checkpoint = train(env_id=env_id, total_episodes=400, gamma=0.9, eval_interval=0, value_epochs=20)
    args = reinforce.Args(**checkpoint["args"])
    agent = reinforce.make_agent(args, reinforce.make_envs(args, 1))
    agent.load_state_dict(checkpoint["agent"])
    expected = [(1 - 0.9**steps) / 0.1 if terminates else 10 for steps in (4, 3, 2, 1)]
    np.testing.assert_allclose(agent.critic(torch.eye(4)).detach()[:, 0], expected, rtol=0.05)


def test_policy_samples_the_softmax_and_its_mode_is_greedy(reinforce):
    torch.manual_seed(0)
    agent, space = reinforce.CategoricalAgent(obs_dim=4, num_actions=3, hidden_size=8), Discrete(3, start=-1)
    with torch.no_grad():
        agent.actor.output.weight *= 100
        probs = agent.actor(torch.ones(4)).softmax(-1).numpy()
    assert probs.min() > 0.05
    obs, policies = (
        np.ones((20_000, 4), np.float32),
        (reinforce.make_policy(reinforce.Args(greedy=greedy), agent, space) for greedy in (False, True)),
    )
    sampled, greedy = (policy(obs, np.random.default_rng(0)) for policy in policies)
    np.testing.assert_allclose(np.bincount(sampled + 1) / 20_000, probs, atol=0.01)
    assert set(greedy) == {probs.argmax() - 1}


@pytest.mark.parametrize("estimator", ["reward-to-go", "baseline"])
def test_learns_to_balance_the_pole(reinforce, train, estimator):
    """An untrained policy keeps the pole up for some 20 steps when it samples, and 10 when it is greedy."""
    settings = {"total_episodes": 400, "batch_episodes": 5, "num_envs": 5, "hidden_size": 64}
    checkpoint = train(estimator=estimator, **settings, learning_rate=5e-3, eval_interval=0)
    args = dataclasses.replace(reinforce.Args(**checkpoint["args"]), greedy=True)
    envs = reinforce.make_envs(args, 10)
    agent = reinforce.make_agent(args, envs)

    def greedy_return() -> float:
        policy = reinforce.make_policy(args, agent, envs.single_action_space)
        return np.mean(reinforce.evaluate(policy, envs, episodes=10, seed=0)[0])

    assert greedy_return() < 100
    agent.load_state_dict(checkpoint["agent"])
    assert greedy_return() > 200


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(train):
    first, second, other = train("first"), train("second"), train("third", seed=2)
    assert_same(first, second)
    assert not torch.equal(first["agent"]["actor.output.weight"], other["agent"]["actor.output.weight"])


def test_evaluation_and_checkpoints_consume_none_of_training(train):
    often, seldom, never = (
        train(
            run_dir, eval_interval=interval, eval_episodes=episodes, checkpoint_interval=checkpoint_interval
        )
        for run_dir, interval, episodes, checkpoint_interval in (
            ("often", 1, 5, 1),
            ("seldom", 500, 1, 300),
            ("never", 0, 1, 10_000),
        )
    )
    assert_same(often, seldom)
    assert_same(often, never)


def assert_same_run(run_dir: str, reference: str) -> None:
    for name in ("checkpoint.pt", "model.pt"):
        assert_same(*(torch.load(Path(x, name), weights_only=True) for x in (run_dir, reference)))
    ours, theirs = (Path(x, "evaluations.csv").read_text() for x in (run_dir, reference))
    assert ours == theirs
    ours, theirs = scalars(Path(run_dir)), scalars(Path(reference))
    assert len(ours.pop("charts/SPS")) == len(theirs.pop("charts/SPS"))
    assert ours == theirs


@pytest.mark.parametrize(("function", "call"), [("policy_loss", 1), ("policy_loss", 9), ("evaluate", 2)])
def test_stopped_anywhere_and_resumed_equals_uninterrupted(
    reinforce, train, main, monkeypatch, function, call
):
    """Stopped at once by an exception, which leaves less behind than a signal; the run has 10 updates."""
    train("whole")
    with monkeypatch.context() as patch:
        countdown, original = iter(range(call - 1, -1, -1)), getattr(reinforce, function)

        def stop(*args):
            if next(countdown) == 0:
                raise KeyboardInterrupt
            return original(*args)

        patch.setattr(reinforce, function, stop)
        with pytest.raises(KeyboardInterrupt):
            train("stopped")
    time.sleep(1)  # TensorBoard orders files by the second in which they were begun
    main("--resume", "stopped")
    assert_same_run("stopped", "whole")


def test_killed_and_resumed_equals_uninterrupted(train, main, tmp_path):
    """Killed for good, between the two files of the second checkpoint that it writes while it trains."""
    train("whole")
    killer = """
import os, runpy, signal, sys
script, *sys.argv[1:] = sys.argv[1:]
replace, calls = os.replace, []
def die(*paths):
    calls.append(paths)
    if len(calls) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = die
runpy.run_path(script, run_name="__main__")
"""
    command = ("-c", killer, script_path("reinforce_cartpole"), *flags(SHORT_RUN), "--run-dir", "killed")
    killed = run_python(*command, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Path("killed/checkpoint.tmp").exists()
    time.sleep(1)  # TensorBoard orders files by the second in which they were begun
    main("--resume", "killed")
    assert_same_run("killed", "whole")
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(("limit", "episodes"), [({"total_timesteps": 1}, 4), ({"total_episodes": 13}, 16)])
def test_run_ends_at_the_first_of_its_two_limits_with_a_whole_batch(train, limit, episodes):
    checkpoint = train(**limit, eval_interval=10_000)
    assert checkpoint["episodes"] == episodes
    rows = Path("run/evaluations.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == [str(checkpoint["global_step"])] * 3


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_learning_rate_falls_linearly_with_the_episodes(train, anneal_lr):
    train(total_episodes=16, learning_rate=0.4, anneal_lr=anneal_lr, eval_interval=0)
    rates = [rate for _, rate in scalars(Path("run"))["charts/learning_rate"]]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1] if anneal_lr else [0.4] * 4)


def test_gradient_is_clipped_and_its_norm_logged_before(train):
    """After one update Adam's first moment is a tenth of the gradient."""
    settings = {"estimator": "reward-to-go", "total_episodes": 4, "eval_interval": 0}
    optimizer = train(max_grad_norm=0.5, **settings)["optimizer"]
    moments = torch.cat([state["exp_avg"].flatten() for state in optimizer["state"].values()])
    assert 10 * moments.norm().item() == pytest.approx(0.5, rel=1e-4)
    [(_, norm)] = scalars(Path("run"))["losses/grad_norm"]
    assert norm > 1


def test_non_finite_reward_stops_the_run_and_names_step_and_checkpoint(train):
    """32 steps a batch: the 100th reward comes in the fourth; the checkpoint is that of the second."""
    with pytest.raises(SystemExit) as stopped:
        train(env_id="PlainRL/BrokenDiscreteClock-v0", num_envs=1, batch_episodes=8, checkpoint_interval=64)
    assert re.match("error: reward .*100.*run/checkpoint.pt", str(stopped.value.code))
    checkpoint = torch.load("run/checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 64
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tensorboard_has_the_tags_of_the_contract(train, estimator):
    train(estimator=estimator, total_episodes=4)
    tags = {
        *("charts/episodic_return", "charts/episodic_length", "charts/return_mean_100", "charts/episodes"),
        *("charts/episodic_return_min", "charts/episodic_return_max"),
        *("charts/SPS", "charts/learning_rate", "losses/policy_loss", "losses/entropy", "losses/grad_norm"),
        *("values/advantages", "eval/return_mean", "eval/return_stderr", "eval/length_mean"),
    }
    learned = {"losses/value_loss", "losses/explained_variance", "values/predictions", "values/targets"}
    assert scalars(Path("run")).keys() == tags | (learned if estimator == "baseline" else set())


@pytest.mark.parametrize("greedy", [False, True])
def test_saved_policy_scores_what_training_reported(reinforce, train, main, capfd, greedy):
    step = train(greedy=greedy)["global_step"]
    rows = [row.split(",") for row in Path("run/evaluations.csv").read_text().splitlines()]
    expected = [float(row[2]) for row in rows if row[0] == str(step)]
    before, _ = contents(Path()), capfd.readouterr()
    options = ["--greedy" if greedy else "--no-greedy"]
    main("--evaluate", "run", "--eval-episodes", 3, "--seed", evaluation_seed(1, step), *options)
    *episodes, summary = capfd.readouterr().out.splitlines()
    assert [float(re.search(r"return (.*),", line)[1]) for line in episodes] == expected
    mean, deviation, _ = (float(x) for x in re.findall(r"[\d.]+", summary))
    assert mean == pytest.approx(np.mean(expected), rel=1e-4)
    assert deviation == pytest.approx(np.std(expected, ddof=1), rel=1e-3)
    assert contents(Path()) == before


@pytest.mark.parametrize("env_id", ["Acrobot-v1", "MountainCar-v0", "LunarLander-v3"])
def test_other_environments(train, env_id):
    try:
        gym.make(env_id)
    except gym.error.DependencyNotInstalled:
        pytest.skip(f"{env_id} is not installed")
    assert train(env_id=env_id, total_timesteps=1, eval_interval=0)["episodes"] == 4


def test_video(train):
    pytest.importorskip("pygame")
    iio = pytest.importorskip("imageio.v3")
    checkpoint = train(total_episodes=4, eval_episodes=1, capture_video=True)
    (video,) = Path("videos/run").iterdir()
    assert video.name == f"step_{checkpoint['global_step']}.mp4"
    _, row = Path("run/evaluations.csv").read_text().splitlines()
    frames = list(iio.imiter(video, plugin="FFMPEG"))
    assert len(frames) == int(row.split(",")[3])
    assert np.abs(frames[-1].astype(int) - frames[0]).max() > 10


@pytest.fixture(scope="session")
def finished_run(reinforce, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    reinforce.train(
        reinforce.Args(**(SHORT_RUN | {"total_episodes": 4, "eval_interval": 0}), run_dir=run_dir)
    )
    return run_dir


@pytest.fixture
def refusal(main, finished_run, tmp_path, monkeypatch, capfd):
    """Runs the script with a finished run in the working directory; returns its one line of error.

    tyro has lines of its own.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoint.pt", "model.pt"):
        Path("run").mkdir(exist_ok=True)
        Path("run", name).write_bytes((finished_run / name).read_bytes())

    def run(*flags, by_tyro: bool = False) -> str:
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as stopped:
            main(*flags)
        stderr = capfd.readouterr().err
        assert stopped.value.code == 2
        assert by_tyro or re.fullmatch(r"error: .+\n", stderr), stderr
        assert contents(tmp_path) == before
        return stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--env-id Pendulum-v1", "Discrete"),
        ("--env-id FrozenLake-v1", "Box"),
        ("--env-id CartPol-v1", "CartPole"),
        ("--batch-episodes 10 --num-envs 4", "--num-envs 4"),
        ("--batch-episodes 4 --num-envs 8", "--num-envs 8"),
        ("--total-episodes 0", "--total-episodes"),
        ("--value-epochs 0", "--value-epochs"),
        ("--gamma 1.01", "--gamma"),
        ("--resume run --env-id Acrobot-v1", "CartPole-v1"),
        ("--resume run --hidden-size 8", "hidden"),
        ("--resume run --num-envs 3", "--num-envs 3"),
        ("--resume nowhere", "nowhere"),
        ("--evaluate run --env-id Acrobot-v1", "CartPole-v1"),
        ("--run-dir run", "--resume run"),
    ],
)
def test_bad_input(refusal, arguments, hint):
    assert hint in refusal(*arguments.split())


def test_estimator_that_there_is_not(refusal):
    assert "reward-to-go" in refusal("--estimator", "actor-critic", by_tyro=True)


def test_numbers_that_no_field_takes(reinforce, refusal):
    for field in dataclasses.fields(reinforce.Args):
        flag, kind = f"--{field.name.replace('_', '-')}", str(field.type)
        for value in (math.nan, math.inf, -math.inf) if "float" in kind else (-1,) if "int" in kind else ():
            assert flag in refusal(flag, value)


@pytest.mark.parametrize(("flag", "name"), [("--resume", "checkpoint.pt"), ("--evaluate", "model.pt")])
def test_checkpoint_of_another_script(refusal, flag, name):
    path = Path("run", name)
    torch.save(torch.load(path, weights_only=True) | {"script": "ppo_continuous"}, path)
    assert "ppo_continuous" in refusal(flag, "run")


@pytest.mark.parametrize("part", ["agent", "optimizer", "recent", "episodes", "global_step"])
def test_incomplete_checkpoint(refusal, part):
    state = torch.load("run/checkpoint.pt", weights_only=True)
    del state[part]
    torch.save(state, "run/checkpoint.pt")
    assert part in refusal("--resume", "run")
