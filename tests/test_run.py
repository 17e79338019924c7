"""benchmark/run.py: a grid gives the same results however often it, or a run of it, was ended and resumed."""

import contextlib
import csv
import fcntl
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import REPOSITORY, assert_same, contents, run_python
from results_store import thin

RUN = REPOSITORY / "benchmark" / "run.py"
TINY = """
[defaults]
script = "qlearning_tabular"
seed = [1, 2]
total-timesteps = 2000
eval-interval = 500
eval-episodes = 5
checkpoint-interval = 500
"""
# Seconds long, so that there is a middle to be ended in.
LONG = """
[defaults]
script = "qlearning_tabular"
total-timesteps = 200000
eval-interval = 100000
eval-episodes = 5
checkpoint-interval = 10000
[[runs]]
seed = [1, 2]
"""


# Starts another process, and writes down each signal without ending.
DEAF = """
import json, os, signal, subprocess, sys, time
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Args:
    env_id: str
    run_dir: Path | None = None
    seed: int = 1
    torch_threads: int = 1

def main():
    folder = Path(sys.argv[-1])
    folder.mkdir(parents=True)
    signal.signal(signal.SIGINT, lambda *_: (folder / "signals").open("a").write("SIGINT "))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "pids.tmp").write_text(f"{os.getpid()} {other.pid}")
    (folder / "pids.tmp").replace(folder / "pids")
    time.sleep(600)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_grid(text: str, *flags, status: int = 0, grid: str = "grid") -> subprocess.CompletedProcess:
    """Run a grid in the working directory, with its results in results/."""
    Path(f"{grid}.toml").write_text(text)
    done = run_python(RUN, f"{grid}.toml", "--results", "results", *flags, cwd=Path.cwd())
    assert done.returncode == status, done.stdout + done.stderr
    return done


def start_grid(text: str, *flags, grid: str = "grid", **options) -> subprocess.Popen:
    Path(f"{grid}.toml").write_text(text)
    command = [sys.executable, "-B", RUN, f"{grid}.toml", "--results", "results", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def wait_for(condition: Callable[[], object], seconds: float = 120) -> object:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def in_the_middle(grid: str = "grid", runs: int = 1, past: int = 0) -> bool:
    """So many runs have a checkpoint later than their first or another step, and none has ended."""
    folders = list(Path("runs", grid).glob("*/"))
    assert not any((folder / "completed").exists() for folder in folders)
    paths = [folder / "checkpoint.pt" for folder in folders]
    return sum(path.exists() and read_checkpoint(path)["global_step"] > past for path in paths) >= runs


def is_alive(pid: str) -> bool:
    """Whether there is such a process, and no zombie that waits for its parent."""
    path = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return path.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def read_checkpoint(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def exported(grid: str = "grid") -> list[str]:
    """Names of the runs in a grid's results."""
    path = Path("results", grid, "runs.jsonl")
    return [json.loads(line)["run"] for line in path.read_text().splitlines()] if path.exists() else []


def outcome(results: Path) -> tuple:
    """All that a grid's results say of its runs but for how fast they were."""
    with gzip.open(results / "progress.csv.gz", "rt") as file:
        progress = [{k: v for k, v in row.items() if k != "charts/SPS"} for row in csv.DictReader(file)]
    with gzip.open(results / "evaluations.csv.gz") as file:
        return (results / "runs.jsonl").read_text(), file.read(), progress


def assert_same_grids(grid: str, reference: str, runs: int) -> None:
    names = exported(reference)
    assert len(names) == runs
    assert outcome(Path("results", grid)) == outcome(Path("results", reference))
    for name in names:
        assert_same(*(read_checkpoint(Path("runs", g, name, "checkpoint.pt")) for g in (grid, reference)))


