"""sac_continuous.py: its losses and their gradients, its replay buffer, and what a run must be."""

import copy
import dataclasses
import inspect
import math
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import KILLER, assert_same, contents, flags, load_script, run_python, run_script, scalars
from gymnasium.spaces import Box
from scipy.stats import chisquare, kstest
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger
from test_episodes import Ledger  # that file registers Clock as well
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_map

# Hopper's random policy ends an episode every 20 steps or so. The buffer is full after 90 steps.
SHORT_RUN = {
    "env_id": "Hopper-v4",
    "total_timesteps": 300,
    "num_envs": 2,
    "buffer_size": 90,
    "learning_starts": 40,
    "batch_size": 16,
    "policy_lr": 1e-3,
    "q_lr": 3e-3,
    "tau": 0.1,
    "hidden_size": 16,
    "device": "cpu",
    "eval_interval": 120,
    "eval_episodes": 2,
    "greedy": False,
    "checkpoint_interval": 50,
}
LEDGER = {"env_id": "PlainRL/ScaledLedger-v0", "buffer_size": 1000, "eval_interval": 0}


class ScaledLedger(Ledger):
    action_space = Box(np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32))


class UnboundedLedger(Ledger):
    action_space = Box(-np.inf, np.inf, (2,))


class SquareLedger(Ledger):
    observation_space = Box(-1, 1, (2, 2))


gym.register("PlainRL/ScaledLedger-v0", ScaledLedger)
gym.register("PlainRL/UnboundedLedger-v0", UnboundedLedger)
gym.register("PlainRL/SquareLedger-v0", SquareLedger)


@pytest.fixture(scope="session")
def sac() -> ModuleType:
    return load_script("sac_continuous")


@pytest.fixture
def train(sac, tmp_path, monkeypatch):
    """Trains in this process, in a new run folder of tmp_path; returns the checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(run_dir: str = "run", **settings) -> dict:
        sac.train(sac.Args(**(SHORT_RUN | settings | {"run_dir": Path(run_dir)})))
        return torch.load(Path(run_dir, "checkpoint.pt"))

    return run


@pytest.fixture
def main(sac, monkeypatch):
    """The script's command line, in this process."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["sac_continuous.py", *arguments])
        sac.main()

    return run


@pytest.fixture
def spy(sac, monkeypatch):
    """Records calls of functions of the script, in order: what they got, as it was then, and returned."""

    def snapshot(values: object) -> object:
        return tree_map(lambda x: x.detach().clone() if torch.is_tensor(x) else copy.deepcopy(x), values)

    def record(*names: str) -> list[dict]:
        calls = []

        def watch(name: str, function: Callable) -> None:
            def wrapper(*args):
                arguments = dict(inspect.signature(function).bind(*args).arguments)
                calls.append(call := {"name": name} | snapshot(arguments))
                result = function(*args)
                call["result"] = snapshot(result)
                return result

            monkeypatch.setattr(sac, name, wrapper)

        for name in names:
            watch(name, getattr(sac, name))
        return calls

    return record


