"""Stable-Baselines3 in the environments of the scripts, evaluated as they are, with the same run folder.

    python benchmark/peers.py --algorithm ppo --env-id HalfCheetah-v4 --seed 1 --greedy
    python benchmark/peers.py --algorithm a2c --env-id PongNoFrameskip-v4 --zoo --total-timesteps 10000000

Environments, evaluation (its seeds too) and run folder are those of algos/ppo_continuous.py itself, for Atari
of algos/a2c_atari.py. What learns is Stable-Baselines3, with

    its own defaults    unlike the scripts it normalises neither observations nor rewards and keeps its step
                        size; PPO has 64-64 networks and log standard deviations that start at 0;
                        on Atari DQN's buffer holds 100,000 steps, not a million;
    --zoo               what the RL Zoo tuned: PPO on HalfCheetah (observations and rewards normalised), A2C
                        on Atari (epsilon inside RMSprop's root), SAC on MuJoCo, DQN on CartPole and Atari;
    --same-settings     what the scripts have by default, for PPO, SAC and A2C: their networks (PPO's of
                        --hidden-size) and falling step sizes, the random steps that SAC begins with, and for
                        PPO VecNormalize, which does nearly what ppo_continuous.py does; to the advantages'
                        deviation it always adds 1e-8, not --norm-adv-eps;
    --classic-settings  the same with PPO's settings of benchmark/grids/ppo_classic.toml.

Atari: 16 games for PPO and A2C; as in the scripts a lost life ends an episode for the learner alone, which
sees the signs of the rewards. DQN is evaluated greedily, whatever --greedy says. With --checkpoint-interval a
run can be resumed, replay buffer included, but does not end with the bits of one that was never stopped.
"""

import argparse
import importlib.metadata
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

import ale_py
import gymnasium as gym
import numpy as np
import torch
from cli import error, parse
from contests import on_policy
from results_store import add_to_config, is_resumable, read_config
from scripts import ALGOS, load_script
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

ALGORITHMS = {"ppo": PPO, "a2c": A2C, "sac": SAC, "dqn": DQN}
# The scripts' tags for what Stable-Baselines3 logs.
TAGS = dict.fromkeys(("policy_gradient_loss", "policy_loss", "actor_loss"), "losses/policy_loss")
TAGS |= dict.fromkeys(("value_loss", "critic_loss"), "losses/value_loss")
TAGS |= {"loss": "losses/total", "entropy_loss": "losses/entropy", "approx_kl": "losses/approx_kl"}
TAGS |= {"clip_fraction": "losses/clipfrac", "explained_variance": "losses/explained_variance"}
TAGS |= {"learning_rate": "charts/learning_rate"}