def resumed(grid: str = "grid") -> list[str]:
    """Names of the runs that went on from a checkpoint."""
    return [path.stem for path in Path("runs", grid).glob("*.log") if "--resume" in path.read_text()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """LONG, uninterrupted, in a folder of its own."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "whole.toml").write_text(LONG)
    done = run_python(RUN, "whole.toml", "--results", "results", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def whole(reference, tmp_path) -> str:
    """LONG, uninterrupted, as a grid of the working directory."""
    for folder in ("runs", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "whole").symlink_to(reference / folder / "whole")
    return "whole"


def test_grid_whose_runner_was_killed_equals_uninterrupted(whole):
    runner = start_grid(LONG)
    wait_for(in_the_middle)
    runner.kill()
    runner.communicate()
    run_grid(LONG)
    assert_same_grids("grid", whole, runs=2)
    assert resumed()
    assert not list(Path().rglob("*.tmp"))


@pytest.mark.skipif(sys.platform != "linux", reason="finds the run by /proc")
def test_run_that_is_killed_goes_on_from_its_checkpoint(whole):
    runner = start_grid(LONG, "--workers", "1")
    wait_for(in_the_middle)
    threads = Path(f"/proc/{runner.pid}/task").glob("*/children")
    [run] = [pid for children in threads for pid in children.read_text().split()]
    assert b"--run-dir" in Path(f"/proc/{run}/cmdline").read_bytes()
    os.kill(int(run), signal.SIGKILL)
    output, _ = runner.communicate(timeout=120)
    assert runner.returncode == 0, output
    assert "exit status -9, retry 1 of 2" in output
    assert_same_grids("grid", whole, runs=2)
    assert len(resumed()) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_grid_saves_and_prints_the_command_that_goes_on(signum):
    runner = start_grid(LONG)
    wait_for(in_the_middle)
    runner.send_signal(signum)
    output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 128 + signum, output
    assert "; to go on: " in "".join(log.read_text() for log in Path("runs/grid").glob("*.log"))
    command = re.search(r"to go on: python (.*)", output)[1]
    done = subprocess.run(f"{shlex.quote(sys.executable)} {command}", shell=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(exported()) == 2
    assert resumed()


def test_grid_that_ctrl_c_ended_twice_equals_uninterrupted(whole):
    """A terminal's Ctrl-C is for all of a process group; each run is to have it once."""
    step = 0
    for times in (1, 2):
        runner = start_grid(LONG, start_new_session=True)
        wait_for(lambda: in_the_middle(runs=2, past=step))  # noqa: B023
        os.killpg(runner.pid, signal.SIGINT)
        output, _ = runner.communicate(timeout=60)
        assert runner.returncode == 130, output
        assert "to go on: python " in output
        logs = [path.read_text() for path in Path("runs/grid").glob("*.log")]
        assert [log.count("; to go on: ") for log in logs] == [times] * 2
        assert not any("Traceback" in log for log in logs)
        step = max(read_checkpoint(path)["global_step"] for path in Path("runs/grid").glob("*/checkpoint.pt"))
    run_grid(LONG)
    assert_same_grids("grid", whole, runs=2)
    assert len(resumed()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="finds the runs by /proc")
def test_second_ctrl_c_ends_a_grid_and_what_its_runs_have_started_at_once():
    """The runs of this grid shrug at the first one, which each has once: not of the terminal, too."""
    Path("deaf.py").write_text(DEAF)
    runner = start_grid(
        '[[runs]]\nscript = "deaf.py"\nenv-id = "none"\nseed = [1, 2]', start_new_session=True
    )
    wait_for(
        lambda: [Path(f"runs/grid/deaf__none__seed{seed}/pids").exists() for seed in (1, 2)] == [True] * 2
    )
    os.killpg(runner.pid, signal.SIGINT)
    time.sleep(1)
    assert [path.read_text() for path in Path("runs/grid").glob("*/signals")] == ["SIGINT "] * 2
    assert runner.poll() is None
    os.killpg(runner.pid, signal.SIGINT)
    output, _ = runner.communicate(timeout=5)
    assert runner.returncode == 130, output
    pids = [pid for path in Path("runs/grid").glob("*/pids") for pid in path.read_text().split()]
    assert len(pids) == 4
    wait_for(lambda: not any(is_alive(pid) for pid in pids), seconds=5)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core has room for one run anyway")
def test_runs_have_no_more_threads_than_there_are_cores():
    """A run that takes all cores is alone with them; one a core stands beside others."""
    for grid, threads, alone in (("all", os.cpu_count(), True), ("one", 1, False)):
        run_grid(TINY + f"[[runs]]\ntorch-threads = {threads}", grid=grid)
        first, second = sorted(Path("runs", grid).glob("*/"))
        ended = (first / "completed").stat().st_mtime
        assert (ended <= (second / "config.json").stat().st_mtime) == alone


def test_finished_runs_are_skipped(tmp_path):
    """With their folders and without; and their results are had elsewhere without another run."""
    run_grid(TINY + "[[runs]]")
    written = contents(tmp_path)
    Path("runs/grid").rename("runs/moved")
    run_grid(TINY + "[[runs]]")
    assert not list(Path("runs/grid").iterdir())
    Path("runs/grid").rmdir()
    Path("runs/moved").rename("runs/grid")
    run_grid(TINY + "[[runs]]")
    unchanged = {name: file for name, file in contents(tmp_path).items() if Path(name).is_file()}
    assert unchanged == {name: written[name] for name in unchanged} | {"grid.toml": unchanged["grid.toml"]}
    Path("results").rename("old")
    run_grid(TINY + "[[runs]]")
    for name, (modified, content) in written.items():
        if name.startswith("results") and Path(name).is_file():
            assert Path(name).read_bytes() == content
        if Path(name).suffix == ".pt":
            assert Path(name).stat().st_mtime_ns == modified


def test_run_that_fails_is_retried_and_reported_and_the_others_go_on():
    grid = TINY + '[[runs]]\n[[runs]]\nseed = 1\nenv-id = "NoSuch-v1"'
    failed = run_grid(grid, "--retries", "1", status=1)
    assert len(exported()) == 2
    log = Path("runs/grid/qlearning_tabular__NoSuch-v1__seed1.log")
    assert log.read_text().count("error: cannot make --env-id NoSuch-v1") == 2
    assert "retry 1 of 1" in failed.stderr
    last_words = failed.stderr.partition("given up")[2]
    assert last_words.count("error: cannot make --env-id NoSuch-v1") == 1
    assert "2 of 3 runs done, 1 failed" in failed.stdout


def test_dry_run_prints_exactly_the_commands_that_run(tmp_path):
    dry = run_grid(TINY + "[[runs]]", "--dry-run")
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]
    commands = dry.stdout.splitlines()
    for command in commands:
        subprocess.run(command, shell=True, check=True, capture_output=True)
    Path("runs/grid").rename("runs/by hand")
    run_grid(TINY + "[[runs]]")
    logs = sorted(Path("runs/grid").glob("*.log"))
    ran = [line for log in logs for line in log.read_text().splitlines() if "--run-dir" in line]
    threads = " ".join(f"{x}_NUM_THREADS=1" for x in ("OMP", "OPENBLAS", "MKL"))
    assert commands == [line.replace("$", threads, 1) for line in ran]
    for log in logs:
        ours, theirs = (Path("runs", g, log.stem, "evaluations.csv") for g in ("grid", "by hand"))
        assert ours.read_text() == theirs.read_text()
    assert run_grid(TINY + "[[runs]]", "--dry-run").stdout == ""