@pytest.fixture
def double(monkeypatch):
    """Everything in float64: what the networks turn into float32, too."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def flat(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach()


def join(gradient: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in gradient])


def row_files(run_dir: str | Path) -> dict[int, Tensor]:
    """Rows of the replay buffer by file: of each the number of all rows added up to its end."""
    files = {int(path.stem.removeprefix("rows_")): path for path in Path(run_dir).glob("rows_*.pt")}
    return {end: torch.load(path)["rows"] for end, path in sorted(files.items())}


def test_log_probability_agrees_with_torch_distributions_and_with_the_change_of_variables(sac):
    """By the latter the density is that of the noise over the slope of the action along the noise."""
    torch.manual_seed(0)
    mean, log_std, noise = 0.6 * torch.randn(3, 50, 4).double()
    actions, log_probs = sac.squash(mean, log_std, noise)
    policy = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
    torch.testing.assert_close(actions, policy.transforms[0](mean + log_std.exp() * noise))
    torch.testing.assert_close(log_probs, policy.log_prob(actions).sum(-1))
    ahead, behind = (sac.squash(mean, log_std, noise + step)[0] for step in (1e-5, -1e-5))
    expected = (Normal(0, 1).log_prob(noise) - ((ahead - behind) / 2e-5).log()).sum(-1)
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=0)


def test_log_probability_is_stable_where_the_action_rounds_to_1(sac):
    u = torch.linspace(-20, 20, 401)[:, None].requires_grad_()
    actions, log_probs = sac.squash(u, torch.zeros_like(u), torch.zeros_like(u))
    exact = u.detach().double()
    assert actions.abs().max() == 1
    expected = 2 * exact.cosh().log() - math.log(2 * math.pi) / 2
    torch.testing.assert_close(log_probs.double(), expected[:, 0], atol=1e-6, rtol=1e-6)
    [slope] = torch.autograd.grad(log_probs.sum(), u)
    torch.testing.assert_close(slope.double(), 2 * exact.tanh(), atol=1e-6, rtol=1e-6)


def random_problem(sac, dtype=torch.float64, hidden_size: int = 5, size: int = 40) -> dict:
    """What the two gradients take, at random, with 3 observations and 2 actions; noise for each of them."""
    torch.manual_seed(0)
    actor = sac.SquashedGaussianActor(3, 2, hidden_size).to(dtype)
    critics, target = (sac.TwinCritics(3, 2, hidden_size).to(dtype) for _ in range(2))
    for p in [*actor.parameters(), *critics.parameters(), *target.parameters()]:
        p.data += 0.2 * torch.randn_like(p)
    (obs, next_obs), (rewards, ends) = torch.randn(2, size, 3, dtype=dtype), torch.randn(2, size, dtype=dtype)
    actions = torch.rand(size, 2, dtype=dtype) * 2 - 1
    return {
        "actor": actor,
        "critics": critics,
        "target": target,
        "log_alpha": nn.Parameter(torch.tensor(-0.7, dtype=dtype), requires_grad=False),
        "batch": sac.Batch(obs, actions, next_obs, rewards, (ends > 0.5).to(dtype)),
        "noise": torch.randn(2, size, 2, dtype=dtype),
    }


def gradients(sac, actor, critics, target, log_alpha, batch, noise, bf16: bool = False) -> tuple:
    """What critic_gradient and actor_gradient return, flat, log_alpha's gradient apart."""
    args, networks = sac.Args(gamma=0.9, bf16=bf16), sac.Networks(actor, critics, target, log_alpha)
    gradient, scalars = sac.critic_gradient(networks, batch, noise[0], args)
    (*of_actor, of_log_alpha), actor_scalars = sac.actor_gradient(networks, batch.obs, noise[1], args)
    return (join(gradient), scalars), (join(of_actor), of_log_alpha, actor_scalars)


