"""What a run leaves behind, and what its saved policy scores."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
from conftest import SHORT_RUN, contents, evaluation_seed, flags, run_python, run_script, scalars, script_path

TAGS = {
    *("charts/episodic_return", "charts/episodic_return_min", "charts/episodic_return_max"),
    *("charts/episodic_length", "charts/return_mean_100", "charts/SPS", "charts/learning_rate"),
    *("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/total", "losses/grad_norm"),
    *("losses/explained_variance", "losses/approx_kl", "losses/clipfrac"),
    *("values/predictions", "values/targets", "values/advantages"),
    *("eval/return_mean", "eval/return_stderr", "eval/length_mean"),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """An empty folder but for a copy of the script, which has trained in it."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(script_path("ppo_continuous"), folder)
    done = run_python("ppo_continuous.py", *flags(SHORT_RUN), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="session")
def run_dir(folder) -> Path:
    return next((folder / "runs").iterdir())


@pytest.fixture
def play(ppo, monkeypatch, capfd):
    """Plays a saved policy in this process; returns what each episode scored, and the summary's figures."""

    def run(*flags) -> tuple[list[float], list[float]]:
        monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", "--evaluate", *map(str, flags)])
        ppo.main()
        return parse(capfd.readouterr().out)

    return run


def parse(output: str) -> tuple[list[float], list[float]]:
    *episodes, summary = output.splitlines()
    lines = [re.fullmatch(rf"episode {i}: return (.*), length \d+", line) for i, line in enumerate(episodes)]
    figures = re.fullmatch("mean (.*), standard deviation (.*), standard error (.*)", summary)
    return [float(line[1]) for line in lines], [float(figure) for figure in figures.groups()]