def test_grid_is_the_product_of_its_lists_under_names_that_tell_them_apart():
    """The folders of runs that differ in one setting say so; a switch is on or off; seeds come last."""
    grid = """
[defaults]
seed = [3, 4]
greedy = true
script = "qlearning_tabular"
[[runs]]
alpha = [0.5, 1]
env_id = "Blackjack-v1"
gamma = 1.0
[[runs]]
seed = 9
greedy = false
[[runs]]
seed = 10
greedy = false
torch-threads = 2
[[runs]]
script = ["reinforce_cartpole"]
estimator = ["total", "baseline"]
anneal-lr = [true, false]
seed = 1
torch-threads = 2
"""
    lines = run_grid(grid, "--dry-run").stdout.splitlines()
    flags = [set(shlex.split(line.partition(".py ")[2].partition("--run-dir")[0])) for line in lines]
    reinforce = {"--seed=1", "--greedy", "--torch-threads=2"}
    blackjack = {"--greedy", "--env-id=Blackjack-v1", "--gamma=1.0", "--torch-threads=1"}
    assert {shlex.split(line)[-1]: line for line in lines}.keys() == {
        *(
            f"runs/grid/qlearning_tabular__Blackjack-v1__alpha-{alpha}__seed{seed}"
            for alpha in ("0.5", "1")
            for seed in (3, 4)
        ),
        "runs/grid/qlearning_tabular__FrozenLake-v1__seed9",
        "runs/grid/qlearning_tabular__FrozenLake-v1__seed10",
        *(
            f"runs/grid/reinforce_cartpole__CartPole-v1__{anneal}__estimator-{estimator}__seed1"
            for anneal in ("anneal-lr", "no-anneal-lr")
            for estimator in ("total", "baseline")
        ),
    }
    expected = [
        blackjack | {f"--alpha={alpha}", f"--seed={seed}"} for alpha in ("0.5", "1") for seed in (3, 4)
    ]
    expected.append({"--seed=9", "--no-greedy", "--torch-threads=1"})
    expected.append({"--seed=10", "--no-greedy", "--torch-threads=2"})
    for anneal in ("--anneal-lr", "--no-anneal-lr"):
        expected += [reinforce | {anneal, f"--estimator={x}"} for x in ("total", "baseline")]
    assert sorted(map(sorted, flags)) == sorted(map(sorted, expected))
    assert all(line.startswith("OMP_NUM_THREADS=2 ") == ("--torch-threads=2" in line) for line in lines)


