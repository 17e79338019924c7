"""Spread of REINFORCE's four gradient estimates, on one policy that stays as it is.

    python benchmark/grids/gradient_spread.py RUN_DIR

The policy of a run of algos/reinforce_cartpole.py plays whole episodes, the same for every estimator. Each
episode gives an estimate g_i of the gradient g in the policy's parameters. A row has the norm of g, the
standard deviation of the g_i (the root of the mean of ||g_i - g||^2), and the square of their ratio: that is
the number of episodes after which the standard error of the estimate is as small as g.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cli import parse
from scripts import ALGOS, load_script


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """run folder or model.pt of reinforce_cartpole, trained with the estimator baseline for its values"""
    episodes: int = 10_000
    """episodes to play"""
    seed: int = 1
    """seed of the environments and of the actions"""


def play(reinforce: ModuleType, agent, envs, episodes: int, seed: int) -> list[tuple[np.ndarray, ...]]:
    """Observations, actions, rewards, last next observation and whether it is terminal, of each episode.

    Each environment plays the same number of them, so that short ones are not over-counted.
    """
    space, rng = envs.single_action_space, np.random.default_rng((seed, 1))
    logits = reinforce.numpy_logits(agent)
    played = [[] for _ in range(envs.num_envs)]
    current = [[] for _ in range(envs.num_envs)]
    obs, _ = envs.reset(seed=seed)
    while min(map(len, played)) < episodes // envs.num_envs:
        actions = reinforce.sample_softmax(logits(obs), rng)
        next_obs, rewards, terminated, truncated, info = envs.step(space.start + actions)
        for i, steps in enumerate(current):
            steps.append((obs[i], actions[i], rewards[i]))
            if terminated[i] or truncated[i]:
                columns = (np.stack(column) for column in zip(*steps, strict=True))
                played[i].append((*columns, info["final_obs"][i], terminated[i]))
                current[i] = []
        obs = next_obs.copy()
    return [episode for game in played for episode in game[: episodes // envs.num_envs]]


def gradients(reinforce: ModuleType, agent, episodes: list, estimator: str, gamma: float) -> torch.Tensor:
    """The estimate of each episode (episodes, parameters)."""
    parameters, estimates = list(agent.actor.parameters()), []
    for obs, actions, rewards, last_obs, terminated in episodes:
        obs, last_obs = torch.from_numpy(obs).float(), torch.from_numpy(last_obs).float()
        rewards = torch.from_numpy(rewards).double()
        with torch.no_grad():
            values = agent.critic(obs).squeeze(-1).double()
            if estimator == "baseline" and not terminated:
                rewards[-1] += gamma * agent.critic(last_obs).item()
        done = torch.zeros(len(obs), 1, dtype=torch.bool)
        done[-1] = True
        columns = (rewards.unsqueeze(-1), done, values.unsqueeze(-1))
        weights = reinforce.estimator_weights(estimator, *columns, gamma).squeeze(-1).float()
        log_probs = F.log_softmax(agent.actor(obs), -1)
        log_probs = log_probs.gather(-1, torch.from_numpy(actions).unsqueeze(-1)).squeeze(-1)
        loss = reinforce.policy_loss(log_probs, weights, 1)
        estimates.append(torch.cat([-g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(estimates).double()


def main(args: Args) -> None:
    reinforce = load_script(ALGOS / "reinforce_cartpole.py")
    torch.set_num_threads(1)
    path = args.run / "model.pt" if args.run.is_dir() else args.run
    state = reinforce.load(path, "agent")
    settings = state["args"]
    envs = reinforce.make_envs(settings, 10)
    agent = reinforce.make_agent(settings, envs)
    agent.load_state_dict(state["agent"])
    episodes = play(reinforce, agent, envs, args.episodes, args.seed)
    lengths = [len(rewards) for _, _, rewards, *_ in episodes]
    print(f"{settings.env_id}, {len(episodes)} episodes of {np.mean(lengths):.0f} steps in the mean\n")
    print(
        "| estimator | norm of the gradient | spread of the estimates | episodes for an error of that norm |"
    )
    print("|---|---|---|---|")
    for estimator in get_args(get_type_hints(reinforce.Args)["estimator"]):
        estimates = gradients(reinforce, agent, episodes, estimator, settings.gamma)
        variance = estimates.var(0).sum().item()
        # The mean of the estimates is longer than the gradient: it holds what noise the mean leaves.
        square = estimates.mean(0).square().sum().item() - variance / len(estimates)
        episodes_needed = variance / square if square > 0 else math.inf
        norm = math.sqrt(max(square, 0))
        print(f"| {estimator} | {norm:,.1f} | {math.sqrt(variance):,.1f} | {episodes_needed:,.0f} |")


if __name__ == "__main__":
    main(parse(Args, __doc__))
