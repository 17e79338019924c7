"""The mathematics against slow references, closed forms, finite differences and Stable-Baselines3."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import scalars
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn
from torch.distributions import Normal

GAMMA = 0.97


@pytest.fixture(autouse=True)
def _seed_torch():
    torch.manual_seed(0)


def random_rollout(seed: int, num_steps: int = 40, num_envs: int = 3) -> dict[str, torch.Tensor]:
    """Rewards, values and ends at random; next_values is another draw where an episode was truncated."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, num_steps, num_envs, generator=generator).double()
    terminated, truncated = torch.rand(2, num_steps, num_envs, generator=generator) < 0.1
    done = terminated | truncated
    next_values[:-1] = torch.where(done[:-1], next_values[:-1], values[1:])
    return {
        "rewards": rewards,
        "values": values,
        "next_values": next_values,
        "terminated": terminated,
        "done": done,
    }


def reference_advantages(rewards, values, next_values, terminated, done, lam):
    """GAE by definition: the mean of the n-step advantages under the weights (1 - lambda) lambda^(n - 1)."""
    advantages = np.zeros(rewards.shape)
    for start, env in np.ndindex(*rewards.shape):
        estimates, discounted_rewards = [], 0.0
        for n, t in enumerate(range(start, len(rewards)), start=1):
            discounted_rewards += GAMMA ** (n - 1) * rewards[t, env].item()
            future = 0.0 if terminated[t, env] else GAMMA**n * next_values[t, env].item()
            estimates.append(discounted_rewards + future - values[start, env].item())
            if done[t, env]:
                break
        last = len(estimates) - 1
        weights = [lam**n if n == last else (1 - lam) * lam**n for n in range(last + 1)]
        advantages[start, env] = np.dot(weights, estimates)
    return advantages


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_weighted_mean_of_n_step_advantages(ppo, lam, seed):
    rollout = random_rollout(seed)
    advantages = ppo.gae(**rollout, gamma=GAMMA, lam=lam)
    np.testing.assert_allclose(advantages, reference_advantages(**rollout, lam=lam), atol=1e-12)


def test_multi_step_returns_of_the_known_case(ppo):
    rewards = torch.tensor([0.1, 0.2, -0.01, 0.5, 4, -1])[:, None]
    values = torch.tensor([0.1, 0.3, 0.15, 0.3, 0.4, 0.6, 0.5])[:, None]
    terminated = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool)[:, None]
    returns = values[:-1] + ppo.gae(rewards, values[:-1], values[1:], terminated, terminated, 0.99, 1.0)
    expected = [0.7733, 0.6802, 0.4850, 0.5, 3.5, -0.5050]
    np.testing.assert_allclose(returns[:, 0], expected, atol=1e-4)


def test_gae_agrees_with_stable_baselines3(ppo):
    """SB3 knows one kind of end; at a truncation it adds the value of what would follow to the reward."""
    num_steps, num_envs, lam = 40, 3, 0.9
    rollout = {name: x.float() if x.is_floating_point() else x for name, x in random_rollout(0).items()}
    box = gym.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(num_steps, box, box, "cpu", lam, GAMMA, num_envs)
    truncated = rollout["done"] & ~rollout["terminated"]
    buffer.rewards = (rollout["rewards"] + GAMMA * rollout["next_values"] * truncated).numpy()
    buffer.values = rollout["values"].numpy()
    buffer.episode_starts[1:] = rollout["done"][:-1]
    buffer.compute_returns_and_advantage(rollout["next_values"][-1], rollout["done"][-1].numpy())
    np.testing.assert_allclose(ppo.gae(**rollout, gamma=GAMMA, lam=lam), buffer.advantages, atol=1e-5)


