"""crossq_continuous.py: batch renormalisation, the losses and their gradients, and what a run must be.

What it shares with sac_continuous.py (replay buffer, squashing, soft target) is tested in test_sac.py.
"""

import copy
import dataclasses
import inspect
import math
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import KILLER, assert_same, contents, flags, load_script, run_python, run_script, scalars
from sb3_contrib import CrossQ
from sb3_contrib.common.torch_layers import BatchRenorm1d
from stable_baselines3.common.logger import Logger
from test_sac import LEDGER, Ledger  # that file registers environments as well
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils._pytree import tree_map

# Hopper's random policy ends an episode every 20 steps or so. The buffer is full after 90 steps.
SHORT_RUN = {
    "env_id": "Hopper-v4",
    "total_timesteps": 300,
    "num_envs": 2,
    "buffer_size": 90,
    "learning_starts": 40,
    "batch_size": 16,
    "critic_hidden_size": 16,
    "policy_hidden_size": 12,
    "device": "cpu",
    "eval_interval": 120,
    "eval_episodes": 2,
    "greedy": False,
    "checkpoint_interval": 50,
}
# In both phases of batch renormalisation: its statistics do not count yet, or they do.
each_phase = pytest.mark.parametrize("warmup", [100, 0], ids=["warm-up", "renormalised"])


@pytest.fixture(scope="session")
def crossq() -> ModuleType:
    return load_script("crossq_continuous")


@pytest.fixture
def train(crossq, tmp_path, monkeypatch):
    """Trains in this process, in a new run folder of tmp_path; returns the checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(run_dir: str = "run", **settings) -> dict:
        crossq.train(crossq.Args(**(SHORT_RUN | settings | {"run_dir": Path(run_dir)})))
        return torch.load(Path(run_dir, "checkpoint.pt"))

    return run


@pytest.fixture
def main(crossq, monkeypatch):
    """The script's command line, in this process."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["crossq_continuous.py", *map(str, arguments)])
        crossq.main()

    return run


@pytest.fixture
def spy(crossq, monkeypatch):
    """Records calls of functions of the script, in order: what they got, as it was then, and returned."""

    def snapshot(values: object) -> object:
        return tree_map(lambda x: x.detach().clone() if torch.is_tensor(x) else copy.deepcopy(x), values)

    def record(*names: str) -> list[dict]:
        calls = []

        def wrap(name: str):
            function = getattr(crossq, name)

            def wrapper(*args):
                arguments = dict(inspect.signature(function).bind(*args).arguments)
                calls.append(call := {"name": name} | snapshot(arguments))
                result = function(*args)
                call["result"] = snapshot(result)
                return result

            return wrapper

        for name in names:
            monkeypatch.setattr(crossq, name, wrap(name))
        return calls

    return record


@pytest.fixture
def double(monkeypatch):
    """Everything in float64: what the networks turn into float32, too."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def slow_renorm(column: Tensor, mean: float, var: float, warm: bool) -> tuple[Tensor, float, float, tuple]:
    """Ioffe's algorithm 1 for one feature: normalised, new running statistics, r and d unclipped."""
    batch_mean = sum(column) / len(column)
    batch_var = sum((x - batch_mean) ** 2 for x in column) / len(column)
    std, running_std = (batch_var + 1e-3).sqrt(), math.sqrt(var + 1e-3)
    r, d = std.item() / running_std, (batch_mean.item() - mean) / running_std
    clipped_r, clipped_d = (min(max(r, 1 / 3), 3), min(max(d, -5), 5)) if warm else (1, 0)
    normalized = (column - batch_mean) / std * clipped_r + clipped_d
    return normalized, mean + 0.01 * (batch_mean.item() - mean), var + 0.01 * (batch_var.item() - var), (r, d)