def test_script_of_ones_own_beside_the_original():
    """A changed copy with another flag, named from the grid's folder; the report tells the two apart."""
    Path("my").mkdir()
    source = (REPOSITORY / "algos" / "qlearning_tabular.py").read_text()
    Path("my/careful.py").write_text(source.replace("class Args:\n", "class Args:\n    patience: int = 7\n"))
    Path("my/grid.toml").write_text(
        TINY + '[[runs]]\n[[runs]]\nscript = "careful.py"\npatience = 3\n[[runs]]\nscript = "careful.py"'
    )
    command = (RUN, "my/grid.toml", "--results", "results")
    done = run_python(*command, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert [name for name in exported() if name.startswith("careful")] == [
        f"careful__FrozenLake-v1__{patience}seed{seed}"
        for patience in ("patience-3__", "")
        for seed in (1, 2)
    ]
    assert read_checkpoint(Path("runs/grid", exported()[0], "checkpoint.pt"))["args"]["patience"] == 3
    report = REPOSITORY / "benchmark" / "report.py"
    tables = [run_python(report, folder, "--table", cwd=Path.cwd()) for folder in ("runs", "results")]
    assert tables[0].stdout == tables[1].stdout
    for name in ("careful: patience 3", "careful: patience 7", "qlearning_tabular"):
        assert f"| FrozenLake-v1 | {name} | 2,000 | 2 |" in tables[0].stdout
    Path("my/grid.toml").write_text(TINY + '[[runs]]\nscript = "careful.py"\npatients = 3')
    refused = run_python(*command, cwd=Path.cwd())
    assert refused.returncode == 2
    assert "patients" in refused.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[runs", "cannot read the grid"),
        ("", "holds no runs"),
        ("[defaults]\nscript = 'qlearning_tabular'", "holds no runs"),
        ("[default]\nseed = 1\n[[runs]]\nscript = 'qlearning_tabular'", "nothing beside them"),
        ("runs = 3", "nothing beside them"),
        ("[[runs]]\nseed = 1", "there is no script None"),
        ("[[runs]]\nscript = 'qlearning_tabula'", "there is qlearning_tabular"),
        (TINY + "[[runs]]\nalpha = []", "alpha must be"),
        (TINY + "[[runs]]\nalpha.x = 1", "alpha must be"),
        (TINY + "[[runs]]\nrun-dir = 'here'", "run-dir is not the grid's to set"),
        (TINY + "[[runs]]\n[[runs]]", "holds the run qlearning_tabular__FrozenLake-v1__seed1 twice"),
        (TINY + "[[runs]]\nalpa = 0.5", "alpa"),
        (TINY + "[[runs]]\nalpha = 'high'", "high"),
        (TINY + "[[runs]]\nalpha = [0.5, 2.0]", "--alpha must lie in [1e-09, 1], not 2.0"),
    ],
)
def test_bad_grid_is_refused_in_one_line_before_anything_starts(tmp_path, text, message):
    refused = run_grid(text, status=2)
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert message in refused.stderr
    assert refused.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]


