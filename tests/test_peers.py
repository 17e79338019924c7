"""Stable-Baselines3 under the evaluation of the scripts, checked against its own of the same episodes."""

import csv
import json
import re
import sys

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, contents, load_script, run_python, scalars
from results_store import read_run
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

SHORT = {"env_id": "CartPole-v1", "algorithm": "dqn", "total_timesteps": 1500, "eval_interval": 1000}


@pytest.fixture(scope="session")
def peers():
    return load_script("peers", REPOSITORY / "benchmark")


def evaluations(run_dir) -> list[tuple[int, float, int]]:
    rows = list(csv.reader((run_dir / "evaluations.csv").open()))[1:]
    return [(int(step), float(episode_return), int(length)) for step, _, episode_return, length in rows]


@pytest.mark.parametrize(
    ("algorithm", "env_id", "flags"),
    [("dqn", "CartPole-v1", {"zoo": True}), ("ppo", "InvertedPendulum-v4", {"same_settings": True})],
)
def test_evaluation_is_that_of_stable_baselines3(algorithm, env_id, flags, peers, tmp_path):
    """Greedy episodes from the same starts; for PPO with the statistics of VecNormalize."""
    settings = {"total_timesteps": 2048, "eval_interval": 10_000, "eval_episodes": 4, "greedy": True} | flags
    args = peers.Args(algorithm, env_id, run_dir=tmp_path / "run", **settings)
    model = peers.train(args)
    script = sys.modules["ppo_continuous"]
    envs = env = peers.Environments(script.make_envs(args, 4), atari=False)
    if statistics := model.get_vec_normalize_env():
        env = VecNormalize(envs, training=False, norm_reward=False)
        env.obs_rms = statistics.obs_rms
    step = model.num_timesteps
    stream = 2**31  # of the evaluations
    envs._seeds = [int(np.random.SeedSequence((args.seed, step, stream)).generate_state(1)[0])]
    expected = evaluate_policy(model, env, 4, return_episode_rewards=True, warn=False)
    played = evaluations(tmp_path / "run")
    assert [row[0] for row in played] == [step] * 4
    np.testing.assert_allclose(sorted(row[1:] for row in played), sorted(zip(*expected, strict=True)))
    assert bool(statistics) == (algorithm == "ppo")


def test_same_settings(peers, tmp_path, ppo):
    """PPO's are the script's; classic ones are its own, but for networks and step sizes."""
    settings = {"total_timesteps": 2048, "eval_interval": 0, "hidden_size": 8}
    models = {}
    for name in ("same", "classic"):
        flags = settings | {f"{name}_settings": True, "run_dir": tmp_path / name}
        models[name] = peers.train(peers.Args("ppo", "Pendulum-v1", **flags))
    ours = ppo.Args()
    agree = {
        "n_steps": ours.num_steps,
        "batch_size": ours.num_steps // ours.num_minibatches,
        "n_epochs": ours.update_epochs,
        "vf_coef": ours.vf_coef / 2,
        "gae_lambda": ours.gae_lambda,
        "gamma": ours.gamma,
        "ent_coef": ours.ent_coef,
        "max_grad_norm": ours.max_grad_norm,
    }
    assert {name: getattr(models["same"], name) for name in agree} == agree
    assert models["same"].clip_range(1) == models["same"].clip_range(0.5) == ours.clip_coef
    plain = peers.PPO("MlpPolicy", "Pendulum-v1")
    for name in agree:
        assert getattr(models["classic"], name) == getattr(plain, name)
    for name, step_size in (("same", ours.learning_rate), ("classic", 3e-4)):
        assert models[name].lr_schedule(0.5) == pytest.approx(step_size / 2)
        assert models[name].policy.mlp_extractor.policy_net[0].out_features == 8
        assert models[name].get_vec_normalize_env()


def test_run_folder(peers, tmp_path):
    """Same seed, same evaluations, sampled ones too, with others before them or not; a report reads it."""
    args = SHORT | {"algorithm": "a2c", "eval_episodes": 3}
    for name, interval in (("a", 1000), ("b", 1000), ("c", 100_000)):
        peers.train(peers.Args(**(args | {"eval_interval": interval}), run_dir=tmp_path / name))
    steps = [1000, 1500]
    assert [row[0] for row in evaluations(tmp_path / "a")] == np.repeat(steps, 3).tolist()
    assert evaluations(tmp_path / "a") == evaluations(tmp_path / "b")
    assert evaluations(tmp_path / "a")[3:] == evaluations(tmp_path / "c")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["script"], config["env_id"], config["seed"]) == ("sb3_a2c", "CartPole-v1", 1)
    assert config["stable-baselines3"]
    logged = scalars(tmp_path / "a")
    assert {"charts/episodic_return", "charts/SPS", "losses/value_loss", "eval/return_mean"} <= logged.keys()
    assert logged["losses/entropy"][0][1] > 0
    run = read_run(tmp_path / "a")
    assert run.mean_returns().index.tolist() == steps


