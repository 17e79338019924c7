"""What only PQN has; test_atari.py tests what it shares with the other scripts for Atari games."""

import re
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import load_script, scalars
from test_atari import games, slow_returns
from test_ppo_atari import record, row_keys
from torch import Tensor

NUM_ENVS, NUM_STEPS = 3, 40
ROLLOUT = NUM_ENVS * NUM_STEPS
SHORT_RUN = {
    "env_id": "PlainRL/SpaceInvaders-v0",
    "num_envs": NUM_ENVS,
    "num_steps": NUM_STEPS,
    "num_minibatches": 4,
    "torch_threads": 1,
    "eval_interval": 0,
    "checkpoint_interval": 100_000,
}


@pytest.fixture(scope="session")
def pqn() -> ModuleType:
    return load_script("pqn_atari")


@pytest.fixture
def train(pqn, tmp_path, monkeypatch):
    """Trains in this process, in tmp_path/run unless told; returns what TensorBoard shows."""
    monkeypatch.chdir(tmp_path)

    def run(**settings) -> dict:
        args = pqn.Args(**(SHORT_RUN | {"run_dir": Path("run")} | settings))
        pqn.train(args)
        return scalars(args.resume or args.run_dir)

    return run


def random_rollout(seed: int) -> tuple[Tensor, ...]:
    """Rewards, next values, terminated and done, (12, 4) each."""
    rng, shape = np.random.default_rng(seed), (12, 4)
    rewards, next_values = rng.normal(size=(2, *shape))
    terminated, truncated = rng.random((2, *shape)) < 0.15
    return tuple(map(torch.from_numpy, (rewards, next_values, terminated, terminated | truncated)))


def mixture(rewards, next_values, terminated, done, gamma, lam) -> list[float]:
    """Of one game: each target as the mean of all n-step returns, the n-th with the weight lambda^(n-1)."""
    targets = []
    for t in range(len(rewards)):
        n_step, rewarded = [], 0.0
        for k in range(t, len(rewards)):
            rewarded += gamma ** (k - t) * rewards[k]
            n_step.append(rewarded + (0 if terminated[k] else gamma ** (k - t + 1) * next_values[k]))
            if done[k]:
                break
        weights = [(1 - lam) * lam**n for n in range(len(n_step) - 1)]
        targets.append(np.dot([*weights, lam ** (len(n_step) - 1)], n_step))
    return targets


@pytest.mark.parametrize("lam", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_targets_are_those_of_a_slow_reference(pqn, seed, lam):
    rollout = random_rollout(seed)
    assert rollout[2].any()
    assert (rollout[3] & ~rollout[2]).any()
    expected = [mixture(*(x[:, i].numpy() for x in rollout), 0.9, lam) for i in range(4)]
    targets = pqn.q_lambda_returns(*rollout, 0.9, lam)
    np.testing.assert_allclose(targets, np.transpose(expected), rtol=1e-12)
    single = pqn.q_lambda_returns(*(x.float() if x.is_floating_point() else x for x in rollout), 0.9, lam)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, targets, atol=1e-5)


def test_targets_of_a_known_case(pqn):
    """Two steps of an episode that ends, one of the next, which is cut off, and one of a third."""
    rewards, next_values = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[8.0], [99], [6], [10]])
    terminated, done = (torch.tensor(x)[:, None] for x in ([0, 1, 0, 0], [0, 1, 1, 0]))
    targets = pqn.q_lambda_returns(rewards, next_values, terminated.bool(), done.bool(), 0.5, 0.25)
    assert targets.flatten().tolist() == [1 + 0.5 * (0.75 * 8 + 0.25 * 2), 2, 3 + 0.5 * 6, 4 + 0.5 * 10]