def read_evaluations(run_dir: Path) -> list[dict[str, float]]:
    with (run_dir / "evaluations.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_nothing_but_the_run_folder_is_written(folder, run_dir):
    assert {path.name for path in folder.iterdir()} == {"ppo_continuous.py", "runs"}
    assert re.fullmatch(r"Hopper-v4__ppo_continuous__seed1__\d{10}", run_dir.name)
    names = sorted(re.sub(r"^(events\.out\.tfevents).*", r"\1", path.name) for path in run_dir.iterdir())
    assert names == ["checkpoint.pt", "config.json", "evaluations.csv", "events.out.tfevents", "model.pt"]


def test_config_holds_every_argument_and_the_versions(ppo, run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    arguments = json.loads(json.dumps(vars(ppo.Args(**SHORT_RUN)), default=str))
    assert {name: config[name] for name in arguments} == arguments
    assert config["torch"] == torch.__version__
    assert config["gymnasium"] == gym.__version__
    assert config["python"] == sys.version.split()[0]
    assert {"mujoco", "cpu", "gpu"} < config.keys()


def test_commit_is_that_of_the_script_if_there_is_one(ppo, train, tmp_path, monkeypatch):
    """Before the first commit git prints the word HEAD; some machines have no git."""
    monkeypatch.setattr(ppo, "__file__", str(tmp_path / "ppo_continuous.py"))

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def commit_of_a_run(name: str) -> str | None:
        train(name, total_timesteps=128, eval_interval=0)
        return json.loads(Path(name, "config.json").read_text())["git_commit"]

    if shutil.which("git"):
        assert commit_of_a_run("elsewhere") is None
        git("init")
        assert commit_of_a_run("new") is None
        git("-c", "user.name=n", "-c", "user.email=e", "commit", "--allow-empty", "-m", "first")
        assert commit_of_a_run("committed") == git("rev-parse", "HEAD").strip()
    monkeypatch.setenv("PATH", "")
    assert commit_of_a_run("without git") is None


def test_evaluations_are_one_row_an_episode(run_dir):
    rows = read_evaluations(run_dir)
    assert list(rows[0]) == ["global_step", "episode", "return", "length"]
    assert [row["global_step"] for row in rows] == [384] * 3 + [768] * 3 + [1024] * 3
    assert [row["episode"] for row in rows] == [0, 1, 2] * 3


def test_tensorboard_has_the_tags_of_the_contract(run_dir):
    logged = scalars(run_dir)
    assert logged.keys() == TAGS
    steps = list(range(128, 1025, 128))
    assert all(
        [step for step, _ in logged[tag]] == steps for tag in TAGS if tag.startswith(("losses", "values"))
    )
    rows = read_evaluations(run_dir)
    for i, (step, mean) in enumerate(logged["eval/return_mean"]):
        returns = [row["return"] for row in rows if row["global_step"] == step]
        assert mean == pytest.approx(np.mean(returns))
        assert logged["eval/return_stderr"][i][1] == pytest.approx(np.std(returns, ddof=1) / math.sqrt(3))
        lengths = [row["length"] for row in rows if row["global_step"] == step]
        assert logged["eval/length_mean"][i][1] == pytest.approx(np.mean(lengths))


def test_saved_policy_scores_in_a_fresh_process_what_training_reported(ppo, folder, run_dir):
    before = contents(folder)
    seed = evaluation_seed(1, 1024)
    options = ["--eval-episodes", 3, "--seed", seed, "--no-greedy"]
    played = run_script("ppo_continuous", "--evaluate", run_dir, *options, cwd=folder)
    assert played.returncode == 0, played.stderr
    returns, (mean, deviation, stderr) = parse(played.stdout)
    expected = [row["return"] for row in read_evaluations(run_dir)[-3:]]
    assert returns == pytest.approx(expected, abs=0.006)
    assert mean == pytest.approx(np.mean(expected), abs=0.006)
    assert deviation == pytest.approx(np.std(expected, ddof=1), abs=0.006)
    assert stderr == pytest.approx(np.std(expected, ddof=1) / math.sqrt(3), abs=0.006)
    assert contents(folder) == before


def test_policy_is_its_statistics_too(play, run_dir, tmp_path):
    model = torch.load(run_dir / "model.pt", weights_only=True)
    torch.save(model, tmp_path / "same.pt")
    for name in ("mean", "var"):
        model["agent"][f"obs_moments.{name}"].fill_(name == "var")
    torch.save(model, tmp_path / "without.pt")
    whole, same, without = (play(x) for x in (run_dir, tmp_path / "same.pt", tmp_path / "without.pt"))
    assert whole == same != without


def test_greedy_is_another_policy_than_sampled(play, run_dir):
    """Greedy unless told otherwise, whatever the run was told."""
    sampled, greedy = play(run_dir, "--no-greedy"), play(run_dir)
    assert len(sampled[0]) == len(greedy[0]) == 10
    assert sampled == play(run_dir, "--no-greedy") != play(run_dir, "--no-greedy", "--seed", 2)
    assert greedy == play(run_dir, "--greedy") != sampled


@pytest.fixture(scope="session")
def egl(tmp_path_factory) -> str:
    command = ("-c", "import mujoco; mujoco.GLContext(8, 8).make_current()")
    if run_python(*command, cwd=tmp_path_factory.mktemp("egl"), MUJOCO_GL="egl").returncode:
        pytest.skip("MuJoCo cannot render through EGL here")
    return "egl"


def assert_shows_an_episode(video: Path, length: int) -> None:
    frames = list(iio.imiter(video, plugin="FFMPEG"))
    assert len(frames) == length
    assert frames[0].std() > 10
    assert np.abs(frames[-1].astype(int) - frames[0]).max() > 10


def test_training_records_the_first_episode_of_each_evaluation(tmp_path, egl):
    settings = flags(SHORT_RUN | {"eval_interval": 512, "eval_episodes": 1})
    done = run_script(
        "ppo_continuous", *settings, "--run-dir", "run", "--capture-video", cwd=tmp_path, MUJOCO_GL=egl
    )
    assert done.returncode == 0, done.stderr
    rows = read_evaluations(tmp_path / "run")
    assert {path.name for path in (tmp_path / "videos/run").iterdir()} == {"step_512.mp4", "step_1024.mp4"}
    for row in rows:
        assert_shows_an_episode(tmp_path / f"videos/run/step_{row['global_step']:.0f}.mp4", row["length"])


FAR_AWAY = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib, mujoco
script = importlib.import_module(sys.argv[2])
env = script.make_envs(script.Args(env_id="HalfCheetah-v4"), 1, render=True).envs[0]
env.reset(seed=0)
env.unwrapped.data.qpos[0] = 500
mujoco.mj_forward(env.unwrapped.model, env.unwrapped.data)
frame = env.render().astype(int)
print(((frame[..., 0] - frame[..., 2]) > 40).sum(), frame[-20:].std(axis=1).max())
"""


@pytest.mark.parametrize("script", ["ppo_continuous", "sac_continuous", "crossq_continuous"])
def test_camera_and_ground_follow_the_robot(tmp_path, egl, script):
    """The cheetah is the only thing in the picture that is red rather than blue; the ground is chequered."""
    shown = run_python("-c", FAR_AWAY, script_path(script).parent, script, cwd=tmp_path, MUJOCO_GL=egl)
    red, contrast = map(float, shown.stdout.split())
    assert red > 1000, shown.stderr
    assert contrast > 50


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_saved_policy_is_recorded(run_dir, tmp_path, egl, kind):
    options = ["--eval-episodes", 1, "--capture-video", "--greedy" if kind == "greedy" else "--no-greedy"]
    played = run_script("ppo_continuous", "--evaluate", run_dir, *options, cwd=tmp_path, MUJOCO_GL=egl)
    assert played.returncode == 0, played.stderr
    length = int(re.search(r"length (\d+)", played.stdout)[1])
    assert_shows_an_episode(tmp_path / "videos" / run_dir.name / f"{kind}.mp4", length)


class Screen(io.StringIO):
    """Standard error, on a terminal or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize(("minutes", "terminal"), [(0.5, True), (0.5, False), (5, False)])
def test_evaluation_shows_its_progress(ppo, monkeypatch, minutes, terminal):
    """On a terminal soon, elsewhere a line a minute. Of 1,000 steps each takes its part of the minutes."""
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    clock, envs = [0.0], ppo.make_envs(ppo.Args(env_id="Pendulum-v1"), 1)

    def policy(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        clock[0] += 60 * minutes / 1000
        return np.zeros((1, 1), np.float32)

    ppo.evaluate(policy, envs, episodes=5, seed=0)
    lines = screen.getvalue().splitlines()
    if terminal:
        assert screen.getvalue().count("\r") > 5
        assert "evaluation" in screen.getvalue()
        assert "3 of 5 episodes" in screen.getvalue()
    else:
        assert len([line for line in lines if "of 5 episodes" in line]) == (4 if minutes == 5 else 0)


def test_track_makes_a_run_of_weights_and_biases(tmp_path):
    """One that is resumed goes on under the same name."""
    start = [*flags(SHORT_RUN), "--run-dir", "run", "--track", "--wandb-project", "a_project"]
    for first_step, last_step in ((128, 512), (640, 1024)):
        options = [*start, "--total-timesteps", last_step]
        done = run_script("ppo_continuous", *options, cwd=tmp_path, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"run", "wandb"}
        [log] = (tmp_path / "wandb" / "latest-run").glob("run-run.wandb")
        logged = log.read_bytes()
        texts = (*TAGS, "a_project", "Hopper-v4", "checkpoint_interval")
        assert all(text.encode() in logged for text in texts)
        # Before the digits stands how many they are; after them any byte, another digit too.
        found = re.findall(rb"global_step\W{0,3}(\W)(\d+)", logged, re.DOTALL)
        steps = {int(digits[: length[0]]) for length, digits in found}
        assert (min(steps), max(steps)) == (first_step, last_step)
        start = ["--resume", "run"]


@pytest.mark.parametrize(("goal", "last_step"), [(-1e6, 384), (1e6, 1024)])
def test_stop_at_return_ends_training_at_the_evaluation_that_reaches_it(train, goal, last_step):
    assert train(stop_at_return=goal)["global_step"] == last_step
    assert read_evaluations(Path("run"))[-1]["global_step"] == last_step


@pytest.mark.parametrize("name", ["HalfCheetah", "Walker2d", "Hopper", "Humanoid", "InvertedDoublePendulum"])
@pytest.mark.parametrize("version", ["v4", "v5"])
def test_mujoco_environments(train, name, version):
    one_update(train, f"{name}-{version}")


def test_pendulum(train):
    one_update(train, "Pendulum-v1")


def one_update(train, env_id: str) -> None:
    checkpoint = train(env_id=env_id, total_timesteps=128, eval_interval=0, eval_episodes=1)
    assert checkpoint["global_step"] == 128
    assert not any(path.name.startswith("MUJOCO_LOG") for path in Path().iterdir())