def test_discounted_cumsum(ppo):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    discounts = torch.tensor([[0.5, 1.0], [0.0, 0.5], [0.1, 2.0]])
    sums = ppo.discounted_cumsum(x, discounts, start=torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(sums, torch.tensor([[6.0, 22.0], [3.0, 15.0], [5.3, 36.0]]))


def test_running_moments_are_those_of_all_batches_together(ppo):
    rng, moments = np.random.default_rng(0), ppo.RunningMoments((2,))
    batches = [rng.normal((5, -1), (3, 0.1), (size, 2)) for size in (1, 400, 7, 1000)]
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    everything = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-4)
    np.testing.assert_allclose(moments.std(), everything.std(0), rtol=1e-4)


def test_gaussian_agrees_with_torch_distributions(ppo):
    actions, mean, log_std = torch.randn(8, 3), torch.randn(8, 3), torch.randn(3)
    reference = Normal(mean, log_std.exp())
    torch.testing.assert_close(
        ppo.gaussian_log_prob(actions, mean, log_std), reference.log_prob(actions).sum(-1)
    )
    torch.testing.assert_close(ppo.gaussian_entropy(log_std), reference.entropy().sum(-1)[0])


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [([1, 2, 3, 6], 1), ([5, 5, 5, 5], 0), ([2, 4, 6, 12], 0), ([-1, -2, -3, -6], -3)],
)
def test_explained_variance(ppo, predictions, expected, tmp_path):
    """Of all that came since the last log, in whichever parts."""
    args = ppo.Args(env_id="Pendulum-v1", total_timesteps=4, eval_interval=0, run_dir=tmp_path / "run")
    run = ppo.Run(args, log_interval=4, agent=ppo.make_agent(args, ppo.make_envs(args, 1)))
    for i, size in ((0, 1), (1, 3)):
        parts = (torch.tensor(x, dtype=torch.float)[i : i + size] for x in (predictions, [1, 2, 3, 6]))
        run.end_iteration(2, dict(zip(("values/predictions", "values/targets"), parts, strict=True)), [])
    [(step, value)] = scalars(tmp_path / "run")["losses/explained_variance"]
    assert (step, value) == (4, pytest.approx(expected, abs=1e-6))


def make_agent(ppo, dtype=torch.float64):
    """An agent and its flat parameters, large enough for actions to depend on observations."""
    agent = ppo.GaussianAgent(obs_dim=4, action_dim=2, hidden_size=5, log_std_init=-0.3).to(dtype)
    parameters = ppo.flatten_parameters(list(agent.parameters()))
    parameters += 0.3 * torch.randn_like(parameters)
    return agent, parameters


def gradient_of(ppo, agent, batch, args):
    return ppo.ppo_gradient(agent, list(agent.parameters()), batch, args)