def reference_losses(actor, critics, target, log_alpha, batch, noise) -> list[Tensor]:
    """The paper's three losses, Q1, Q2, y and log pi, each (batch,), one transition at a time."""

    def act(obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor.network(obs)[:2], actor.network(obs)[2:]
        u = mean + log_std.exp() * noise
        density = Normal(mean, log_std.exp()).log_prob(u).exp() / (1 - u.tanh() ** 2)
        return u.tanh(), density.prod().log()

    def q(critics: nn.Module, obs: Tensor, action: Tensor) -> list[Tensor]:
        return [network(torch.cat([obs, action]))[0] for network in (critics.q1, critics.q2)]

    alpha, rows = log_alpha.exp().detach(), []
    for obs, action, next_obs, y, terminated, noise1, noise2 in zip(*batch, *noise, strict=True):
        if not terminated:
            next_action, log_prob = act(next_obs, noise1)
            y = y + 0.9 * (min(q(target, next_obs, next_action)) - alpha * log_prob).detach()
        q1, q2 = q(critics, obs, action)
        new_action, log_prob = act(obs, noise2)
        actor_loss = alpha * log_prob - min(q(critics, obs, new_action))
        alpha_loss = -log_alpha * (log_prob.detach() - 2)
        rows.append((((q1 - y) ** 2 + (q2 - y) ** 2) / 2, actor_loss, alpha_loss, q1, q2, y, log_prob))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def test_losses_and_gradients_are_the_paper_s(sac, double):
    problem = random_problem(sac)
    (critic_gradient, critic), (actor_gradient, alpha_gradient, actor) = gradients(sac, **problem)
    leaves = [list(problem[name].parameters()) for name in ("actor", "critics", "target")]
    assert all(p.grad is None for p in sum(leaves, [problem["log_alpha"]]))
    log_alpha = problem["log_alpha"].requires_grad_()
    *losses, q1, q2, y, log_probs = reference_losses(**problem)
    critic_loss, actor_loss, alpha_loss = (loss.mean() for loss in losses)
    expected = {"losses/qf_loss": critic_loss, "losses/qf1_values": q1.mean(), "losses/qf2_values": q2.mean()}
    expected |= {"values/predictions": q1, "values/targets": y, "losses/grad_norm": critic_gradient.norm()}
    torch.testing.assert_close(critic, {tag: x.detach() for tag, x in expected.items()})
    expected = {"losses/actor_loss": actor_loss, "losses/entropy": -log_probs.mean()}
    expected |= {"losses/alpha": log_alpha.exp(), "losses/alpha_loss": alpha_loss}
    torch.testing.assert_close(actor, {tag: x.detach() for tag, x in expected.items()})
    for gradient, loss, parameters in (
        (critic_gradient, critic_loss, leaves[1]),
        (actor_gradient, actor_loss, leaves[0]),
        (alpha_gradient[None], alpha_loss, [log_alpha]),
    ):
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        torch.testing.assert_close(gradient, torch.cat([x.flatten() for x in expected]))


@pytest.mark.parametrize(("which", "name", "tag"), [(0, "critics", "qf_loss"), (1, "actor", "actor_loss")])
def test_gradient_agrees_with_finite_differences(sac, double, which, name, tag):
    problem = random_problem(sac)
    parameters = flat(problem[name])
    gradient, differences = gradients(sac, **problem)[which][0], torch.empty_like(parameters)

    def loss(i: int, step: float) -> Tensor:
        moved = parameters.clone()
        moved[i] += step
        vector_to_parameters(moved, problem[name].parameters())
        return gradients(sac, **problem)[which][-1][f"losses/{tag}"]

    for i in range(len(parameters)):
        differences[i] = (loss(i, 1e-6) - loss(i, -1e-6)) / 2e-6
    torch.testing.assert_close(gradient, differences, atol=1e-7, rtol=1e-5)


def test_losses_and_gradients_agree_with_stable_baselines3(sac, monkeypatch):
    """One update of SB3's SAC at learning rate 0, with our weights and noise, leaves its gradients behind."""
    problem = random_problem(sac, torch.float32, hidden_size=16)
    settings = {"learning_rate": 0.0, "gamma": 0.9, "ent_coef": f"auto_{math.exp(-0.7)}", "device": "cpu"}
    settings |= {"buffer_size": 40, "policy_kwargs": {"net_arch": [16, 16]}}
    model = SAC("MlpPolicy", gym.make("PlainRL/ScaledLedger-v0"), **settings)
    model.set_logger(Logger(None, []))
    actor, ours = model.actor, problem["actor"].network
    actor.action_dist.epsilon = 0.0  # it keeps the logarithm of 0 finite, and makes the others inexact
    layers = [(actor.latent_pi[i], ours[i].weight, ours[i].bias) for i in (0, 2)]
    layers += [(actor.mu, ours[4].weight[:2], ours[4].bias[:2])]
    layers += [(actor.log_std, ours[4].weight[2:], ours[4].bias[2:])]
    for name, critics in (("critics", model.critic), ("target", model.critic_target)):
        for mine, theirs in ((problem[name].q1, critics.qf0), (problem[name].q2, critics.qf1)):
            layers += [(theirs[i], mine[i].weight, mine[i].bias) for i in (0, 2, 4)]
    for layer, weight, bias in layers:
        layer.load_state_dict({"weight": weight, "bias": bias})
    transitions = zip(*map(Tensor.numpy, problem["batch"]), strict=True)
    for i, (obs, action, next_obs, reward, terminated) in enumerate(transitions):
        truncated = i % 3 == 0 and not terminated  # to SB3 both are an end, but for what the info says
        infos = [{"TimeLimit.truncated": truncated}]
        model.replay_buffer.add(obs, next_obs, action, reward, bool(terminated) or truncated, infos)
    batch = model.replay_buffer._get_samples(np.arange(40))
    monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, **__: batch)
    noise = iter(problem["noise"].flip(0))  # SB3 draws at s before it draws at s'
    monkeypatch.setattr(Normal, "rsample", lambda self, shape=(): self.loc + self.scale * next(noise))
    critic_gradients, critic_parameters = [], list(model.critic.parameters())

    def look() -> None:  # before the actor's loss adds to them
        critic_gradients.extend(p.grad.flatten().clone() for p in critic_parameters)

    monkeypatch.setattr(model.critic.optimizer, "step", look)
    model.train(gradient_steps=1, batch_size=40)

    (critic_gradient, critic), (actor_gradient, alpha_gradient, other) = gradients(sac, **problem)
    for name, value in (("critic", critic["losses/qf_loss"]), ("actor", other["losses/actor_loss"])):
        assert model.logger.name_to_value[f"train/{name}_loss"] == pytest.approx(value.item(), abs=1e-5)
    alpha_loss = model.logger.name_to_value["train/ent_coef_loss"]
    assert alpha_loss == pytest.approx(other["losses/alpha_loss"].item(), abs=1e-5)
    actor_gradients = [p.grad for p in actor.latent_pi.parameters()]
    actor_gradients += [torch.cat([actor.mu.weight.grad, actor.log_std.weight.grad])]
    actor_gradients += [torch.cat([actor.mu.bias.grad, actor.log_std.bias.grad])]
    for gradient, expected in (
        (critic_gradient, critic_gradients),
        (actor_gradient, actor_gradients),
        (alpha_gradient, [model.log_ent_coef.grad]),
    ):
        expected = torch.cat([x.flatten() for x in expected])
        torch.testing.assert_close(gradient.reshape(-1), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_close_to_float32(sac):
    problem = random_problem(sac, torch.float32, hidden_size=64, size=256)
    exact, rounded = (gradients(sac, **problem, bf16=bf16) for bf16 in (False, True))
    for (gradient, *_, logged), (close, *_, also_logged) in zip(exact, rounded, strict=True):
        assert close.dtype == torch.float32
        assert 0 < (close - gradient).norm() < 0.03 * gradient.norm()
        torch.testing.assert_close(also_logged, logged, atol=0.05, rtol=0.03)


def test_policy_acts_within_the_box(sac):
    torch.manual_seed(0)
    agent, space = sac.SquashedGaussianActor(3, 2, 16), ScaledLedger.action_space
    obs = np.tile(np.random.default_rng(0).normal(size=3), (20_000, 1))
    mean, log_std = (x.detach().numpy() for x in agent(torch.from_numpy(obs[0]).float()))
    greedy, sampled = (
        (sac.make_policy(sac.Args(greedy=x), agent, space)(obs, np.random.default_rng(1)) - [1, 0.25])
        / [2, 0.25]
        for x in (True, False)
    )
    np.testing.assert_allclose(greedy, np.tile(np.tanh(mean), (20_000, 1)), atol=1e-6)
    u = np.arctanh(sampled)
    np.testing.assert_allclose(u.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(u.std(0), np.exp(log_std), rtol=0.03)
    agent.network[4].bias.data[2:] = torch.tensor([-99, 99])
    assert agent(torch.zeros(3))[1].tolist() == [-20, 2]


@pytest.mark.parametrize(("policy_frequency", "target_frequency", "autotune"), [(1, 1, True), (2, 3, False)])
def test_update_follows_its_gradients(train, spy, policy_frequency, target_frequency, autotune):
    """Adam's steps and the target critics' moves, done again from the first weights."""
    calls = spy("critic_gradient", "actor_gradient")
    settings = {"policy_frequency": policy_frequency, "target_network_frequency": target_frequency}
    settings |= {"autotune": autotune, "alpha": 0.3, "num_envs": 1, "total_timesteps": 53}
    checkpoint = train(**LEDGER, **settings)
    actor, critics, target = map(flat, calls[0]["networks"][:3])
    assert torch.equal(critics, target)
    log_alpha = torch.tensor(0.0 if autotune else math.log(0.3))
    critic_optimizer = torch.optim.Adam([critics], lr=3e-3)
    actor_optimizer = torch.optim.Adam([actor, log_alpha], lr=1e-3)

    def check(call: dict) -> None:
        *networks, ours = call["networks"]
        for network, x in zip(networks, (actor, critics, target), strict=True):
            torch.testing.assert_close(flat(network), x, atol=1e-6, rtol=0)
        torch.testing.assert_close(ours, log_alpha, atol=1e-6, rtol=0)

    remaining = iter(calls)
    for update in range(13):
        check(call := next(remaining))
        critics.grad = join(call["result"][0])
        critic_optimizer.step()
        for _ in range(policy_frequency if update % policy_frequency == 0 else 0):
            check(actor_call := next(remaining))
            assert torch.equal(actor_call["obs"], call["batch"].obs)
            *gradient, alpha_gradient = actor_call["result"][0]
            actor.grad = join(gradient)
            log_alpha.grad = alpha_gradient if autotune else None
            actor_optimizer.step()
        if update % target_frequency == 0:
            target += 0.1 * (critics - target)
    assert next(remaining, None) is None
    for name, x in (("agent", actor), ("critics", critics), ("target_critics", target)):
        saved = torch.cat([y.flatten() for y in checkpoint[name].values()])
        torch.testing.assert_close(saved, x, atol=1e-6, rtol=0)
    torch.testing.assert_close(checkpoint["temperature"]["log_alpha"], log_alpha, atol=1e-6, rtol=0)
    noise = torch.cat([call["noise"].flatten() for call in calls])
    assert len(noise.unique()) > 0.99 * len(noise)
    assert (noise.mean().item(), noise.std().item()) == pytest.approx((0, 1), abs=0.1)


@pytest.mark.parametrize("utd", [0.5, 1.0, 2.0])
def test_every_transition_is_stored_once_and_learned_from_as_often_as_asked(train, spy, utd):
    """With 3 environments, across the resets of a checkpoint."""
    calls = spy("squash", "critic_gradient")
    Ledger.ledgers, num_envs = (), 3
    settings = {"num_envs": 3, "total_timesteps": 150, "learning_starts": 60, "checkpoint_interval": 90}
    checkpoint = train(**LEDGER, **settings, utd=utd)
    ledgers = [ledger for ledger in Ledger.ledgers if ledger]
    assert [len(ledger) for ledger in ledgers] == [50] * num_envs
    before, taken, rewards, after, terminated, truncated = (
        np.stack([[step[part] for step in ledger] for ledger in ledgers], axis=1) for part in range(6)
    )  # (50, num_envs, ...)
    assert set(np.unique(2 * terminated + truncated)) == {0, 1, 2, 3}
    files = row_files("run")
    assert [(end, len(rows)) for end, rows in files.items()] == [(90, 90), (150, 60)]
    rows = torch.cat(list(files.values())).unflatten(0, (50, num_envs))
    obs, actions, next_obs, *numbers = rows.split((3, 2, 3, 1, 1), dim=2)
    np.testing.assert_array_equal(obs, before)
    np.testing.assert_array_equal(next_obs, after)
    np.testing.assert_array_equal(torch.cat(numbers, dim=2), np.stack([rewards, terminated], 2).astype("f4"))
    np.testing.assert_allclose(taken, [1, 0.25] + actions.numpy() * [2, 0.25], atol=1e-6)
    episodes, first = [], np.zeros(num_envs, int)
    for t, env in np.ndindex(50, num_envs):
        if terminated[t, env] or truncated[t, env]:
            episodes.append((rewards[first[env] : t + 1, env].sum(), t + 1 - first[env]))
            first[env] = t + 1
        elif t == 29:  # the checkpoint's reset cuts it short
            first[env] = t + 1
    np.testing.assert_allclose(checkpoint["recent"], episodes)

    step, updates, batches, noise, acting = 20, np.zeros(50), [], [], None
    for call in calls:
        if call["name"] == "squash" and len(call["noise"]) == num_envs:
            acting, step = call, step + 1
            assert torch.equal(acting["result"][0], actions[step - 1])
            noise.append(acting["noise"])
        elif call["name"] == "critic_gradient":
            updates[step - 1] += 1
            batches.append(torch.cat([x.reshape(len(x), -1) for x in call["batch"]], dim=1))
            assert (batches[-1][:, None] == rows[:step].flatten(0, 1)).all(-1).any(1).all()
            if acting:  # the first update after the step, so that this is the policy that acted
                policy = call["networks"].actor(torch.from_numpy(before[step - 1]))
                torch.testing.assert_close(policy, (acting["mean"], acting["log_std"]))
            acting = None
    assert torch.stack(noise).std(0).mean().item() == pytest.approx(1, abs=0.15)
    assert len(torch.stack(batches).unique(dim=0)) == len(batches)
    np.testing.assert_array_equal(updates.cumsum(), (utd * (3 * np.arange(1, 51) - 60)).clip(0) // 1)


def test_first_actions_are_uniform_over_the_box(train):
    Ledger.ledgers = ()
    train(**LEDGER, num_envs=3, total_timesteps=3000, learning_starts=3000, checkpoint_interval=1000)
    actions = np.concatenate([[step[1] for step in ledger] for ledger in Ledger.ledgers if ledger])
    assert len(actions) == 3000
    for low, width, column in zip((-1, 0), (4, 0.5), actions.T, strict=True):
        assert kstest(column, "uniform", (low, width)).pvalue > 0.01


@pytest.mark.parametrize("terminates", [False, True])
def test_value_of_a_state_depends_on_how_episodes_end(sac, train, terminates):
    """With gamma 0.9 an endless stream of rewards of 1 is worth 10, wherever time limits cut it."""
    settings = {"num_envs": 1, "total_timesteps": 560, "learning_starts": 500, "utd": 8, "gamma": 0.9}
    settings |= {"autotune": False, "alpha": 1e-6, "hidden_size": 32, "batch_size": 32, "buffer_size": 1000}
    settings |= {"eval_interval": 0, "checkpoint_interval": 9999}
    env_id = f"PlainRL/{'Terminating' if terminates else 'Truncating'}Clock-v0"
    checkpoint = train(env_id=env_id, **settings)
    critics = sac.TwinCritics(4, 1, 32)
    critics.load_state_dict(checkpoint["critics"])
    expected = [(1 - 0.9**steps) / 0.1 if terminates else 10 for steps in (4, 3, 2, 1)]
    for action in (-0.9, 0.0, 0.9):
        for values in critics(torch.eye(4), torch.full((4, 1), action)):
            np.testing.assert_allclose(values.detach(), expected, rtol=0.05)


def add_rows(buffer, count: int, num_envs: int = 1) -> None:
    """Add transitions in which every number is that of the row, counted from 1."""
    for first in range(buffer.added + 1, buffer.added + count + 1, num_envs):
        number = np.arange(first, first + num_envs)
        wide = np.repeat(number[:, None], 2, axis=1)
        buffer.add(wide, number[:, None], wide, number, number)


def test_buffer_holds_the_last_transitions_and_samples_them_uniformly(sac):
    buffer, rng = sac.ReplayBuffer(10, 2, 1, torch.device("cpu")), torch.Generator().manual_seed(0)
    for total, held in ((6, range(1, 7)), (15, range(6, 16)), (27, range(18, 28))):
        add_rows(buffer, total - buffer.added, num_envs=3)
        batch = buffer.sample(5000, rng)
        assert [x.shape[1:] for x in batch] == [(2,), (1,), (2,), (), ()]
        assert all((x.reshape(5000, -1) == batch.rewards[:, None]).all() for x in batch)
        counts = np.bincount(batch.rewards.int(), minlength=total + 1)
        assert counts.nonzero()[0].tolist() == list(held)
        assert chisquare(counts[list(held)]).pvalue > 0.01


def test_files_restore_the_buffer(sac, tmp_path):
    """Each holds the rows that were new; those of the checkpoint before are there until the next."""
    buffer = sac.ReplayBuffer(10, 2, 1, torch.device("cpu"))
    for count, total in ((4, 4), (0, 4), (5, 9), (3, 12), (10, 22), (26, 48), (1, 49)):
        before = set(buffer.files)
        add_rows(buffer, count)
        buffer.save(tmp_path)
        assert before <= row_files(tmp_path).keys() <= before | {total}
        if count:
            rows = row_files(tmp_path)[total]
            assert rows[:, 0].tolist() == list(range(total - min(count, 10) + 1, total + 1))
        restored = sac.ReplayBuffer(10, 2, 1, torch.device("cpu"))
        restored.load_state_dict(buffer.state_dict())
        restored.load(tmp_path)
        assert torch.equal(restored.rows, buffer.rows)
        assert restored.state_dict() == buffer.state_dict()


def test_same_seed_gives_the_same_bits_whatever_is_evaluated(train):
    settings = {"total_timesteps": 150, "checkpoint_interval": 100}
    often, never = (train(str(interval), **settings, eval_interval=interval) for interval in (20, 0))
    assert_same(often, never)
    other = train("other", **settings, eval_interval=0, seed=2)
    assert not torch.isclose(other["agent"]["network.0.weight"], never["agent"]["network.0.weight"]).all()


@pytest.mark.parametrize(("interval", "ends"), [(100, [500, 600, 700, 800]), (400, [400, 800])])
def test_checkpoint_writes_what_is_new_and_resuming_finds_the_buffer(train, main, interval, ends):
    """Intervals shorter and longer than the buffer; a file goes once no checkpoint in place needs it."""
    settings = {"buffer_size": 250, "learning_starts": 300, "utd": 0.1, "eval_interval": 0}
    settings |= {"checkpoint_interval": interval}
    train(**settings, total_timesteps=800)
    new, row_bytes = min(interval, 250), 4 * (11 + 3 + 11 + 1 + 1)
    assert {end: len(rows) for end, rows in row_files("run").items()} == dict.fromkeys(ends, new)
    for end in ends:
        assert Path(f"run/rows_{end}.pt").stat().st_size < new * row_bytes + 4000
    main("--resume", "run", "--total-timesteps", "1200")
    assert_same(torch.load("run/checkpoint.pt"), train("whole", **settings, total_timesteps=1200))
    assert_same(row_files("run"), row_files("whole"))


def test_killed_three_times_and_resumed_equals_uninterrupted(sac, train, tmp_path):
    """Killed in a random update, at an evaluation, and between a checkpoint's rows and the checkpoint itself.

    Updates begin at step 42, and from step 92 on the buffer overwrites its oldest rows.
    """
    reference = train("whole")
    moment, start = random.randrange(70, 190), [*flags(SHORT_RUN), "--run-dir", "killed"]
    for function, call in (("critic_gradient", moment), ("evaluate", 1), ("replace", 5)):
        killed = run_python("-c", KILLER, sac.__file__, function, call, *start, cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
        start = ["--resume", "killed"]
    assert 90 < torch.load("killed/checkpoint.pt")["buffer"]["added"] < max(row_files("killed"))
    # In a process of its own, too: TensorBoard sorts what was logged by the second in which a process began.
    done = run_script("sac_continuous", *start, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(torch.load("killed/checkpoint.pt"), reference)
    assert_same(torch.load("killed/model.pt"), torch.load("whole/model.pt"))
    assert_same(row_files("killed"), row_files("whole"))
    assert Path("killed/evaluations.csv").read_text() == Path("whole/evaluations.csv").read_text()
    ours, theirs = (scalars(Path(run_dir)) for run_dir in ("killed", "whole"))
    assert [step for step, _ in ours.pop("charts/SPS")] == [step for step, _ in theirs.pop("charts/SPS")]
    assert ours == theirs
    tags = "qf1_values qf2_values qf_loss actor_loss alpha alpha_loss entropy grad_norm explained_variance"
    assert {f"losses/{name}" for name in tags.split()} == {tag for tag in ours if tag.startswith("losses/")}
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_run_is_the_eager_one_up_to_rounding(sac, train, monkeypatch):
    settings = {"env_id": "Pendulum-v1", "total_timesteps": 80, "eval_interval": 0}
    eager, functions, compile_function = train("eager", **settings), [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: functions.append(f) or compile_function(f, **options)
    )
    compiled = train("compiled", **settings, compile=True)
    assert functions == [sac.critic_gradient, sac.actor_gradient]
    for part in ("agent", "critics", "target_critics", "temperature"):
        torch.testing.assert_close(compiled[part], eager[part], atol=1e-4, rtol=1e-4)


def test_learns_to_swing_the_pendulum_up(train):
    """A random policy returns -1,200 or so. Seeds 1 to 5 have ended between -136 and -175."""
    settings = {"total_timesteps": 3000, "learning_starts": 500, "gamma": 0.95, "tau": 0.02, "num_envs": 1}
    settings |= {"policy_lr": 2e-3, "q_lr": 2e-3, "hidden_size": 64, "batch_size": 64, "buffer_size": 5000}
    settings |= {"eval_interval": 3000, "eval_episodes": 10, "greedy": True, "checkpoint_interval": 5000}
    train(env_id="Pendulum-v1", **settings)
    rows = [row.split(",") for row in Path("run/evaluations.csv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == ["3000"] * 10
    assert np.mean([float(row[2]) for row in rows]) > -250


@pytest.fixture(scope="session")
def finished_run(sac, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    sac.train(sac.Args(**SHORT_RUN | {"env_id": "Pendulum-v1", "total_timesteps": 60}, run_dir=run_dir))
    return run_dir


@pytest.fixture
def refusal(main, finished_run, tmp_path, monkeypatch, capfd):
    """Runs the script beside a finished run; returns its one line of error."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "run")

    def run(*arguments: str) -> str:
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as stopped:
            main(*arguments)
        stderr = capfd.readouterr().err
        assert stopped.value.code == 2, stderr
        assert re.fullmatch("error: .+\n", stderr), stderr
        assert contents(tmp_path) == before
        return stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--env-id HalfCheeta-v4", "HalfCheetah"),
        ("--env-id CartPole-v1", "Discrete(2)"),
        ("--env-id FrozenLake-v1", "Discrete(16)"),
        ("--env-id PlainRL/UnboundedLedger-v0", "bounded"),
        ("--env-id PlainRL/SquareLedger-v0", "flat"),
        ("--tau 1.5", "--tau"),
        ("--gamma 1.001", "--gamma"),
        ("--no-autotune --alpha 0", "--alpha"),
        ("--run-dir run", "--resume run"),
        ("--resume nowhere", "nowhere"),
        ("--resume run --env-id Hopper-v4", "Pendulum-v1"),
        ("--evaluate run --env-id Hopper-v4", "Pendulum-v1"),
        ("--resume run --hidden-size 32", "network.0.weight"),
        ("--evaluate run --hidden-size 32", "network.0.weight"),
        ("--resume run --buffer-size 91", "not 91"),
    ],
)
def test_bad_input(refusal, arguments, hint):
    assert hint in refusal(*arguments.split())


def test_number_that_no_field_takes(sac, refusal):
    """Not a number or an infinity, 0 where that has no meaning, or -1 where whole numbers are counted."""
    positive = "num_envs buffer_size utd batch_size target_network_frequency policy_lr q_lr policy_frequency"
    for field in dataclasses.fields(sac.Args):
        kind, flag = str(field.type), f"--{field.name.replace('_', '-')}"
        values = ("nan", "inf", "-inf") if "float" in kind else ("-1",) if "int" in kind else ()
        for value in (*values, "0") if field.name in positive.split() else values:
            assert flag in refusal(flag, value)


DAMAGES = {"damaged": lambda path: path.write_bytes(b"half"), "missing": lambda path: path.unlink()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_that_are_damaged_or_missing(refusal, damage):
    """In a file that was overwritten in part, and in the last."""
    for path in (min(Path("run").glob("rows_*.pt")), max(Path("run").glob("rows_*.pt"))):
        content = path.read_bytes()
        DAMAGES[damage](path)
        assert "rows_" in refusal("--resume", "run")
        path.write_bytes(content)