def test_defaults_of_dqn_on_atari(peers, tmp_path):
    settings = {"total_timesteps": 120, "eval_interval": 0, "run_dir": tmp_path / "run"}
    model = peers.train(peers.Args("dqn", "PongNoFrameskip-v4", **settings))
    assert model.num_timesteps == 120
    assert model.replay_buffer.observations.shape == (100_000, 1, 4, 84, 84)
    plain = peers.DQN("MlpPolicy", "CartPole-v1")
    for name in ("learning_starts", "batch_size", "train_freq", "target_update_interval", "gradient_steps"):
        assert getattr(model, name) == getattr(plain, name)


@pytest.mark.parametrize(
    ("algorithm", "env_id", "flags"),
    [("dqn", "CartPole-v1", {}), ("ppo", "Pendulum-v1", {"same_settings": True})],
)
def test_resume(algorithm, env_id, flags, peers, tmp_path, monkeypatch):
    """Of a run that ends after 4500 steps goes on what was saved after 4096, and only that is left of it."""

    def stop(watch):
        if watch.num_timesteps > 4500:
            raise InterruptedError
        return True

    flags = flags | {"eval_interval": 1024, "eval_episodes": 1, "checkpoint_interval": 2048}
    run_dir, going_on = tmp_path / "run", []
    args = peers.Args(algorithm, env_id, total_timesteps=6200, run_dir=run_dir, **flags)
    with monkeypatch.context() as patch:
        patch.setattr(peers.Watch, "_on_step", stop)
        with pytest.raises(InterruptedError):
            peers.train(args)
    assert [path.name for path in run_dir.glob("model_*")] == ["model_4096.zip"]
    saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]

    def observe(script, args, model):
        going_on.append((args, model.num_timesteps))
        for name, value in model.policy.state_dict().items():
            assert torch.equal(value, saved[name])
        if algorithm == "ppo":
            assert model.get_vec_normalize_env().obs_rms.count > 4096
        else:
            assert model.replay_buffer.pos == 4096
        return open_run(script, args, model)

    open_run = peers.open_run
    monkeypatch.setattr(peers, "open_run", observe)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--resume", str(run_dir), "--seed", "2"])
    model = peers.train(peers.arguments())
    ((args, step),) = going_on
    assert (step, args.algorithm, args.env_id) == (4096, algorithm, env_id)
    assert (args.total_timesteps, args.seed) == (6200, 2)
    steps = sorted({step for step, _, _ in evaluations(run_dir)})
    assert steps[-1] == model.num_timesteps >= 6144
    assert len(steps) == len(evaluations(run_dir))  # none twice
    assert [path.name for path in run_dir.glob("model_*")] == [f"model_{steps[-1]}.zip"]


def test_stop_at_return(peers, tmp_path):
    model = peers.train(peers.Args(**SHORT, stop_at_return=1.0, eval_episodes=1, run_dir=tmp_path / "run"))
    assert model.num_timesteps < 1100
    assert len(evaluations(tmp_path / "run")) == 1


def test_truncation_reaches_the_learner(peers):
    """Pendulum is truncated after 200 steps, and never terminated."""
    script = load_script("ppo_continuous")
    envs = peers.Environments(script.make_envs(script.Args(env_id="Pendulum-v1"), 2), atari=False)
    envs.reset()
    for step in range(200):
        obs, _, done, infos = envs.step(np.zeros((2, 1), np.float32))
        assert done.tolist() == [step == 199] * 2
    assert [info["TimeLimit.truncated"] for info in infos] == [True, True]
    assert not np.allclose(obs, [info["terminal_observation"] for info in infos])
    assert [length for _, length in envs.episodes] == [200, 200]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--algorithm=dqn", "--env-id=Pendulum-v1"], "dqn on Pendulum-v1"),
        (["--algorithm=ppo", "--env-id=Pendulum-v1", "--zoo"], "no such settings"),
        (["--algorithm=ppo", "--env-id=NoSuch-v1"], "NoSuch"),
        (
            ["--algorithm=ppo", "--env-id=Pendulum-v1", "--eval-episodes=0"],
            "--eval-episodes must be finite and above 0",
        ),
        (["--algorithm=ppo", "--env-id=Pendulum-v1", "--run-dir=taken"], "taken"),
        (["--resume=taken"], "no taken/checkpoint.pt"),
    ],
)
def test_bad_input(flags, complaint, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    before = contents(tmp_path)
    refused = run_python(REPOSITORY / "benchmark" / "peers.py", *flags, cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert re.search(f"^error: .*{complaint}.*\n\\Z", refused.stderr, re.MULTILINE), refused.stderr
    assert contents(tmp_path) == before


def test_unknown_algorithm(tmp_path):
    flags = ("--algorithm=vpg", "--env-id=Pendulum-v1")
    refused = run_python(REPOSITORY / "benchmark" / "peers.py", *flags, cwd=tmp_path)
    assert refused.returncode == 2
    assert "vpg" in refused.stderr
    assert not list(tmp_path.iterdir())