def test_renormalisation_is_ioffe_s(crossq, double, monkeypatch):
    """In warm-up and after it, with r and d within their bounds and beyond."""
    torch.manual_seed(0)
    monkeypatch.setattr(crossq.BatchRenorm, "warmup", 3)
    norm = crossq.BatchRenorm(5).double()
    norm.weight.data, norm.bias.data = torch.randn(2, 5).double()
    scale, shift = torch.tensor([[0.1, 1, 0.7, 20, 2], [0, 1, -2, 300, 0.5]]).double()
    mean, var, ratios = [0.0] * 5, [1.0] * 5, []
    for number in range(6):
        x = (scale * torch.randn(30, 5).double() + shift).requires_grad_()
        columns = []
        for i in range(5):
            normalized, mean[i], var[i], ratio = slow_renorm(x[:, i], mean[i], var[i], number >= 3)
            columns.append(normalized * norm.weight[i] + norm.bias[i])
            ratios.append(ratio)
        expected, output = torch.stack(columns, 1), norm(x, training=True)
        torch.testing.assert_close(output, expected)
        direction, leaves = torch.randn(30, 5).double(), (x, norm.weight, norm.bias)
        gradient, reference = (torch.autograd.grad((y * direction).sum(), leaves) for y in (output, expected))
        torch.testing.assert_close(gradient, reference)
        torch.testing.assert_close(norm.mean, torch.tensor(mean).double())
        torch.testing.assert_close(norm.var, torch.tensor(var).double())
    r, d = np.array(ratios[15:]).T
    for case in (r < 1 / 3, r > 3, (r > 1 / 3) & (r < 3), abs(d) > 5, abs(d) < 5):
        assert case.any()
    state, expected = copy.deepcopy(norm.state_dict()), (x - norm.mean) / (norm.var + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected * norm.weight + norm.bias)
    assert_same(norm.state_dict(), state)