@pytest.mark.parametrize("seed", range(5))
def test_lambda_0_is_one_step_q_learning_and_1_the_n_step_return(pqn, seed):
    rewards, next_values, terminated, done = rollout = random_rollout(seed)
    one_step = rewards + 0.9 * torch.where(terminated, 0, next_values)
    torch.testing.assert_close(pqn.q_lambda_returns(*rollout, 0.9, 0.0), one_step)
    bootstraps = torch.where(terminated, 0, next_values)
    expected = [
        slow_returns(*(x[:, i].tolist() for x in (rewards, bootstraps, done)), next_values[-1, i], 0.9)
        for i in range(4)
    ]
    np.testing.assert_allclose(pqn.q_lambda_returns(*rollout, 0.9, 1.0), np.transpose(expected), rtol=1e-12)


def grid_world() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Next states, rewards and ends (16, 4): steps cost a little, up to a goal or a pit in a corner."""
    rows, columns = np.divmod(np.arange(16)[:, None], 4)
    rows = (rows + np.array([-1, 1, 0, 0])).clip(0, 3)
    columns = (columns + np.array([0, 0, -1, 1])).clip(0, 3)
    following = 4 * rows + columns
    return following, np.select([following == 15, following == 3], [1.0, -1.0], -0.01), following % 12 == 3


@pytest.mark.parametrize(("lam", "end_e", "close"), [(0.0, 0.5, 1e-5), (0.65, 0.02, 0.02)])
def test_a_table_reaches_the_optimum_of_dynamic_programming(pqn, lam, end_e, close):
    """With one-step targets whatever acts; else as epsilon falls. Some episodes are cut off after 6 steps."""
    following, rewards_of, ends = grid_world()
    gamma, optimum = 0.9, np.zeros((16, 4))
    for _ in range(200):
        optimum = rewards_of + gamma * ~ends * optimum.max(1)[following]
    states = np.setdiff1d(np.arange(16), [3, 7, 11, 15])  # where an episode may begin

    args = pqn.Args(start_e=1.0, end_e=end_e, exploration_fraction=0.5, total_timesteps=1200 * 128)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    table = torch.zeros(16, 4, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=5.0)
    state, time = rng.choice(states, 16), np.zeros(16, int)
    for update in range(1200):
        epsilon, steps = pqn.exploration(update * 128, args), []
        for _ in range(8):
            action = pqn.explore(table[state].detach(), epsilon, generator).numpy()
            reward, terminated, reached = (x[state, action] for x in (rewards_of, ends, following))
            time += 1
            done = terminated | (time == 6)
            steps.append((state, action, reward.astype(np.float32), reached, terminated, done))
            state, time = np.where(done, rng.choice(states, 16), reached), np.where(done, 0, time)
        *taken, rewards, reached, terminated, done = (
            torch.from_numpy(np.stack(x)) for x in zip(*steps, strict=True)
        )
        with torch.no_grad():
            next_values = table[reached].amax(-1)
        targets = pqn.q_lambda_returns(rewards, next_values, terminated, done, gamma, lam)
        observations, actions = (x.flatten() for x in taken)
        optimizer.zero_grad()
        pqn.td_loss(table[observations], actions, targets.flatten()).backward()
        optimizer.step()
    q_values, inner = table.detach().numpy(), np.setdiff1d(np.arange(16), [3, 15])
    best = q_values.argmax(1)[inner]
    np.testing.assert_allclose(optimum[inner, best], optimum[inner].max(1), atol=1e-9)  # all are best actions
    np.testing.assert_allclose(q_values[inner].max(1), optimum[inner].max(1), atol=close)
    if lam == 0:
        np.testing.assert_allclose(q_values[inner], optimum[inner], atol=close)


def plain_q_values(agent, obs: Tensor) -> Tensor:
    """The network of Mnih et al. 2015 with layers and their normalisation written out."""
    x = obs.to(agent.critic.weight.dtype) / 255
    for layer, norm, stride in zip(agent.layers, agent.norms, (4, 2, 1, 1), strict=True):
        weight = layer.weight
        if layer is agent.hidden:
            weight = weight.unflatten(1, (7, 7, 64)).permute(0, 3, 1, 2)
        x = F.conv2d(x, weight, layer.bias, stride)
        mean = x.mean((1, 2, 3), keepdim=True)
        x = (x - mean) / ((x - mean).square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        x = (x * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).clamp(min=0)
    return x.flatten(1) @ agent.critic.weight.T + agent.critic.bias


def test_loss_and_gradient_are_those_of_a_plain_writing(pqn):
    torch.manual_seed(0)
    agent = pqn.AtariQNetwork(6, False)
    for parameter in (*agent.norms.parameters(), agent.critic.weight):
        parameter.data += 0.3 * torch.randn_like(parameter)
    obs = torch.randint(256, (16, 4, 84, 84), dtype=torch.uint8)
    actions, targets = torch.randint(6, (16,)), torch.randn(16)
    loss = pqn.td_loss(agent(obs), actions, targets)
    loss.backward()
    gradients = {name: parameter.grad.double() for name, parameter in agent.named_parameters()}
    assert len(gradients) == 2 * (4 + 4 + 1)

    agent.zero_grad()
    q_values = plain_q_values(agent.double(), obs)
    errors = [q_values[i, actions[i]] - targets[i] for i in range(16)]
    expected = sum(error**2 for error in errors) / 16
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in agent.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4 * scale, rtol=1e-3)


def test_loss_touches_the_taken_action_alone(pqn):
    q_values = torch.randn(16, 5, dtype=torch.float64, requires_grad=True)
    actions, targets = torch.randint(5, (16,)), torch.randn(16, dtype=torch.float64)
    pqn.td_loss(q_values, actions, targets).backward()
    taken = F.one_hot(actions, 5)
    torch.testing.assert_close(q_values.grad, 2 / 16 * taken * (q_values.detach() - targets[:, None]))


def test_first_action_values_hardly_differ(pqn):
    torch.manual_seed(0)
    agent = pqn.make_agent(pqn.Args(), SimpleNamespace(single_action_space=gym.spaces.Discrete(5)))
    q_values = agent(torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8))
    assert 0 < q_values.abs().max() < 0.5
    torch.testing.assert_close(
        agent.critic.weight @ agent.critic.weight.T, 1e-4 * torch.eye(5), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
def test_actions_are_epsilon_greedy(pqn, epsilon):
    """In each game apart from the others."""
    q_values, count = torch.tensor([[0.0, 1.0, 2.0], [3.0, -1.0, 0.0]]), 20_000
    rng = torch.Generator().manual_seed(0)
    samples = torch.stack([pqn.explore(q_values, epsilon, rng) for _ in range(count)])
    marginals = torch.full((2, 3), epsilon / 3)
    marginals[[0, 1], [2, 0]] += 1 - epsilon
    joint = (marginals[0, :, None] * marginals[1]).flatten()
    frequencies = torch.bincount(3 * samples[:, 0] + samples[:, 1], minlength=9) / count
    assert ((frequencies - joint).abs() <= 4 * (joint * (1 - joint) / count).sqrt()).all()


@pytest.mark.parametrize("greedy", [False, True])
def test_evaluation_is_greedy_but_for_the_last_epsilon(pqn, greedy):
    class Agent(torch.nn.Module):
        critic = torch.nn.Linear(1, 4)

        def forward(self, obs: Tensor) -> Tensor:
            return F.one_hot(obs.long(), 4).float()

    act = pqn.make_policy(pqn.Args(greedy=greedy, end_e=0.2), Agent(), gym.spaces.Discrete(4))
    best, rng = np.arange(10_000) % 4, np.random.default_rng(0)
    actions = act(best.astype(np.uint8), rng)
    table = np.histogram2d(best, actions, bins=[range(5)] * 2)[0] / 2500
    expected = np.eye(4) if greedy else 0.8 * np.eye(4) + 0.05
    np.testing.assert_allclose(table, expected, atol=0 if greedy else 0.025)


def test_every_transition_is_learned_from_once_in_each_epoch(pqn, train, monkeypatch):
    """As it was seen, with signs of rewards, ends by a lost life too, values of what was cut off."""
    histories = games(pqn, monkeypatch)
    passes = record(monkeypatch, pqn.AtariQNetwork, "forward")
    explored, targets_of, losses = (
        record(monkeypatch, pqn, name) for name in ("explore", "q_lambda_returns", "td_loss")
    )
    logged = train(total_timesteps=6 * ROLLOUT, gamma=0.9, q_lambda=0.8, end_e=0.5)
    history = histories[0]
    actions, obs, rewards, terminated, truncated, infos = (list(x) for x in zip(*history[1:], strict=True))
    observations, done = [history[0][1], *obs], np.array(terminated) | truncated
    assert len(actions) == 6 * NUM_STEPS
    assert np.max(rewards) > 1
    assert np.any(terminated)
    assert np.any(truncated)

    passes, explored, losses = iter(passes), iter(explored), iter(losses)
    predictions, all_targets, errors = [], [], []
    for update, (arguments, targets) in enumerate(targets_of):
        first = update * NUM_STEPS
        rows = slice(first, first + NUM_STEPS)
        values, bootstraps = [], np.zeros((NUM_STEPS, NUM_ENVS), np.float32)
        for step in range(first, first + NUM_STEPS):
            (_, seen), q_values = next(passes)
            np.testing.assert_array_equal(seen, observations[step])
            (chosen_from, _, _), chosen = next(explored)
            np.testing.assert_array_equal(chosen_from, q_values)
            np.testing.assert_array_equal(chosen, actions[step])
            values.append(q_values.amax(-1).numpy())
            predictions += q_values.numpy()[range(NUM_ENVS), actions[step]].tolist()
            if (cut_off := truncated[step]).any():
                (_, seen), q_values = next(passes)
                np.testing.assert_array_equal(seen, infos[step]["final_obs"][cut_off])
                bootstraps[step - first, cut_off] = q_values.amax(-1)
        (_, seen), q_values = next(passes)
        np.testing.assert_array_equal(seen, observations[first + NUM_STEPS])
        next_values = np.where(done[rows], bootstraps, [*values[1:], q_values.amax(-1).numpy()])
        facts = np.sign(rewards[rows]), next_values, terminated[rows], done[rows]
        for x, y in zip(arguments, (*facts, 0.9, 0.8), strict=True):
            np.testing.assert_array_equal(x, y)

        all_targets += targets.flatten().tolist()
        columns = (np.concatenate(x) for x in (observations[rows], actions[rows]))
        keys, orders = row_keys(*columns, targets.flatten().numpy()), []
        for _ in range(2):
            orders.append([])
            for _ in range(4):
                (q_values, taken, aims), loss = next(losses)
                (_, seen), outputs = next(passes)
                assert seen.dtype == torch.uint8
                assert len(seen) == ROLLOUT / 4
                np.testing.assert_array_equal(q_values, outputs)
                orders[-1] += row_keys(seen, taken, aims)
                errors.append(loss.item())
            assert Counter(orders[-1]) == Counter(keys)
        assert len({tuple(order) for order in [keys, *orders]}) == 3
    assert next(passes, None) is next(explored, None) is next(losses, None) is None
    for tag, x in (("values/predictions", predictions), ("values/targets", all_targets)):
        assert logged[tag] == [(6 * ROLLOUT, pytest.approx(np.mean(x), rel=1e-4, abs=1e-6))]
    assert logged["losses/td_loss"] == [(6 * ROLLOUT, pytest.approx(np.mean(errors), rel=1e-4))]


def test_radam_is_that_of_pytorch(pqn):
    """Resumed, too."""
    torch.manual_seed(0)
    own, other = (torch.zeros(1000, requires_grad=True) for _ in range(2))
    optimizer, expected = pqn.RAdam([own]), torch.optim.RAdam([other])
    for update in range(1, 3001):
        own.grad = other.grad = torch.randn(1000) * 10 ** (update % 3 - 3)
        for radam in (optimizer, expected):
            radam.param_groups[0]["lr"] = 1e-3 / update**0.5
            radam.step()
        if update in (3, 300):
            optimizer, saved = pqn.RAdam([own]), optimizer.state_dict()
            optimizer.load_state_dict(saved)
        if update in (1, 2, 5, 6, 7, 30, 300, 3000):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("anneal", [False, True])
def test_radam_steps_along_a_gradient_of_limited_norm(pqn, train, monkeypatch, anneal):
    rates, norms = [], []

    class RAdam(pqn.RAdam):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            gradients = [p.grad.flatten() for p in self.param_groups[0]["params"]]
            norms.append(torch.cat(gradients).norm().item())
            super().step()

    monkeypatch.setattr(pqn, "RAdam", RAdam)
    settings = {"num_steps": 5, "num_minibatches": 1, "total_timesteps": 60, "checkpoint_interval": 15}
    logged = train(**settings, anneal_lr=anneal, max_grad_norm=1e-4)
    left = np.array([1, 0.75, 0.5, 0.25] if anneal else [1] * 4)
    assert rates == pytest.approx(2.5e-4 * left.repeat(2))
    assert [value for _, value in logged["charts/learning_rate"]] == pytest.approx(2.5e-4 * left)
    assert norms == pytest.approx([1e-4] * 8, rel=1e-2)
    assert min(value for _, value in logged["losses/grad_norm"]) > 1e-4


def test_schedule_of_epsilon_survives_a_resume(pqn, train, monkeypatch):
    """It is that of the run's steps, wherever the process began."""
    settings = {"num_steps": 5, "num_minibatches": 1, "total_timesteps": 180, "checkpoint_interval": 60}
    settings |= {"start_e": 0.9, "end_e": 0.1, "exploration_fraction": 2 / 3}
    explored = record(monkeypatch, pqn, "explore")
    expected = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]  # of rollouts of 15 steps

    def epsilons() -> list[float]:
        used = [epsilon for (_, epsilon, _), _ in explored]
        explored.clear()
        return used

    logged = train(**settings, run_dir=Path("whole"))
    assert epsilons() == pytest.approx(np.repeat(expected, 5))
    assert [value for _, value in logged["charts/epsilon"]] == pytest.approx(
        [np.mean(expected[start : start + 4]) for start in (0, 4, 8)]
    )

    loss, calls = pqn.td_loss, iter(range(1000))

    def stop(*args):
        if next(calls) == 12:
            raise KeyboardInterrupt
        return loss(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pqn, "td_loss", stop)
        with pytest.raises(KeyboardInterrupt):
            train(**settings)
    assert epsilons() == pytest.approx(np.repeat(expected[:7], 5))
    time.sleep(1)  # TensorBoard orders files by the second in which they were begun
    assert train(**settings, run_dir=None, resume=Path("run"))["charts/epsilon"] == logged["charts/epsilon"]
    assert epsilons() == pytest.approx(np.repeat(expected[4:], 5))


def test_epsilon_falls_once(pqn):
    args = pqn.Args(total_timesteps=1000)
    falls = [pqn.exploration(step, args) for step in (0, 50, 100, 500, 1000)]
    assert falls == pytest.approx([1, 0.505, 0.01, 0.01, 0.01])
    assert pqn.exploration(0, pqn.Args(exploration_fraction=0)) == 0.01


def test_minibatches_must_be_equal(train, capfd):
    with pytest.raises(SystemExit) as stopped:
        train(num_steps=20, num_minibatches=7)
    assert stopped.value.code == 2
    assert re.fullmatch(r"error: .*60 .*7 .*\n", capfd.readouterr().err)
    assert not Path("run").exists()