def make_batch(ppo, agent, size: int = 256):
    """A minibatch of an older policy, so that ratios and values lie within and beyond the clip range."""
    obs, actions = torch.randn(size, 4).double(), torch.randn(size, 2).double()
    noise = torch.randn(4, size).double()
    with torch.no_grad():
        mean, values = agent(obs)
        log_probs = ppo.gaussian_log_prob(actions, mean, agent.log_std) + 0.3 * noise[0]
    return ppo.Rollout(obs, actions, log_probs, values + 0.3 * noise[1], noise[2], values + noise[3])


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_ppo_loss_and_its_gradient_are_the_textbook_ones(ppo, clip_vloss):
    args = ppo.Args(clip_coef=0.2, ent_coef=0.03, vf_coef=0.7, clip_vloss=clip_vloss)
    batch = make_batch(ppo, make_agent(ppo)[0])
    log_ratio, shift = 0.3 * torch.randn(2, 256).double()
    inputs = [x.requires_grad_() for x in (log_ratio, batch.values + shift, torch.tensor(1.5).double())]
    log_ratio, values, entropy = inputs
    ratio = log_ratio.exp()
    surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    squares = (values - batch.returns) ** 2
    if clip_vloss:
        clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
        squares = torch.max(squares, (clipped - batch.returns) ** 2)
    policy_loss, value_loss = -surrogate.mean(), squares.mean() / 2
    total = policy_loss + 0.7 * value_loss - 0.03 * entropy

    losses = ppo.ppo_loss(log_ratio, values, entropy, batch, 0.2, args)
    torch.testing.assert_close(losses, (total, policy_loss, value_loss))
    torch.testing.assert_close(torch.autograd.grad(losses[0], inputs), torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_gradient_agrees_with_finite_differences(ppo, clip_vloss):
    """Along the flat parameters, so that this also holds the gradient to their order."""
    agent, parameters = make_agent(ppo)
    args = ppo.Args(ent_coef=0.01, clip_vloss=clip_vloss, max_grad_norm=1e9)
    batch, differences = make_batch(ppo, agent), torch.empty_like(parameters)
    gradient, log_ratio, scalars = gradient_of(ppo, agent, batch, args)
    names = ("total", "policy_loss", "value_loss", "entropy", "grad_norm")
    total, policy, value, entropy, norm = (scalars.pop(f"losses/{name}") for name in names)
    assert not scalars

    def loss() -> torch.Tensor:
        return gradient_of(ppo, agent, batch, args)[2]["losses/total"]

    for i in range(len(parameters)):
        parameters[i] += 1e-6
        differences[i] = loss()
        parameters[i] -= 2e-6
        differences[i] = (differences[i] - loss()) / 2e-6
        parameters[i] += 1e-6
    torch.testing.assert_close(gradient, differences, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(norm, gradient.norm())
    torch.testing.assert_close(total, policy + args.vf_coef * value - args.ent_coef * entropy)
    log_probs = Normal(agent(batch.obs)[0], agent.log_std.exp()).log_prob(batch.actions).sum(-1)
    torch.testing.assert_close(log_ratio, (log_probs - batch.log_probs).detach())


def test_gradient_is_clipped_to_the_largest_norm_and_no_further(ppo):
    agent, _ = make_agent(ppo)
    batch = make_batch(ppo, agent)
    whole, _, scalars = gradient_of(ppo, agent, batch, ppo.Args(max_grad_norm=1e9))
    clipped, _, scalars_of_clipped = gradient_of(ppo, agent, batch, ppo.Args(max_grad_norm=0.01))
    norm, norm_before = (x["losses/grad_norm"] for x in (scalars, scalars_of_clipped))
    assert norm_before == norm > 0.01
    torch.testing.assert_close(clipped, whole * 0.01 / norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(whole.norm(), norm)


@pytest.mark.parametrize("max_grad_norm", [0.1, 1e9])
def test_gradient_agrees_with_stable_baselines3(ppo, max_grad_norm):
    """A step of SB3's PPO at learning rate 0 leaves its gradient behind. Its value loss lacks the half."""
    model = PPO(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=0.0,
        n_steps=256,
        batch_size=256,
        n_epochs=1,
        ent_coef=0.02,
        vf_coef=0.4,
        max_grad_norm=max_grad_norm,
        policy_kwargs={"net_arch": [16, 16]},
        seed=0,
        device="cpu",
    )
    _, callback = model._setup_learn(256)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 256)
    buffer, policy = model.rollout_buffer, model.policy
    agent = ppo.GaussianAgent(obs_dim=3, action_dim=1, hidden_size=16, log_std_init=0.0)
    actor = nn.Sequential(policy.mlp_extractor.policy_net, policy.action_net)
    critic = nn.Sequential(policy.mlp_extractor.value_net, policy.value_net)
    counterparts = {agent.log_std: policy.log_std}
    counterparts |= dict(zip(agent.actor.parameters(), actor.parameters(), strict=True))
    counterparts |= dict(zip(agent.critic.parameters(), critic.parameters(), strict=True))
    with torch.no_grad():
        for ours, theirs in counterparts.items():
            theirs += 0.1 * torch.randn_like(theirs)
            ours.copy_(theirs)
    model.train()

    advantages = torch.from_numpy(buffer.advantages).flatten()
    batch = ppo.Rollout(
        torch.from_numpy(buffer.observations).reshape(256, 3),
        torch.from_numpy(buffer.actions).reshape(256, 1),
        torch.from_numpy(buffer.log_probs).flatten(),
        torch.from_numpy(buffer.values).flatten(),
        (advantages - advantages.mean()) / (advantages.std() + 1e-8),
        torch.from_numpy(buffer.returns).flatten(),
    )
    args = ppo.Args(clip_coef=0.2, ent_coef=0.02, vf_coef=0.8, max_grad_norm=max_grad_norm)
    gradient, log_ratio, _ = gradient_of(ppo, agent, batch, args)
    assert log_ratio.exp().min() < 0.8
    assert log_ratio.exp().max() > 1.2
    expected = torch.cat([counterparts[p].grad.flatten() for p in agent.parameters()])
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


def test_flat_parameters_are_the_module(ppo):
    agent = ppo.GaussianAgent(obs_dim=4, action_dim=2, hidden_size=5, log_std_init=0.0)
    before = torch.cat([p.detach().flatten() for p in agent.parameters()])
    flat = ppo.flatten_parameters(list(agent.parameters()))
    torch.testing.assert_close(flat, before, rtol=0, atol=0)
    flat += 1
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in agent.parameters()]), before + 1)