@pytest.mark.parametrize(
    "flags", [["nowhere.toml"], ["grid.toml", "--workers", "0"], ["grid.toml", "--what"]]
)
def test_bad_flags_are_refused(tmp_path, flags):
    Path("grid.toml").write_text(TINY + "[[runs]]")
    refused = run_python(RUN, *flags, cwd=tmp_path)
    assert refused.returncode == 2
    assert re.fullmatch(r"error: .*\n", refused.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]


@pytest.mark.parametrize("finished", [True, False])
def test_run_of_other_settings_is_refused(tmp_path, finished):
    """By its results, or by its folder if it has none yet."""
    one = TINY.replace("[1, 2]", "1") + "[[runs]]\nalpha = "
    run_grid(one + "0.5")
    if not finished:
        Path("results").rename("old")
    before = contents(tmp_path)
    refused = run_grid(one + "0.25", status=2)
    assert re.fullmatch("error: .* has alpha 0.5, the grid now 0.25; .*\n", refused.stderr)
    assert {**contents(tmp_path), "grid.toml": before["grid.toml"]} == before


def test_second_runner_of_a_grid_is_refused():
    Path("runs/grid").mkdir(parents=True)
    descriptor = os.open("runs/grid", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    refused = run_grid(TINY + "[[runs]]", status=2)
    os.close(descriptor)
    assert re.fullmatch("error: runs/grid is taken: .*\n", refused.stderr)
    assert not list(Path("runs/grid").iterdir())


def test_runner_stays_small(tmp_path):
    """It took 31 MB; what would take it above 150 is imported in processes of its own."""
    Path("grid.toml").write_text(TINY + "[[runs]]")
    # By way of a shell: what a process forks has its size at first, and Python with PyTorch is large.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, RUN, "grid.toml", "--results", "results"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(re.search(r"the runner took (\d+) MB", done.stdout)[1]) < 75


def test_progress_keeps_every_tag_in_few_rows():
    """Of 1,000 steps every five are one row, of fewer than the rows each is its own."""
    steps = np.arange(1, 1001)
    seldom = np.where(steps % 100 == 0, 1.0, np.nan)
    progress = pd.DataFrame({"global_step": steps, "often": steps.astype(float), "seldom": seldom})
    rows = thin(progress)
    assert rows["global_step"].tolist() == list(range(5, 1001, 5))
    assert rows["often"].tolist() == [step - 2 for step in range(5, 1001, 5)]
    assert rows.dropna()["global_step"].tolist() == list(range(100, 1001, 100))
    assert rows["seldom"].dropna().tolist() == [1.0] * 10
    assert thin(progress[:3])[["global_step", "often"]].to_numpy().tolist() == [[1, 1], [2, 2], [3, 3]]
    assert thin(progress[:203])["global_step"].tolist()[-2:] == [202, 203]
    assert thin(progress[:0]).empty


def test_run_whose_node_is_lost_goes_on_on_another(monkeypatch):
    """Two nodes with room for one run each; one of them is killed when both runs are in their middle."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    longer = LONG.replace("200000", "1200000")  # folders come back every second
    run_grid(longer, grid="whole")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        runner = start_grid(longer, "--ray-address", cluster.address)
        wait_for(lambda: in_the_middle(runs=2))
        cluster.remove_node(node, allow_graceful=False)
        output, _ = runner.communicate(timeout=600)
    finally:
        cluster.shutdown()
    assert runner.returncode == 0, output
    assert "retry 1 of 2" in output
    assert_same_grids("grid", "whole", runs=2)
    assert len(resumed()) == 1
