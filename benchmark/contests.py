"""What speed.py times of each script, and with what peer it competes."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peer:
    """An algorithm of Stable-Baselines3, or of its contrib, with a script's settings."""

    algorithm: str
    """module and class"""
    arguments: Callable[[dict], dict]
    """the arguments of the class for the settings of a contest"""
    policy: str = "MlpPolicy"
    num_envs: int | None = None
    """games at a time, if not as many as the script plays"""

    def make(self, settings: dict, env_id: str, device: str) -> Any:
        """The model that learns."""
        module, _, name = self.algorithm.rpartition(".")
        envs = env_id
        if self.policy == "CnnPolicy":
            from stable_baselines3.common.env_util import make_atari_env
            from stable_baselines3.common.vec_env import VecFrameStack

            # Of its two vector environments DummyVecEnv is the faster one on two cores.
            envs = VecFrameStack(make_atari_env(env_id, self.num_envs or settings["num_envs"]), n_stack=4)
        algorithm = getattr(importlib.import_module(module), name)
        return algorithm(self.policy, envs, device=device, **self.arguments(settings))


@dataclass(frozen=True)
class Contest:
    """What is run, and against what."""

    settings: dict[str, float]
    """flags of the script, with which the peer agrees"""
    parts: dict[str, tuple[str, ...]]
    """functions as seen from the script, by what they do; f(): what f returns; "- x": of the part above"""
    variants: tuple[str, ...] = ("",)
    """flags of each contender beside those"""
    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    threads: int = 1
    peer: Peer | None = None


def off_policy(settings: dict, policy: str = "hidden_size", critics: str = "hidden_size") -> dict:
    """Arguments of an algorithm with a replay buffer; by what names the settings tell the widths."""
    arguments = {name: settings[name] for name in ("batch_size", "learning_starts")}
    sizes = {"pi": [settings[policy]] * 2, "qf": [settings[critics]] * 2}
    return arguments | {"policy_kwargs": {"net_arch": sizes}}


def on_policy(settings: dict) -> dict:
    """Arguments of PPO."""
    rollout = settings["num_steps"] * settings["num_envs"]
    sizes = {"n_steps": settings["num_steps"], "batch_size": rollout // settings["num_minibatches"]}
    return sizes | {"n_epochs": settings["update_epochs"]}


def atari(settings: dict, peer: Peer, network: str = "AtariAgent", optimizer: str = "Adam") -> Contest:
    """On Pong, of a script with this network and this optimiser of PyTorch's."""
    parts = {
        "environments": ("AtariGames.step",),
        "forward passes": (f"{network}.forward",),
        "backward pass": ("torch.Tensor.backward",),
        f"clipping and {optimizer}": ("nn.utils.clip_grad_norm_", f"torch.optim.{optimizer}.step"),
    }
    return Contest(settings, parts, ("", "--bf16"), ("PongNoFrameskip-v4",), threads=2, peer=peer)


A2C = atari(
    {"num_envs": 16, "num_steps": 5, "total_timesteps": 25_000},
    Peer(
        "stable_baselines3.A2C",
        lambda settings: {"n_steps": settings["num_steps"], "vf_coef": 0.25, "ent_coef": 0.01},
        policy="CnnPolicy",
    ),
    optimizer="RMSprop",
)
EPOCHS = {"num_envs": 8, "num_steps": 128, "num_minibatches": 4, "total_timesteps": 15 * 1024}
MUJOCO = {"environment": ("gym.vector.SyncVectorEnv.step",), "- mj_step alone": ("gym.mujoco.mj_step",)}
ADAM = {"Adam": ("torch.optim.Adam.step",)}
CONTESTS = {
    "ppo_continuous": Contest(
        settings={"num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10}
        | {"hidden_size": 256, "total_timesteps": 9 * 2048},
        parts=MUJOCO | {"policy": ("numpy_actor()",), "gradient": ("ppo_gradient",)} | ADAM,
        variants=("", "--compile"),
        peer=Peer(
            "stable_baselines3.PPO",
            lambda settings: (
                on_policy(settings) | {"policy_kwargs": {"net_arch": [settings["hidden_size"]] * 2}}
            ),
        ),
    ),
    "sac_continuous": Contest(
        settings={"num_envs": 1, "batch_size": 256, "hidden_size": 256}
        | {"learning_starts": 1000, "total_timesteps": 6000},
        parts=MUJOCO
        | {"replay buffer": ("ReplayBuffer.add", "ReplayBuffer.sample")}
        | {"gradient of the critics": ("critic_gradient",), "gradient of the policy": ("actor_gradient",)}
        | ADAM,
        variants=("", "--compile", "--compile --bf16"),
        peer=Peer("stable_baselines3.SAC", off_policy),
    ),
    "crossq_continuous": Contest(
        settings={"num_envs": 1, "batch_size": 256, "policy_hidden_size": 256, "critic_hidden_size": 256}
        | {"learning_starts": 1000, "total_timesteps": 6000},
        parts=MUJOCO
        | {"replay buffer": ("ReplayBuffer.add", "ReplayBuffer.sample")}
        | {"gradient of the critics": ("crossq_critic_gradient",)}
        | {"gradient of the policy": ("crossq_actor_gradient",)}
        | ADAM,
        variants=("", "--compile", "--compile --bf16"),
        peer=Peer(
            "sb3_contrib.CrossQ",
            lambda settings: off_policy(settings, "policy_hidden_size", "critic_hidden_size"),
        ),
    ),
    "a2c_atari": A2C,
    "qcritic_atari": A2C,  # its peer too
    "ppo_atari": atari(
        EPOCHS | {"update_epochs": 4},
        Peer(
            "stable_baselines3.PPO",
            lambda settings: on_policy(settings) | {"normalize_advantage": False},
            policy="CnnPolicy",
        ),
    ),
    # Its own defaults, but for a buffer that would take 56 GB, and for what it waits before it learns.
    "pqn_atari": atari(
        EPOCHS | {"num_minibatches": 8, "update_epochs": 2},
        Peer(
            "stable_baselines3.DQN",
            lambda settings: {"buffer_size": 100_000, "learning_starts": 1000},
            policy="CnnPolicy",
            num_envs=1,
        ),
        "AtariQNetwork",
    ),
    "reinforce_cartpole": Contest(
        env_ids=("CartPole-v1",),
        settings={"total_episodes": 2000},
        parts={
            "environments": ("gym.vector.SyncVectorEnv.step",),
            "policy": ("numpy_logits()",),
            "backward pass and Adam": ("torch.Tensor.backward", "torch.optim.Adam.step"),
        },
    ),
    "qlearning_tabular": Contest(
        env_ids=("FrozenLake-v1", "Blackjack-v1"),
        settings={"total_timesteps": 200_000},
        parts={"environment": ("gym.wrappers.TimeLimit.step", "gym.wrappers.TimeLimit.reset")},
    ),
}
