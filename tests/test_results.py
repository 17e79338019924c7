"""What the README shows is what the committed results say."""

import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, run_script
from results_store import read_results

RESULTS = REPOSITORY / "benchmark" / "results"


def test_table_in_the_readme_is_the_report_of_the_committed_evaluations():
    command = [sys.executable, REPOSITORY / "benchmark" / "report.py", RESULTS / "ppo", "--table"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    readme = (REPOSITORY / "README.md").read_text()
    assert re.search(r"<!-- report -->\n(.*)<!-- end of report -->", readme, re.DOTALL)[1] == report


def runs(grid: str, **settings) -> list:
    """The runs of a grid with these settings, as the report reads them."""
    return [run for run in read_results(RESULTS / grid) if settings.items() <= run.config.items()]


def ends(runs: list) -> np.ndarray:
    """Step and mean return of each run's last evaluation, (runs, 2)."""
    return np.array([[run.mean_returns().index[-1], run.mean_returns().iloc[-1]] for run in runs])


def final_return(runs: list, decimals: int) -> str:
    returns = ends(runs)[:, 1]
    stderr = returns.std(ddof=1) / np.sqrt(len(returns))
    return f"{returns.mean():,.{decimals}f} ± {stderr:,.{decimals}f}"


def two_returns(runs: list) -> str:
    (first_step, first), (last_step, last) = sorted(ends(runs).tolist(), key=lambda end: end[1])
    assert 10_000_000 <= first_step == last_step < 10_100_000
    return f"{first:,.0f} and {last:,.0f} after 10M (2 runs)"


def in_training(runs: list) -> str:
    """Mean return of each run's last 100 games of training, in the order of the last evaluations."""
    runs = sorted(runs, key=lambda run: run.mean_returns().iloc[-1])
    return " and ".join(
        f"{run.at('charts/return_mean_100', run.mean_returns().index[-1]):,.0f}" for run in runs
    )


def steps_to_18(runs: list) -> str:
    means = [run.mean_returns() for run in runs]
    past = [mean.index[mean >= 18][0] for mean in means if (mean >= 18).any()]
    least, most = (f"{step / 1e6:.2f}".removesuffix("0") for step in (min(past), max(past)))
    return f"past 18 after {least}M to {most}M steps ({len(past)} of {len(runs)} runs)"


def episodes_to_500(runs: list) -> str:
    first = [(run, run.mean_returns()) for run in runs]
    first = [(run, means.index[means == 500][0]) for run, means in first if (means == 500).any()]
    episodes = [run.at("charts/episodes", step) for run, step in first]
    least, most = min(episodes), max(episodes)
    return f"500 in {len(first)} of {len(runs)} seeds, first after {least:.0f} to {most:.0f} episodes"


def test_headlines_of_the_readme_are_those_of_all_committed_runs():
    cheetah = runs("ppo", script="ppo_continuous", env_id="HalfCheetah-v4")
    sac = runs("sac", env_id="HalfCheetah-v4")
    crossq = [runs("crossq", env_id=env_id) for env_id in ("HalfCheetah-v4", "Walker2d-v4")]
    assert {step for curve in crossq for step, _ in ends(curve)} == {300_000}
    a2c = [run for grid in ("a2c", "pong", "pong_10m") for run in runs(grid, script="a2c_atari")]
    a2c = [run for run in a2c if run.config["env_id"].startswith("Pong")]
    (whole,) = ends(runs("pong_10m"))
    pong = runs("ppo_pong", ent_coef=0.01)
    longest = max(ends(pong), key=lambda end: end[0])
    (low_entropy,) = ends(runs("ppo_pong", ent_coef=0.001))
    pqn = runs("pqn_settings", num_minibatches=8)
    (pqn_whole,) = runs("pqn", env_id="PongNoFrameskip-v4", num_minibatches=8)
    ((last_step, pqn_end),) = ends([pqn_whole])
    assert 10_000_000 <= last_step < 10_100_000
    wall = runs("breakout", script="pqn_atari", num_minibatches=8)
    invaders = runs("pqn", env_id="SpaceInvadersNoFrameskip-v4", num_envs=8, num_minibatches=8)
    more_games = runs("pqn", env_id="SpaceInvadersNoFrameskip-v4", num_envs=32, num_steps=32)
    ((last_step, more_games_end),) = ends(more_games)
    assert 10_000_000 <= last_step < 10_100_000
    lake = runs("qlearning", env_id="FrozenLake-v1", map_name=None)
    headlines = {
        "ppo_continuous": f"HalfCheetah-v4, 1M steps: {final_return(cheetah, 0)}",
        "sac_continuous": f"HalfCheetah-v4, 1M steps: {final_return(sac, 0)} ({len(sac)} seeds)",
        "crossq_continuous": "after 300,000 steps "
        f"HalfCheetah-v4 {final_return(crossq[0], 0)}, Walker2d-v4 {final_return(crossq[1], 0)} "
        f"({len(crossq[0])} seeds each)",
        "ppo_atari": f"Pong: {steps_to_18(pong)}; {longest[1]:.1f} after {longest[0] / 1e6:.0f}M (1 run), "
        f"{low_entropy[1]:.1f} after {low_entropy[0] / 1e6:.2f}M with `--ent-coef 0.001` (1 run); "
        f"Breakout: {two_returns(runs('breakout', script='ppo_atari', gae_lambda=0.65))}",
        "pqn_atari": f"Pong: {steps_to_18([*pqn, pqn_whole])}; {final_return(pqn, 1)} after 1.9M (3 runs), "
        f"{pqn_end:.1f} after 10M (1 run); "
        f"Breakout: {two_returns(wall)}, the last 100 games in training {in_training(wall)}; "
        f"SpaceInvaders: {two_returns(invaders)}, in training {in_training(invaders)}, with "
        f"`--num-envs 32 --num-steps 32` {more_games_end:,.0f} and {in_training(more_games)} (1 run)",
        "a2c_atari": f"Pong: {steps_to_18(a2c)}; {whole[1]:.1f} after {whole[0] / 1e6:.0f}M (1 run); "
        f"Breakout: {two_returns(runs('breakout', script='a2c_atari'))}",
        "qcritic_atari": f"Pong: {steps_to_18(runs('pong', script='qcritic_atari'))}",
        "reinforce_cartpole": f"CartPole-v1: {episodes_to_500(runs('reinforce', estimator='baseline'))}",
        "qlearning_tabular": f"FrozenLake-v1: {final_return(lake, 3)}",
    }
    readme = (REPOSITORY / "README.md").read_text()
    shown = dict(re.findall(r"(?m)^\| \[`(\w+)\.py`\].*?\|.*?\| (.*?) \|", readme))
    assert {script: shown[script] for script in headlines} == headlines


@pytest.mark.parametrize(("algorithm", "score"), [("ppo", 6000), ("sac", 10000), ("crossq", 10000)])
def test_committed_cheetahs_run(tmp_path, algorithm, score):
    """A random policy's returns lie about -300."""
    model, script = RESULTS / algorithm / "HalfCheetah-v4.pt", f"{algorithm}_continuous"
    played = run_script(script, "--evaluate", model, "--greedy", "--eval-episodes", 3, cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert float(re.search(r"mean ([\d.]+)", played.stdout)[1]) > score


@pytest.mark.parametrize(
    ("script", "model", "score"),
    [
        ("a2c_atari", "a2c/PongNoFrameskip-v4.pt", 10),
        ("a2c_atari", "a2c/SpaceInvadersNoFrameskip-v4.pt", 300),
        ("ppo_atari", "breakout/BreakoutNoFrameskip-v4.pt", 100),
    ],
)
def test_committed_atari_players_score(tmp_path, script, model, score):
    """A random policy loses Pong by 20 points, makes about 150 in SpaceInvaders and 1 in Breakout."""
    model = RESULTS / model
    played = run_script(script, "--evaluate", model, "--eval-episodes", 2, cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert float(re.search(r"mean (-?[\d.]+)", played.stdout)[1]) > score
