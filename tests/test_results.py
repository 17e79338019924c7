"""What the README shows is what the committed results say."""

import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY, run_script

RESULTS = REPOSITORY / "benchmark" / "results"


def test_table_in_the_readme_is_the_report_of_the_committed_evaluations():
    command = [sys.executable, REPOSITORY / "benchmark" / "report.py", RESULTS / "ppo", "--table"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    readme = (REPOSITORY / "README.md").read_text()
    assert re.search(r"<!-- report -->\n(.*)<!-- end of report -->", readme, re.DOTALL)[1] == report


def test_committed_cheetah_runs(tmp_path):
    """A random policy's returns lie about -300."""
    model = RESULTS / "ppo" / "HalfCheetah-v4.pt"
    played = run_script("ppo_continuous", "--evaluate", model, "--greedy", "--eval-episodes", 3, cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert float(re.search(r"mean ([\d.]+)", played.stdout)[1]) > 6000


@pytest.mark.parametrize(("game", "score"), [("Pong", 10), ("SpaceInvaders", 300)])
def test_committed_atari_players_score(tmp_path, game, score):
    """A random policy loses Pong by 20 points, and makes about 150 in SpaceInvaders."""
    model = RESULTS / "a2c" / f"{game}NoFrameskip-v4.pt"
    played = run_script("a2c_atari", "--evaluate", model, "--eval-episodes", 2, cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert float(re.search(r"mean (-?[\d.]+)", played.stdout)[1]) > score