def test_numpy_actor_is_the_actor(ppo):
    agent, _ = make_agent(ppo, torch.float32)
    obs = torch.cat([torch.randn(50, 4) * torch.tensor([1, 5, 0.1, 100]) + 3, torch.full((1, 4), 1e6)])
    agent.obs_moments.update(obs[:50])
    expected = agent.actor(agent.normalize(obs)).detach()
    np.testing.assert_allclose(ppo.numpy_actor(agent)(obs.double().numpy()), expected, atol=1e-5)
    normalized = agent.normalize(obs)
    torch.testing.assert_close(normalized[:50].std(0, correction=0), torch.ones(4), rtol=1e-2, atol=0)
    assert (normalized[50] == 10).all()


def test_policy_samples_around_the_mode_within_the_box(ppo):
    agent, _ = make_agent(ppo, torch.float32)
    obs = np.tile(np.random.default_rng(0).normal(size=4), (20_000, 1))
    mode, std = ppo.numpy_actor(agent)(obs)[0], agent.log_std.exp().detach().numpy()
    wide, narrow = gym.spaces.Box(-100, 100, (2,)), gym.spaces.Box(-0.1, 0.1, (2,))
    actions = ppo.make_policy(ppo.Args(greedy=False), agent, wide)(obs, np.random.default_rng(1))
    np.testing.assert_allclose(actions.mean(0), mode, atol=0.05)
    np.testing.assert_allclose(actions.std(0), std, rtol=0.03)
    greedy = ppo.make_policy(ppo.Args(greedy=True), agent, wide)(obs, np.random.default_rng(1))
    np.testing.assert_array_equal(greedy, np.tile(mode, (20_000, 1)))
    clipped = ppo.make_policy(ppo.Args(greedy=False), agent, narrow)(obs, np.random.default_rng(1))
    np.testing.assert_allclose(clipped, actions.clip(-0.1, 0.1))


def test_agent_starts_orthogonal_and_nearly_independent_of_the_state(ppo):
    agent = ppo.GaussianAgent(obs_dim=8, action_dim=3, hidden_size=16, log_std_init=-0.5)
    for network, gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        linear = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
        for layer, layer_gain in zip(linear, (math.sqrt(2), math.sqrt(2), gain), strict=True):
            singular_values = torch.linalg.svdvals(layer.weight.detach())
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, layer_gain))
            assert not layer.bias.any()
    assert (agent.log_std == -0.5).all()