@each_phase
def test_renormalisation_agrees_with_sb3_contrib(crossq, monkeypatch, warmup):
    """Its variance made that of n, not of n - 1; without epsilon, which it adds once more at the end.

    Its warm-up is one pass longer.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(Tensor, "var", lambda x, dim: torch.var(x, dim, correction=0))
    monkeypatch.setattr(crossq.BatchRenorm, "warmup", warmup)
    monkeypatch.setattr(crossq.BatchRenorm, "eps", 1e-12)
    ours, theirs = crossq.BatchRenorm(4), BatchRenorm1d(4, eps=1e-12, warmup_steps=warmup - 1)
    for _ in range(5):
        x = (torch.tensor([0.2, 1, 3, 0.9]) * torch.randn(30, 4) + torch.arange(4)).requires_grad_()
        outputs, direction = (ours(x, training=True), theirs(x)), torch.randn(30, 4)
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
        gradients = [torch.autograd.grad((y * direction).sum(), x)[0] for y in outputs]
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.mean, theirs.ra_mean)
        torch.testing.assert_close(ours.var, theirs.ra_var)
    torch.testing.assert_close(ours(x), theirs.eval()(x))


def random_problem(crossq, dtype=torch.float64, hidden_size: int = 5, size: int = 40) -> dict:
    """What the two gradients take, at random, with 3 observations and 2 actions; noise for each of them."""
    torch.manual_seed(0)
    actor = crossq.RenormActor(3, 2, hidden_size).to(dtype)
    critics = crossq.RenormCritics(3, 2, hidden_size).to(dtype)
    for module in (actor, critics):
        for p in module.parameters():
            p.data += 0.2 * torch.randn_like(p)
        for norm in module.modules():
            if isinstance(norm, crossq.BatchRenorm):
                norm.mean += 0.3 * torch.randn_like(norm.mean)
                norm.var *= torch.rand_like(norm.var) + 0.5
    (obs, next_obs), (rewards, ends) = torch.randn(2, size, 3, dtype=dtype), torch.randn(2, size, dtype=dtype)
    actions = torch.rand(size, 2, dtype=dtype) * 2 - 1
    return {
        "actor": actor,
        "critics": critics,
        "log_alpha": nn.Parameter(torch.tensor(-0.7, dtype=dtype), requires_grad=False),
        "batch": crossq.Batch(obs, actions, 2 * next_obs + 1, rewards, (ends > 0.5).to(dtype)),
        "noise": 0.3 * torch.randn(2, size, 2, dtype=dtype),  # of more, actions round to 1
    }


def gradients(crossq, actor, critics, log_alpha, batch, noise, bf16: bool = False) -> tuple:
    """What the gradients of the critics and of the policy return, each from the statistics given."""
    args = crossq.Args(gamma=0.9, bf16=bf16)
    copies = (copy.deepcopy(module) for module in (actor, critics) * 2)
    parts = next(copies), next(copies), log_alpha, batch, noise[0], args
    of_critics = crossq.crossq_critic_gradient(*parts)
    parts = next(copies), next(copies), log_alpha, batch.obs, noise[1], args
    return of_critics, crossq.crossq_actor_gradient(*parts)


def reference_network(network: nn.Module, x: Tensor, training: bool) -> Tensor:
    for i in range(3):
        norm, layer = network.norms[i], network.layers[i]
        mean, std = norm.mean, (norm.var + 1e-3).sqrt()
        r, d = torch.ones_like(mean), torch.zeros_like(mean)
        if training:
            running_mean, running_std, mean = mean, std, x.mean(0)
            std = ((x - mean) ** 2).mean(0).add(1e-3).sqrt()
            if norm.warmup == 0:
                r = (std / running_std).detach().clip(1 / 3, 3)
                d = ((mean - running_mean) / running_std).detach().clip(-5, 5)
        x = ((x - mean) / std * r + d) * norm.weight + norm.bias
        x = x @ layer.weight.T + layer.bias
        x = x * (x > 0) if i < 2 else x
    return x


def reference_losses(actor, critics, log_alpha, batch, noise) -> dict[str, Tensor]:
    """The paper's three losses, and Q1, Q2, y and log pi, each (batch,)."""

    def act(obs: Tensor, noise: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        mean, log_std = reference_network(actor.network, obs, training).split(2, dim=1)
        log_std = log_std.clip(-20, 2)
        u = mean + log_std.exp() * noise
        log_prob = Normal(mean, log_std.exp()).log_prob(u) + 2 * u.cosh().log()  # 1 - tanh^2 is 1 / cosh^2
        return u.tanh(), log_prob.sum(1)

    def q(obs: Tensor, actions: Tensor, training: bool) -> list[Tensor]:
        x = torch.cat([obs, actions], dim=1)
        return [reference_network(network, x, training)[:, 0] for network in (critics.q1, critics.q2)]

    size, alpha = len(batch.obs), log_alpha.exp().detach()
    with torch.no_grad():
        next_actions, next_log_probs = act(batch.next_obs, noise[0], training=False)
    joint = torch.cat([batch.obs, batch.next_obs]), torch.cat([batch.actions, next_actions])
    q1, q2 = q(*joint, training=True)
    next_values = torch.stack([q1[size:], q2[size:]]).min(0).values - alpha * next_log_probs
    y = torch.where(batch.terminated == 1, batch.rewards, batch.rewards + 0.9 * next_values).detach()
    q1, q2 = q1[:size], q2[:size]
    new_actions, log_probs = act(batch.obs, noise[1], training=True)
    values = torch.stack(q(batch.obs, new_actions, training=False)).min(0).values
    return {
        "critic": ((q1 - y) ** 2 + (q2 - y) ** 2) / 2,
        "actor": alpha * log_probs - values,
        "alpha": -log_alpha * (log_probs.detach() - 2),
        "q1": q1,
        "q2": q2,
        "y": y,
        "log_probs": log_probs,
    }


@each_phase
def test_losses_and_gradients_are_the_paper_s(crossq, double, monkeypatch, warmup):
    monkeypatch.setattr(crossq.BatchRenorm, "warmup", warmup)
    problem = random_problem(crossq)
    (critic_gradient, critic), (actor_gradient, actor) = gradients(crossq, **problem)
    log_alpha = problem["log_alpha"].requires_grad_()
    reference = reference_losses(**problem)
    norm = torch.cat([g.flatten() for g in critic_gradient]).norm()
    expected = {"losses/qf_loss": reference["critic"].mean(), "losses/grad_norm": norm}
    expected |= {"losses/qf1_values": reference["q1"].mean(), "losses/qf2_values": reference["q2"].mean()}
    expected |= {"values/predictions": reference["q1"], "values/targets": reference["y"]}
    torch.testing.assert_close(critic, {tag: x.detach() for tag, x in expected.items()})
    expected = {"losses/actor_loss": reference["actor"].mean(), "losses/alpha": log_alpha.exp()}
    expected |= {
        "losses/entropy": -reference["log_probs"].mean(),
        "losses/alpha_loss": reference["alpha"].mean(),
    }
    torch.testing.assert_close(actor, {tag: x.detach() for tag, x in expected.items()}, check_stride=False)
    for gradient, loss, leaves in (
        (critic_gradient, "critic", problem["critics"].parameters()),
        (actor_gradient[:-1], "actor", problem["actor"].parameters()),
        (actor_gradient[-1:], "alpha", [log_alpha]),
    ):
        expected = torch.autograd.grad(reference[loss].mean(), list(leaves), retain_graph=True)
        torch.testing.assert_close(list(gradient), list(expected))


def test_no_gradient_comes_from_the_value_of_the_next_state(crossq, double, monkeypatch):
    """Along random directions the critics' gradient is the slope of their loss with the target held.

    Not so with a target that follows.
    """
    problem = random_problem(crossq)
    (gradient, logged), _ = gradients(crossq, **problem)
    parameters = [p.detach() for p in problem["critics"].parameters()]
    directions = [[torch.randn_like(p) for p in parameters] for _ in range(5)]

    def loss(direction: list[Tensor], step: float) -> Tensor:
        torch._foreach_add_(parameters, direction, alpha=step)
        value = gradients(crossq, **problem)[0][1]["losses/qf_loss"]
        torch._foreach_add_(parameters, direction, alpha=-step)
        return value

    def slopes() -> Tensor:
        return torch.stack([loss(x, 1e-6) - loss(x, -1e-6) for x in directions]) / 2e-6

    expected = [sum((g * v).sum() for g, v in zip(gradient, x, strict=True)) for x in directions]
    assert ((slopes() - torch.stack(expected)).abs() > 0.01).all()
    monkeypatch.setattr(crossq, "soft_target", lambda *_: logged["values/targets"])
    torch.testing.assert_close(slopes(), torch.stack(expected), atol=1e-7, rtol=1e-5)


def test_losses_and_gradients_agree_with_sb3_contrib(crossq, monkeypatch):
    """One update of its CrossQ at learning rate 0, with our weights and noise, leaves its gradients behind.

    In warm-up, and with its variance made that of n, not of n - 1.
    """
    monkeypatch.setattr(Tensor, "var", lambda x, dim: torch.var(x, dim, correction=0))
    problem = random_problem(crossq, torch.float32, hidden_size=16)
    settings = {"learning_rate": 0.0, "gamma": 0.9, "ent_coef": f"auto_{math.exp(-0.7)}", "device": "cpu"}
    settings |= {"buffer_size": 40, "policy_delay": 1, "policy_kwargs": {"net_arch": [16, 16]}}
    model = CrossQ("MlpPolicy", gym.make("PlainRL/ScaledLedger-v0"), **settings)
    model.set_logger(Logger(None, []))
    model.actor.action_dist.epsilon = 0.0  # with it the logarithm of 0 is finite, and the others inexact
    pairs = []  # its parameter, and that or those of ours

    def copy_to(modules: nn.Sequential, network: nn.Module, rows: slice = slice(None)) -> None:
        norms = (module for module in modules if isinstance(module, BatchRenorm1d))
        layers = (module for module in modules if isinstance(module, nn.Linear))
        for theirs, mine in zip(norms, network.norms, strict=True):
            state = {"scale": mine.weight, "bias": mine.bias, "ra_mean": mine.mean, "ra_var": mine.var}
            theirs.load_state_dict(state | {"steps": mine.passes})
            pairs.extend([(theirs.scale, mine.weight, slice(None)), (theirs.bias, mine.bias, slice(None))])
        for theirs, mine in zip(layers, network.layers, strict=True):
            part = rows if mine is network.layers[2] else slice(None)
            theirs.load_state_dict({"weight": mine.weight[part], "bias": mine.bias[part]})
            pairs.extend([(theirs.weight, mine.weight, part), (theirs.bias, mine.bias, part)])

    for layer, rows in ((model.actor.mu, slice(2)), (model.actor.log_std, slice(2, 4))):
        copy_to(nn.Sequential(*model.actor.latent_pi, layer), problem["actor"].network, rows)
    copy_to(model.critic.qf0, problem["critics"].q1)
    copy_to(model.critic.qf1, problem["critics"].q2)
    transitions = zip(*map(Tensor.numpy, problem["batch"]), strict=True)
    for obs, action, next_obs, reward, terminated in transitions:
        model.replay_buffer.add(obs, next_obs, action, reward, bool(terminated), [{}])
    batch = model.replay_buffer._get_samples(np.arange(40))
    monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, **__: batch)
    noise = iter(problem["noise"])
    monkeypatch.setattr(Normal, "rsample", lambda self, shape=(): self.loc + self.scale * next(noise))
    critic_gradients = {}

    def look() -> None:  # before the actor's loss adds to them
        critic_gradients.update({p: p.grad.clone() for p in model.critic.parameters()})

    monkeypatch.setattr(model.critic.optimizer, "step", look)
    model.train(gradient_steps=1, batch_size=40)

    actor, critics, log_alpha, batch, noise = problem.values()
    args = crossq.Args(gamma=0.9)
    # In this order, so that the critics judge the policy by statistics that have taken in the batch.
    critic_gradient, critic = crossq.crossq_critic_gradient(actor, critics, log_alpha, batch, noise[0], args)
    actor_gradient, other = crossq.crossq_actor_gradient(actor, critics, log_alpha, batch.obs, noise[1], args)
    logged = model.logger.name_to_value
    assert logged["train/critic_loss"] == pytest.approx(critic["losses/qf_loss"].item(), rel=1e-5)
    assert logged["train/actor_loss"] == pytest.approx(other["losses/actor_loss"].item(), rel=1e-5)
    assert logged["train/ent_coef_loss"] == pytest.approx(other["losses/alpha_loss"].item(), rel=1e-5)
    ours = dict(
        zip(
            [*critics.parameters(), *actor.parameters()],
            [*critic_gradient, *actor_gradient[:-1]],
            strict=True,
        )
    )
    assert {mine for _, mine, _ in pairs} == ours.keys()
    for theirs, mine, rows in pairs:
        expected = critic_gradients.get(theirs, theirs.grad)
        torch.testing.assert_close(ours[mine][rows], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(actor_gradient[-1], model.log_ent_coef.grad[0])
    for theirs, mine in (
        (model.actor.latent_pi[3], actor.network.norms[1]),
        (model.critic.qf1[6], critics.q2.norms[2]),
    ):
        torch.testing.assert_close(mine.mean, theirs.ra_mean)
        torch.testing.assert_close(mine.var, theirs.ra_var)


def test_bfloat16_is_close_to_float32(crossq):
    problem = random_problem(crossq, torch.float32, hidden_size=64, size=256)
    exact, rounded = (gradients(crossq, **problem, bf16=bf16) for bf16 in (False, True))
    for (gradient, logged), (close, also_logged) in zip(exact, rounded, strict=True):
        assert {g.dtype for g in close} == {torch.float32}
        gradient, close = (torch.cat([g.flatten() for g in x]) for x in (gradient, close))
        assert 0 < (close - gradient).norm() < 0.03 * gradient.norm()
        torch.testing.assert_close(also_logged, logged, atol=0.05, rtol=0.03)


def test_statistics_move_in_training_passes_only(crossq):
    """Those of the critics in their update, those of the policy in its own, and nothing moves in acting."""
    actor, critics, log_alpha, batch, noise = random_problem(crossq, torch.float32).values()

    def moved(function, *args) -> tuple[bool, bool]:
        before = [copy.deepcopy(dict(module.named_buffers())) for module in (actor, critics)]
        function(*args)
        after = [dict(module.named_buffers()) for module in (actor, critics)]
        changes = [
            {not torch.equal(old[k], new[k]) for k in old} for old, new in zip(before, after, strict=True)
        ]
        return tuple(change.pop() if len(change) == 1 else change for change in changes)

    args = crossq.Args()
    assert moved(crossq.crossq_critic_gradient, actor, critics, log_alpha, batch, noise[0], args) == (
        False,
        True,
    )
    assert moved(crossq.crossq_actor_gradient, actor, critics, log_alpha, batch.obs, noise[1], args) == (
        True,
        False,
    )
    for greedy in (False, True):
        policy = crossq.make_policy(
            crossq.Args(greedy=greedy), actor, gym.make("PlainRL/ScaledLedger-v0").action_space
        )
        assert moved(policy, batch.obs.numpy(), np.random.default_rng(0)) == (False, False)
    norms = [norm for norm in critics.modules() if isinstance(norm, crossq.BatchRenorm)]
    assert [norm.passes.item() for norm in norms] == [1] * 6


def test_policy_acts_by_the_running_statistics_within_the_box(crossq):
    actor, *_ = random_problem(crossq, torch.float32).values()
    space, obs = gym.make("PlainRL/ScaledLedger-v0").action_space, np.random.default_rng(0).normal(size=3)
    mean, log_std = (
        reference_network(actor.network, torch.from_numpy(obs[None]).float(), training=False)
        .detach()[0]
        .split(2)
    )
    greedy, sampled = (
        (
            crossq.make_policy(crossq.Args(greedy=x), actor, space)(
                np.tile(obs, (20_000, 1)), np.random.default_rng(1)
            )
            - [1, 0.25]
        )
        / [2, 0.25]
        for x in (True, False)
    )
    np.testing.assert_allclose(greedy, np.tile(mean.tanh(), (20_000, 1)), atol=1e-5)
    u = np.arctanh(sampled)
    np.testing.assert_allclose(u.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(u.std(0), log_std.exp(), rtol=0.03)


@pytest.mark.parametrize("policy_frequency", [1, 3])
def test_update_follows_its_gradients(train, spy, policy_frequency):
    """Adam's steps, done again from the first weights."""
    calls = spy("crossq_critic_gradient", "crossq_actor_gradient")
    settings = {"policy_frequency": policy_frequency, "policy_lr": 2e-3, "q_lr": 3e-3, "num_envs": 1}
    checkpoint = train(**LEDGER, **settings, learning_starts=42, total_timesteps=55)

    def parameters(module: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in module.parameters()]

    critics, actor = parameters(calls[0]["critics"]), parameters(calls[0]["actor"])
    log_alpha = torch.tensor(0.0)
    critic_optimizer = torch.optim.Adam(critics, lr=3e-3, betas=(0.5, 0.999))
    actor_optimizer = torch.optim.Adam([*actor, log_alpha], lr=2e-3, betas=(0.5, 0.999))

    def check(call: dict) -> None:
        for name, expected in (("critics", critics), ("actor", actor)):
            torch.testing.assert_close(parameters(call[name]), expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(call["log_alpha"], log_alpha, atol=1e-6, rtol=0)

    def step(optimizer: torch.optim.Adam, parameters: list[Tensor], gradient: list[Tensor]) -> None:
        for p, g in zip(parameters, gradient, strict=True):
            p.grad = g
        optimizer.step()

    remaining = iter(calls)
    for update in range(13):
        check(call := next(remaining))
        assert call["name"] == "crossq_critic_gradient"
        step(critic_optimizer, critics, call["result"][0])
        if update % policy_frequency == 0:
            check(actor_call := next(remaining))
            assert torch.equal(actor_call["obs"], call["batch"].obs)
            step(actor_optimizer, [*actor, log_alpha], actor_call["result"][0])
    assert next(remaining, None) is None
    for name, module, expected in (("critics", "critics", critics), ("agent", "actor", actor)):
        saved = [checkpoint[name][key] for key, _ in calls[0][module].named_parameters()]
        torch.testing.assert_close(saved, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(checkpoint["temperature"]["log_alpha"], log_alpha, atol=1e-6, rtol=0)
    assert {checkpoint["critics"][f"q{i}.norms.{j}.passes"].item() for i in (1, 2) for j in range(3)} == {13}
    noise = torch.cat([call["noise"].flatten() for call in calls])
    assert len(noise.unique()) > 0.99 * len(noise)
    assert (noise.mean().item(), noise.std().item()) == pytest.approx((0, 1), abs=0.1)


def test_every_transition_is_stored_once_and_learned_from_once_a_step(train, spy):
    """With 3 environments, across the resets of a checkpoint."""
    calls = spy("squash", "crossq_critic_gradient")
    Ledger.ledgers = ()
    settings = {"num_envs": 3, "total_timesteps": 150, "learning_starts": 61, "checkpoint_interval": 90}
    train(**LEDGER, **settings)
    ledgers = [ledger for ledger in Ledger.ledgers if ledger]
    assert [len(ledger) for ledger in ledgers] == [50] * 3
    before, taken, rewards, after, terminated, _ = (
        np.stack([[step[part] for step in ledger] for ledger in ledgers], axis=1) for part in range(6)
    )  # (50, 3, ...)
    actions = ((taken - [1, 0.25]) / [2, 0.25]).astype("f4")
    columns = before, actions, after, rewards[..., None], terminated[..., None]
    rows = torch.from_numpy(np.concatenate(columns, axis=2).astype("f4"))
    step, updates, batches, acting = 21, np.zeros(50, int), [], None
    for call in calls:
        if call["name"] == "squash" and len(call["noise"]) == 3:
            acting, step = call, step + 1
            np.testing.assert_allclose(acting["result"][0], actions[step - 1], atol=1e-6)
        elif call["name"] == "crossq_critic_gradient":
            updates[step - 1] += 1
            batches.append(torch.cat([x.reshape(len(x), -1) for x in call["batch"]], dim=1))
            near = (batches[-1][:, None] - rows[:step].flatten(0, 1)).abs() < 1e-5
            assert near.all(-1).any(1).all()
            if acting:  # the first update after the step, so that this is the policy that acted
                policy = call["actor"](torch.from_numpy(before[step - 1]))
                torch.testing.assert_close(policy, (acting["mean"], acting["log_std"]))
            acting = None
    assert len(torch.stack(batches).unique(dim=0)) == len(batches)
    np.testing.assert_array_equal(updates.cumsum(), (3 * np.arange(1, 51) - 61).clip(0))


@pytest.mark.parametrize("terminates", [False, True])
def test_value_of_a_state_depends_on_how_episodes_end(crossq, train, monkeypatch, terminates):
    """With gamma 0.9 an endless stream of rewards of 1 is worth 10, wherever time limits cut it."""
    settings = {
        "num_envs": 1,
        "total_timesteps": 2500,
        "learning_starts": 500,
        "gamma": 0.9,
        "eval_interval": 0,
    }
    settings |= {"critic_hidden_size": 32, "batch_size": 32, "buffer_size": 5000, "checkpoint_interval": 9999}
    env_id = f"PlainRL/{'Terminating' if terminates else 'Truncating'}Clock-v0"
    soft_target = crossq.soft_target
    monkeypatch.setattr(
        crossq, "soft_target", lambda *args: soft_target(*args[:3], 0, 0, args[5])
    )  # no entropy
    critics = crossq.RenormCritics(4, 1, 32)
    critics.load_state_dict(train(env_id=env_id, **settings)["critics"])
    expected = [(1 - 0.9**steps) / 0.1 if terminates else 10 for steps in (4, 3, 2, 1)]
    for action in (-0.9, 0.0, 0.9):
        for values in critics(torch.eye(4), torch.full((4, 1), action)):
            np.testing.assert_allclose(values.detach(), expected, rtol=0.1)


def test_same_seed_gives_the_same_bits_whatever_is_evaluated(train):
    settings = {"total_timesteps": 150, "checkpoint_interval": 100}
    often, never = (train(str(interval), **settings, eval_interval=interval) for interval in (20, 0))
    assert_same(often, never)
    other = train("other", **settings, eval_interval=0, seed=2)
    weight = "network.layers.0.weight"
    assert not torch.isclose(other["agent"][weight], never["agent"][weight]).all()


def test_killed_twice_and_resumed_equals_uninterrupted(crossq, train, tmp_path):
    """Killed in a random update and at an evaluation. From step 92 on the buffer overwrites rows."""
    reference = train("whole")
    moment, start = random.randrange(70, 190), [*flags(SHORT_RUN), "--run-dir", "killed"]
    for function, call in (("crossq_critic_gradient", moment), ("evaluate", 1)):
        killed = run_python("-c", KILLER, crossq.__file__, function, call, *start, cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
        start = ["--resume", "killed"]
    done = run_script("crossq_continuous", *start, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(torch.load("killed/checkpoint.pt"), reference)
    assert_same(torch.load("killed/model.pt"), torch.load("whole/model.pt"))
    assert Path("killed/evaluations.csv").read_text() == Path("whole/evaluations.csv").read_text()
    ours, theirs = (scalars(Path(run_dir)) for run_dir in ("killed", "whole"))
    assert len(ours.pop("charts/SPS")) == len(theirs.pop("charts/SPS"))
    assert ours == theirs
    tags = "qf1_values qf2_values qf_loss actor_loss alpha alpha_loss entropy grad_norm explained_variance"
    assert {f"losses/{name}" for name in tags.split()} == {tag for tag in ours if tag.startswith("losses/")}


def test_resumed_in_the_middle_of_warm_up_equals_uninterrupted(crossq, train, main, monkeypatch):
    """The number of training passes is part of what is restored: it decides how the next one normalises."""
    monkeypatch.setattr(crossq.BatchRenorm, "warmup", 150)
    train(total_timesteps=150)
    main("--resume", "run", "--total-timesteps", 300)
    whole = train("whole")
    assert_same(torch.load("run/checkpoint.pt"), whole)
    monkeypatch.setattr(crossq.BatchRenorm, "warmup", 1000)
    weight = "q1.layers.0.weight"
    assert not torch.equal(train("warm-up")["critics"][weight], whole["critics"][weight])


@pytest.mark.parametrize("greedy", [False, True])
def test_saved_policy_scores_what_training_reported(crossq, train, main, capfd, greedy):
    train(greedy=greedy)
    rows = [row.split(",") for row in Path("run/evaluations.csv").read_text().splitlines()]
    expected = [float(row[2]) for row in rows if row[0] == "300"]
    before, _ = contents(Path()), capfd.readouterr()
    seed = np.random.SeedSequence((1, 300, 2**31)).generate_state(1)[0]  # of the last evaluation's stream
    options = ["--greedy" if greedy else "--no-greedy", "--eval-episodes", 2]
    main("--evaluate", "run", "--seed", seed, *options)
    *episodes, _ = capfd.readouterr().out.splitlines()
    assert [float(re.search(r"return (.*),", line)[1]) for line in episodes] == pytest.approx(
        expected, abs=0.006
    )
    assert contents(Path()) == before


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_gradients_are_the_eager_ones_up_to_rounding(crossq, train, monkeypatch):
    """Those of a run. Its weights are not compared: of a gradient near 0 Adam makes a whole step."""
    settings, compiled, compile_function = (
        {"env_id": "PlainRL/ScaledLedger-v0", "eval_interval": 0},
        {},
        torch.compile,
    )

    def watch(function, **options):
        compiled[function.__name__] = compile_function(function, **options)
        return compiled[function.__name__]

    monkeypatch.setattr(torch, "compile", watch)
    checkpoint = train(**settings, total_timesteps=50, compile=True)
    actor, critics = crossq.RenormActor(3, 2, 12), crossq.RenormCritics(3, 2, 16)
    actor.load_state_dict(checkpoint["agent"])
    critics.load_state_dict(checkpoint["critics"])
    problem = random_problem(crossq, torch.float32, size=16) | {"actor": actor, "critics": critics}
    eager = gradients(crossq, **problem)
    for name, function in compiled.items():
        monkeypatch.setattr(crossq, name, function)
    assert compiled.keys() == {"crossq_critic_gradient", "crossq_actor_gradient"}
    for ours, expected in zip(gradients(crossq, **problem), eager, strict=True):
        torch.testing.assert_close(list(ours[0]), list(expected[0]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours[1], expected[1], atol=1e-5, rtol=1e-4)


def test_learns_to_swing_the_pendulum_up(train):
    """A random policy returns -1,200 or so. Seeds 1 to 5 have ended between -110 and -192."""
    settings = {"total_timesteps": 3000, "learning_starts": 500, "gamma": 0.95, "num_envs": 1}
    settings |= {"policy_frequency": 1}
    settings |= {"critic_hidden_size": 64, "policy_hidden_size": 64, "batch_size": 64, "buffer_size": 5000}
    settings |= {"eval_interval": 3000, "eval_episodes": 10, "greedy": True, "checkpoint_interval": 5000}
    train(env_id="Pendulum-v1", **settings)
    rows = [row.split(",") for row in Path("run/evaluations.csv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == ["3000"] * 10
    assert np.mean([float(row[2]) for row in rows]) > -250


@pytest.fixture(scope="session")
def finished_run(crossq, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    settings = SHORT_RUN | {"env_id": "Pendulum-v1", "total_timesteps": 60}
    crossq.train(crossq.Args(**settings, run_dir=run_dir))
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
        ("--env-id PlainRL/UnboundedLedger-v0", "bounded"),
        ("--env-id PlainRL/SquareLedger-v0", "flat"),
        ("--gamma 1.001", "--gamma"),
        ("--batch-size 1", "--batch-size"),
        ("--run-dir run", "--resume run"),
        ("--resume nowhere", "nowhere"),
        ("--resume run --env-id Hopper-v4", "Pendulum-v1"),
        ("--evaluate run --env-id Hopper-v4", "Pendulum-v1"),
        ("--resume run --critic-hidden-size 32", "critics: size mismatch"),
        ("--evaluate run --policy-hidden-size 32", "agent: size mismatch"),
    ],
)
def test_bad_input(refusal, arguments, hint):
    assert hint in refusal(*arguments.split())


def test_number_that_no_field_takes(crossq, refusal):
    """Not a number or an infinity, 0 where that has no meaning, or -1 where whole numbers are counted."""
    positive = "num_envs buffer_size batch_size policy_lr q_lr policy_frequency"
    positive += " critic_hidden_size policy_hidden_size"
    for field in dataclasses.fields(crossq.Args):
        kind, flag = str(field.type), f"--{field.name.replace('_', '-')}"
        values = ("nan", "inf", "-inf") if "float" in kind else ("-1",) if "int" in kind else ()
        for value in (*values, "0") if field.name in positive.split() else values:
            assert flag in refusal(flag, value)
