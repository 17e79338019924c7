"""benchmark/speed.py times each script by what it has. Figures come from idle machines, not from here."""

import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY, load_script

SPEED = REPOSITORY / "benchmark" / "speed.py"


@pytest.fixture(scope="module")
def speed():
    return load_script("speed", SPEED.parent)


def test_every_script_is_timed(speed):
    assert {*speed.CONTESTS, *speed.ALONE} == {path.stem for path in speed.ALGOS.glob("*.py")}


@pytest.mark.parametrize("name", ["a2c_atari", "qcritic_atari"])
def test_parts_of_the_atari_scripts(speed, monkeypatch, name):
    """Each part is called, and the time of one call divided by the steps that it stands for."""
    calls = []

    def microseconds(function, count: int) -> float:
        function()
        calls.append(count)
        return 80.0

    monkeypatch.setattr(speed, "microseconds", microseconds)
    parts = speed.atari_parts(name, speed.CONTESTS[name])
    assert len(calls) == len(parts) == 7
    assert parts.pop("environments") == 80 / 16
    assert set(parts.values()) == {1.0}


def test_scripts_without_a_peer_are_timed_beside_their_environment():
    command = [sys.executable, SPEED, "--script", "reinforce_cartpole", "--repetitions", "1"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    steps, share = re.search(r"^\| CartPole-v1 \| ([\d,]+) \| (\d+)% \|$", output, re.MULTILINE).groups()
    assert int(steps.replace(",", "")) > 100
    assert 0 < int(share) < 100