@dataclass
class Args:
    algorithm: Literal["ppo", "a2c", "sac", "dqn"]
    """algorithm of Stable-Baselines3"""
    env_id: str
    """Gymnasium environment: an Atari game, or one with flat observations"""
    seed: int = 1
    """seed of every generator of the run"""
    total_timesteps: int = 1_000_000
    """environment steps to train for, over all environments; rounded up to whole rollouts"""
    torch_threads: int = 1
    """CPU threads of PyTorch, and of Atari games"""
    run_dir: Path | None = None
    """folder of this run (default: runs/<env id>__sb3_<algorithm>__seed<seed>__<unix time>)"""
    greedy: bool = False
    """evaluate the mode of the policy instead of sampling from it"""
    eval_interval: int = 100_000
    """environment steps between evaluations; the end of training is one more (0: none at all)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    zoo: bool = False
    """the RL Zoo's tuned settings instead of Stable-Baselines3's defaults"""
    same_settings: bool = False
    """the script's settings instead of Stable-Baselines3's defaults"""
    classic_settings: bool = False
    """PPO's settings of benchmark/grids/ppo_classic.toml instead of Stable-Baselines3's defaults"""
    hidden_size: int = 256
    """units in each of the two layers of PPO's networks, unless they are --zoo's or the defaults"""
    checkpoint_interval: int = 2**32
    """environment steps between checkpoints, each as large as the replay buffer; by default there are none"""
    stop_at_return: float | None = None
    """end training once the mean return of an evaluation reaches this"""
    resume: Path | None = None
    """run folder to go on with, under its own settings; flags given beside this one override them"""
    # What a script has beside these.
    device: ClassVar[str] = "cpu"
    capture_video: ClassVar[bool] = False
    track: ClassVar[bool] = False


def settings(args: Args, script: ModuleType, atari: bool) -> dict:
    """Arguments of the algorithm but its defaults; none where a flag knows of none."""
    large = {"net_arch": {"pi": [256, 256], "vf": [256, 256]}}
    game = args.env_id.split("-")[0]
    flags = {"zoo": args.zoo, "same": args.same_settings, "classic": args.classic_settings}
    match (args.algorithm, " ".join(name for name, given in flags.items() if given)):
        case ("ppo", "zoo") if game == "HalfCheetah":
            ppo = {"n_steps": 512, "batch_size": 64, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.92}
            ppo |= {"learning_rate": 2.0633e-5, "ent_coef": 0.000402, "vf_coef": 0.58, "clip_range": 0.1}
            relu = large | {"activation_fn": torch.nn.ReLU, "ortho_init": False, "log_std_init": -2}
            return ppo | {"max_grad_norm": 0.8, "policy_kwargs": relu}
        case ("ppo", "same" | "classic") if not atari:
            ours, layers = vars(script.Args()), [args.hidden_size] * 2
            networks = {"net_arch": {"pi": layers, "vf": layers}, "log_std_init": ours["log_std_init"]}
            if args.classic_settings:  # but for the step size those of Stable-Baselines3
                return {"learning_rate": lambda left: 3e-4 * left, "policy_kwargs": networks}
            ppo = {name: ours[name] for name in ("gamma", "gae_lambda", "ent_coef", "max_grad_norm")}
            ppo |= {"learning_rate": lambda left: ours["learning_rate"] * left, "policy_kwargs": networks}
            # Its value loss is the squared error, ours half of it.
            return ppo | on_policy(ours) | {"clip_range": ours["clip_coef"], "vf_coef": ours["vf_coef"] / 2}
        case ("a2c", "zoo") if atari:
            inside = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"alpha": 0.99, "eps": 1e-5}}
            return {"ent_coef": 0.01, "vf_coef": 0.25, "policy_kwargs": inside}
        case ("a2c", "same") if atari:
            return {"learning_rate": lambda left: 7e-4 * left, "ent_coef": 0.01, "vf_coef": 0.25}
        case ("sac", "zoo" | "same") if not atari:
            return {"learning_starts": 10_000}
        case ("dqn", "zoo") if game == "CartPole":
            dqn = {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000}
            dqn |= {"gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128}
            dqn |= {"exploration_fraction": 0.16, "exploration_final_eps": 0.04}
            return dqn | {"policy_kwargs": {"net_arch": [256, 256]}}
        case ("dqn", "zoo") if atari:
            dqn = {"buffer_size": 100_000, "learning_starts": 100_000, "target_update_interval": 1000}
            return dqn | {"exploration_final_eps": 0.01}
        case ("dqn", "") if atari:
            return {"buffer_size": 100_000}  # a million steps take 56 GB
    return {}


class Environments(VecEnv):
    """A script's environments as Stable-Baselines3 wants them."""

    def __init__(self, envs: gym.vector.VectorEnv, atari: bool):
        self.envs, self.atari = envs, atari
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.episodes: list[list[float]] = []  # return and length of those that ended

    def reset(self) -> np.ndarray:
        obs, info = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        self.frame_number = info.get("episode_frame_number")
        self.episode_return, self.episode_length = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        return obs.copy()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        obs, rewards, terminated, truncated, info = self.envs.step(self.actions)
        over = done = terminated | truncated
        if self.atari:  # of a lost life the game goes on
            over = info["episode_frame_number"] < self.frame_number
            self.frame_number = info["episode_frame_number"]
        self.episode_return += rewards
        self.episode_length += 1
        ended = np.stack((self.episode_return, self.episode_length), axis=1)[over]
        self.episodes += ended.tolist()
        self.episode_return[over], self.episode_length[over] = 0, 0
        infos = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(done):
            last = info["final_obs"][i] if "final_obs" in info else obs[i]
            infos[i] = {"terminal_observation": last.copy()}
            infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
        return obs.copy(), np.sign(rewards) if self.atari else rewards.copy(), done, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: object = None) -> list:
        return [getattr(self.envs, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: object, indices: object = None) -> None:
        setattr(self.envs, attr_name, value)

    def env_method(self, method_name: str, *args, indices: object = None, **kwargs) -> list:
        raise NotImplementedError(method_name)

    def env_is_wrapped(self, wrapper_class: type, indices: object = None) -> list[bool]:
        return [False] * self.num_envs


class Watch(BaseCallback):
    """Ends an iteration of the run where there is something to log, and where the scripts evaluate.

    That is after the update of the rollout that passes an interval.
    """

    def __init__(self, run: "Run", envs: Environments):  # noqa: F821
        super().__init__()
        self.run, self.envs = run, envs

    def _on_training_start(self) -> None:
        self.run.started = time.perf_counter()

    def _on_rollout_start(self) -> None:
        run, step, episodes = self.run, self.num_timesteps, self.envs.episodes
        intervals = (run.args.eval_interval or math.inf, run.args.checkpoint_interval)
        passed = any(step // n > run.global_step // n for n in intervals) or step >= run.args.total_timesteps
        if step > run.global_step and (episodes or passed):
            logged = {k.removeprefix("train/"): v for k, v in self.logger.name_to_value.items()}
            scalars = {TAGS[k]: v for k, v in logged.items() if k in TAGS and math.isfinite(v)}
            if "losses/entropy" in scalars:  # there a loss, the negative of the entropy
                scalars["losses/entropy"] *= -1
            scalars["charts/episodes"] = run.episodes + len(episodes)
            run.end_iteration(step - run.global_step, scalars, list(episodes))
            episodes.clear()

    def _on_step(self) -> bool:
        return not self.run.over

    def _on_training_end(self) -> None:
        self._on_rollout_start()


def make_policy(args: Args, model: BaseAlgorithm, space: gym.Space) -> Callable:
    """What a script's make_policy returns, for a model."""
    normalize = model.get_vec_normalize_env()

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        obs = normalize.normalize_obs(obs) if normalize else obs
        return model.policy.predict(obs, deterministic=args.greedy)[0]

    return act


def saved(folder: Path, step: int) -> tuple[Path, Path, Path]:
    """Where a model, its replay buffer and what VecNormalize knows lie after a number of steps."""
    names = ("model_{}.zip", "buffer_{}.pkl", "normalize_{}.pkl")
    return tuple(folder / name.format(step) for name in names)


def open_run(script: ModuleType, args: Args, model: BaseAlgorithm) -> "Run":  # noqa: F821
    """A run of the script, in which the model is evaluated and saved."""

    class Run(script.Run):
        def open_logs(self) -> None:
            super().open_logs()
            version = importlib.metadata.version("stable-baselines3")
            add_to_config(self.folder, {"stable-baselines3": version})

        def evaluate(self) -> float:
            with torch.random.fork_rng(devices=[]):  # with which a model samples
                torch.manual_seed(self.seed(3))
                return super().evaluate()

        def save(self) -> None:
            if self.global_step < args.checkpoint_interval:
                return
            files = saved(self.folder, self.global_step)
            model.save(files[0])
            if hasattr(model, "replay_buffer"):
                model.save_replay_buffer(files[1])
            if normalize := model.get_vec_normalize_env():
                normalize.save(str(files[2]))
            super().save()  # from now on they are what a resumed run takes
            for pattern in saved(self.folder, "*"):
                for path in {*self.folder.glob(pattern.name)} - {*files}:
                    path.unlink()

    script.make_policy = lambda args, _, space: make_policy(args, model, space)
    run = Run(args, agent=model.policy)
    if args.checkpoint_interval > args.total_timesteps:
        # There is no checkpoint to go on from, whatever ends it.
        sys.excepthook = sys.__excepthook__
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
    return run


def train(args: Args) -> BaseAlgorithm:
    """Train one agent; all that it leaves behind is in its run folder."""
    gym.register_envs(ale_py)
    spec = gym.registry.get(args.env_id)
    atari = spec is not None and str(spec.entry_point).startswith("ale_py")
    script = load_script(ALGOS / ("a2c_atari.py" if atari else "ppo_continuous.py"))
    script.SCRIPT = f"sb3_{args.algorithm}"
    script.check(args)
    arguments = settings(args, script, atari)
    given = args.zoo or args.same_settings or args.classic_settings
    if given and not arguments:
        error(f"there are no such settings of {args.algorithm} for {args.env_id}; see benchmark/peers.py")
    torch.set_num_threads(args.torch_threads)
    num_envs = 16 if atari and args.algorithm in ("ppo", "a2c") else 1
    envs = script.make_envs(args, num_envs, **({"life_loss": True} if atari else {}))
    envs = env = Environments(envs, atari)
    files = ()
    if args.resume:
        script.Args = Args
        files = saved(args.resume, script.load(args.resume / "checkpoint.pt", "global_step")["global_step"])
    if args.algorithm == "ppo" and given:
        gamma = arguments.get("gamma", 0.99)
        env = VecNormalize.load(str(files[2]), envs) if files else VecNormalize(envs, gamma=gamma)
    policy, algorithm = "CnnPolicy" if atari else "MlpPolicy", ALGORITHMS[args.algorithm]
    try:
        if files:
            model = algorithm.load(files[0], env, device="cpu")
        else:
            model = algorithm(policy, env, seed=args.seed, device="cpu", **arguments)
    except (AssertionError, ValueError, MemoryError) as exception:
        error(f"{args.algorithm} on {args.env_id}: {exception}")
    if files and files[1].exists():
        model.load_replay_buffer(files[1])
    steps = args.total_timesteps - model.num_timesteps
    watch = Watch(open_run(script, args, model), envs)
    if steps > 0:
        model.learn(steps, callback=watch, reset_num_timesteps=not files)
    return model


def arguments() -> Args:
    """Those of the command line; beside --resume, what it does not say is the run's own."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--resume", type=Path)
    folder = ahead.parse_known_args()[0].resume
    if folder is None:
        return parse(Args, __doc__)
    if not is_resumable(folder):
        error(f"there is no {folder / 'checkpoint.pt'}")
    config = read_config(folder)
    own = {field.name: config[field.name] for field in fields(Args)} | {"run_dir": None, "resume": folder}
    return parse(Args, __doc__, default=Args(**own))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*out of date", DeprecationWarning)  # MuJoCo's v4 is meant
    train(arguments())
