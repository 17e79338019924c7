"""benchmark/tune.py: a study has the same trials however often it, or a run of it, was ended and resumed."""

import math
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import REPOSITORY, assert_same, contents, run_python
from grid import Run
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from results_store import checkpoint_step
from study import Plan, Study, read_study
from study_page import write_study
from trials import promotion, propose
from tune import measure

TUNE = REPOSITORY / "benchmark" / "tune.py"
STUDY = """\
# What is tried here?
[defaults]
script = "ppo_continuous"
env-id = "InvertedPendulum-v4"
seed = 1
total-timesteps = 4096
num-steps = 256
hidden-size = 16
eval-interval = 1024
checkpoint-interval = 512
[[runs]]
[search]
learning-rate = { low = 1e-4, high = 1e-2, log = true }
num-minibatches = [4, 8]
update-epochs = { low = 1, high = 3 }
[study]
trials = 3
rungs = [1024]
reduction-factor = 2
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command(study: str, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-B",
        str(TUNE),
        f"{study}.toml",
        "--results",
        "results",
        "--workers",
        "1",
        *flags,
    ]


def tune(
    text: str, *flags: str, study: str = "study", cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """A study of the working directory, or of another one, to its end."""
    (cwd or Path.cwd()).joinpath(f"{study}.toml").write_text(text)
    done = subprocess.run(command(study, *flags), cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def read_trials(study: str = "study", results: str = "results") -> pd.DataFrame:
    """trials.csv but for times."""
    return pd.read_csv(Path(results, study, "trials.csv")).drop(columns=["hours", "spent"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder in which STUDY was run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    tune(STUDY, cwd=folder)
    return folder


@pytest.fixture
def copied(whole, tmp_path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)


def test_trial_that_goes_on_is_the_run_that_it_would_have_been(whole, tmp_path):
    """Its step size, annealed over all of the steps, included: the bits are those of a run by hand."""
    table = read_trials(results=whole / "results")
    gone_on = table.loc[table["steps"] == 4096, "trial"]
    assert len(table) == 3 + len(gone_on)
    assert 1 <= len(gone_on) <= 2
    [log] = (whole / f"runs/tune/study/{gone_on.iloc[0]:03}").glob("*.log")
    starts = [line for line in log.read_text().splitlines() if line.startswith("$ ")]
    assert ["--resume" in line for line in starts] == [False, True]
    by_hand = shlex.split(starts[0].removeprefix("$ "))
    by_hand[-1] = "run"
    by_hand[1] = str(REPOSITORY / "algos" / "ppo_continuous.py")
    subprocess.run(by_hand, check=True, capture_output=True)
    run_dir = log.with_suffix("")
    for name in ("model.pt", "checkpoint.pt"):
        assert_same(*(torch.load(folder / name, weights_only=True) for folder in (run_dir, Path("run"))))
    assert (run_dir / "evaluations.csv").read_bytes() == Path("run/evaluations.csv").read_bytes()
    # What stays at the rung took no step beyond the checkpoint that it was ended at.
    for number in {*table["trial"]} - {*gone_on}:
        [path] = (whole / f"runs/tune/study/{number:03}").glob("*/checkpoint.pt")
        step = torch.load(path, weights_only=True)["global_step"]
        assert 1024 <= step < 4096
        assert checkpoint_step(path.parent) == step


@pytest.mark.parametrize("step", [0, 255, 256, 70_000, 2**31, 2**40])
def test_step_of_a_checkpoint_without_pytorch(tmp_path, step):
    assert checkpoint_step(tmp_path) == -1
    others = {"script": "x", "args": {"seed": 3}, "agent": torch.nn.Linear(2, 3).state_dict(), "recent": [4]}
    torch.save({**others, "global_step": step, "episodes": 5}, tmp_path / "checkpoint.pt")
    assert checkpoint_step(tmp_path) == step


def test_return_at_a_rung_is_that_of_the_first_evaluation_there(tmp_path):
    """Of the last, if the run ended before; with the hours until then, at 1,000 steps a second."""
    (tmp_path / "config.json").write_text('{"env_id": "x", "script": "y"}')
    rows = [f"{step},{i},{step + i},7\n" for step in (1000, 2048, 3000) for i in (0, 2)]
    (tmp_path / "evaluations.csv").write_text("".join(["global_step,episode,return,length\n", *rows]))
    (tmp_path / "progress.csv").write_text("global_step,charts/SPS\n1000,1000\n3000,1000\n")
    run = Run("name", tmp_path, {}, {}, tmp_path, tmp_path)
    for rung, step in (
        (1000, 1000),
        (1001, 2048),
        (2048, 2048),
        (2500, 3000),
        (4000, 3000),
        (math.inf, 3000),
    ):
        assert measure(run, rung) == pytest.approx((step + 1, step / 1000 / 3600))


def test_scores_are_those_of_the_evaluation_at_the_rung(whole):
    """Also of trials that went on, or that were ended somewhat later; and only the best half went on."""
    table = read_trials(results=whole / "results")
    for number, steps, score in zip(table["trial"], table["steps"], table["score"], strict=True):
        [path] = (whole / f"runs/tune/study/{number:03}").glob("*/evaluations.csv")
        evaluations = pd.read_csv(path)
        assert score == pytest.approx(evaluations.loc[evaluations["global_step"] == steps, "return"].mean())
    hours = pd.read_csv(whole / "results/study/trials.csv")
    own = hours["hours"] - hours.groupby("trial")["hours"].shift(fill_value=0)
    assert (own > 0).all()
    assert own.cumsum().to_numpy() == pytest.approx(hours["spent"].to_numpy())
    first = table[table["steps"] == 1024].set_index("trial")["score"]
    best_half = first.sort_values(ascending=False).index[:1]
    assert {*best_half} <= {*table.loc[table["steps"] == 4096, "trial"]}


def test_study_that_was_killed_ten_times_ends_with_the_same_trials(whole):
    Path("study.toml").write_text(STUDY)
    moments, ended = random.Random(1), 0
    for _ in range(10):
        runner = subprocess.Popen(command("study"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(1, 5))
        ended += runner.poll() is not None
        runner.kill()
        runner.wait()
    assert ended < 8
    tune(STUDY)
    pd.testing.assert_frame_equal(read_trials(), read_trials(results=whole / "results"))
    best = [folder / "results/study/study_best.toml" for folder in (Path(), whole)]
    assert best[0].read_text() == best[1].read_text()
    assert "--resume" in "".join(log.read_text() for log in Path("runs/tune/study").rglob("*.log"))


def test_ctrl_c_prints_how_to_go_on():
    Path("study.toml").write_text(STUDY)
    runner = subprocess.Popen(
        command("study"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list(Path().rglob("checkpoint.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    runner.send_signal(signal.SIGINT)
    output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 130, output
    assert re.search("to go on: python .*tune.py study.toml --results results --workers 1\n", output)
    assert "Traceback" not in output


@pytest.mark.usefixtures("copied")
def test_finished_study_runs_nothing_and_its_best_setting_is_a_grid(tmp_path):
    """With its runs, and where only trials.csv is left."""
    before, page = contents(tmp_path / "runs/tune/study"), Path("results/study/README.md").read_text()
    tune(STUDY)
    after = contents(tmp_path / "runs/tune/study")
    assert [name for name in after if after[name] != before[name]] in ([], ["study.journal"])
    shutil.rmtree("runs")
    best = Path("results/study/study_best.toml").read_text()
    for path in Path("results/study").iterdir():
        if path.name != "trials.csv":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tune(STUDY)
    assert not Path("runs").exists()
    assert Path("results/study/README.md").read_text() == page
    assert Path("results/study/study_best.toml").read_text() == best
    run = REPOSITORY / "benchmark" / "run.py"
    dry = run_python(run, "results/study/study_best.toml", "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    table = read_trials()
    found = table[table["steps"] == 4096].sort_values("score", ascending=False).iloc[0]
    for name in ("learning-rate", "num-minibatches", "update-epochs"):
        assert f"--{name}={found[name]:g} " in dry.stdout
    assert "--seed=1 " in dry.stdout
    changed = tmp_path / "study.toml"
    changed.write_text(STUDY.replace("[4, 8]", "[2, 16]"))
    refused = run_python(*command("study")[2:], cwd=tmp_path)
    assert refused.returncode == 2
    assert re.fullmatch("error: cannot read the trials in .*\n", refused.stderr)


@pytest.mark.usefixtures("copied")
def test_study_of_other_settings_is_refused(tmp_path):
    before = contents(tmp_path / "runs/tune/study/000")
    Path("study.toml").write_text(STUDY.replace("low = 1, high = 3", "low = 1, high = 4"))
    refused = run_python(*command("study")[2:], cwd=tmp_path)
    assert refused.returncode == 2
    assert re.fullmatch("error: runs/tune/study is of another study; .*\n", refused.stderr)
    assert contents(tmp_path / "runs/tune/study/000") == before


def test_setting_whose_run_fails_is_the_worst_and_does_not_end_the_study():
    """256 steps are not 3 minibatches; of rungs there are none here, and the sampler draws at random."""
    study = STUDY.replace("rungs = [1024]", 'sampler = "random"').replace("[4, 8]", "[3, 8]")
    done = tune(study, "--retries", "0")
    table = read_trials()
    failed = table["num-minibatches"] == 3
    assert 0 < failed.sum() < 3
    assert (table.loc[failed, "score"] == -math.inf).all()
    assert (table.loc[~failed, "score"] > 0).all()
    reason = "ppo_continuous__InvertedPendulum-v4__seed1: a rollout of 256 steps is not 3 equal minibatches"
    assert table.loc[failed, "failed"].str.startswith(reason).all()
    assert f"failed: {reason}" in done.stderr
    page = Path("results/study/README.md").read_text()
    assert page.count(reason) == failed.sum()
    assert f": {3 - failed.sum()} to 4,096 steps, {failed.sum()} failed." in page
    assert "num-minibatches = 8\n" in Path("results/study/study_best.toml").read_text()


SPACE = {"x": FloatDistribution(0.0, 1.0)}


def make_trial(x: float, goal: int, scores: dict[int, float], failed: bool = False) -> FrozenTrial:
    """One that is at its goal, a whole one at 9."""
    state = TrialState.FAIL if failed else TrialState.COMPLETE if goal == 9 else TrialState.RUNNING
    value, paused = scores.get(9), {rung: score for rung, score in scores.items() if rung < 9}
    about = {"params": {"x": x}, "distributions": SPACE, "user_attrs": {"goal": goal}}
    return create_trial(state=state, value=value, intermediate_values=paused, **about)


def test_the_best_third_of_those_at_a_rung_goes_on_from_the_highest_rung():

    def promoted(*trials: FrozenTrial) -> tuple[int, int] | None:
        for number, trial in enumerate(trials):
            trial.number = number
        return promotion(trials, [1, 3, 9], 3)

    low = [make_trial(0.1 * i, 1, {1: i}) for i in range(5)]
    assert promoted(*low[:2]) is None
    assert promoted(*low[:3]) == (2, 3)
    gone_on = *low[:2], make_trial(0.2, 3, {1: 2, 3: 7})
    assert promoted(*gone_on) is None  # it goes on once
    assert promoted(*gone_on, *low[3:]) == (4, 3)  # late, and better than what went on
    failed = make_trial(0.5, 1, {}, failed=True)
    assert promoted(*low[:2], failed) == (1, 3)  # counts as one of three, and as the worst
    assert promoted(failed, failed, failed) is None
    third = [make_trial(0.1 * i, 3, {1: i, 3: -i}) for i in range(3)]
    assert promoted(*third, *low) == (0, 9)  # the higher rung first, by the score there


def test_proposals_follow_from_the_trials_and_near_the_good_ones(tmp_path):
    study = Study(tmp_path / "s.toml", Plan(), SPACE, [])
    trials = [make_trial(i / 40, 1, {1: -abs(i / 40 - 0.7)}) for i in range(40)]
    first = propose(study, trials)
    assert propose(study, trials) == first
    assert first["x"] == float(f"{first['x']:.4g}")
    drawn = [propose(study, trials[:n])["x"] for n in range(25, 40)]
    assert len({*drawn}) > 10
    assert sum(abs(x - 0.7) < 0.2 for x in drawn) > 10  # by chance 6 of 15
    failing = [make_trial(i / 40, 3 if i > 20 else 1, {1: i}, failed=i > 20) for i in range(40)]
    drawn = [propose(study, [*failing, *failing[:n]])["x"] for n in range(15)]
    assert sum(x < 0.55 for x in drawn) > 12  # of those that fail it learns, too
    study.plan.sampler = "random"
    assert propose(study, trials) == propose(study, trials[::-1])


def test_first_proposal_is_what_the_script_has_if_the_ranges_hold_it(tmp_path):
    def first(own: float) -> float:
        run = Run("run", tmp_path, {}, {"x": own}, tmp_path, tmp_path)
        return propose(Study(tmp_path / "s.toml", Plan(), SPACE, [run]), [])["x"]

    assert first(0.3) == 0.3
    assert 0 <= first(9.0) <= 1


SHORT = STUDY[: STUDY.index("[[runs]]")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[runs", "cannot read the grid"),
        (STUDY.replace("[search]", "[searched]"), "nothing beside them"),
        (SHORT + "[[runs]]", r"must have one script and a table \[search\]"),
        (STUDY.replace("learning-rate", "learning-rat"), "learning-rat"),
        (STUDY.replace("low = 1e-4", "low = 'small'"), "small"),
        (STUDY.replace("low = 1e-4", "low = 1.0"), "learning-rate: .*low.*high"),
        (STUDY.replace("low = 1e-4", "low = -1.0"), "--learning-rate must be finite and above 0"),
        (STUDY.replace("{ low = 1, high = 3 }", "{ low = 1.5, high = 3 }"), "1.5"),
        (STUDY.replace("{ low = 1, high = 3 }", "{ low = 1 }"), "update-epochs must be a list, or a range"),
        (STUDY.replace("[4, 8]", "[4, 'many']"), "many"),
        (STUDY.replace("[4, 8]", "[]"), "num-minibatches must be a list, or a range"),
        (
            STUDY.replace("num-minibatches = [4, 8]", "device = { low = 'cpu', high = 'cuda' }"),
            "needs a list in place",
        ),
        (STUDY.replace("num-minibatches", "seed"), "seed is not to be searched"),
        (STUDY.replace("num-minibatches", "num-steps"), "num-steps is both set and searched"),
        (STUDY.replace("[1024]", "[768]"), "the rung 768 is no multiple of eval-interval 1024"),
        (
            STUDY.replace("interval = 512", "interval = 600"),
            "the rung 1024 is no multiple of checkpoint-interval",
        ),
        (STUDY.replace("[1024]", "[4096]"), "rungs must rise, and stay below"),
        (STUDY.replace("trials = 3", "trials = 1"), r"\[study\]: trials must be 2 or more"),
        (STUDY.replace("trials = 3", "trails = 4"), "trails"),
        (STUDY.replace("trials = 3", "trials = 'many'"), "many"),
        (
            STUDY.replace('"InvertedPendulum-v4"', '["InvertedPendulum-v4", "Hopper-v4"]'),
            "must give thresholds of InvertedP",
        ),
    ],
)
def test_bad_study_is_refused_in_one_line_and_nothing_is_changed(tmp_path, capfd, text, message):
    Path("study.toml").write_text(text)
    with pytest.raises(SystemExit) as refused:
        read_study(Path("study.toml"))
    assert refused.value.code == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capfd.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


@pytest.mark.parametrize("flags", [["nowhere.toml"], ["study.toml", "--workers", "0"]])
def test_bad_flags_are_refused(tmp_path, flags):
    Path("study.toml").write_text(STUDY)
    refused = run_python(TUNE, *flags, cwd=tmp_path)
    assert refused.returncode == 2
    assert re.fullmatch(r"error: .*\n", refused.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


def test_score_and_page_of_several_environments(tmp_path):
    """Of four returns over their thresholds the middle two count; another study is drawn beside."""
    four = '["HalfCheetah-v4", "Hopper-v4", "Humanoid-v4", "InvertedPendulum-v4"]'
    study = STUDY.replace('"InvertedPendulum-v4"', four).replace(
        "reduction-factor = 2", "thresholds = { InvertedPendulum-v4 = 500 }"
    )
    for name in ("study", "other"):
        beside = 'beside = ["other", "missing"]\n' if name == "study" else ""
        Path(f"{name}.toml").write_text(study + beside)
    study = read_study(Path("study.toml"))
    names = [run.name for run in study.runs]
    returns = dict(zip(names, [5819 * 3, 2410 * 0.5, 716 * 0.7, 500 * 0.1], strict=True))
    assert study.score(returns) == pytest.approx(0.6)
    rows = [
        {
            "trial": number,
            "steps": steps,
            "score": score,
            "hours": 1,
            "spent": 1 + i,
            "failed": None,
            "learning-rate": 0.01 / (number + 1),
            "num-minibatches": 4 + 4 * (number % 2),
            "update-epochs": 1 + number % 3,
            **(returns if score > 0 else {}),
        }
        for i, (number, steps, score) in enumerate(
            [
                *((n, 1024, n / 12) for n in range(1, 13)),
                (11, 4096, 0.6),
                (12, 4096, 0.9),
                (0, 1024, -math.inf),
            ]
        )
    ]
    rows[-1]["failed"] = "no reason"
    for name in ("study", "other"):
        Path("results", name).mkdir(parents=True)
        pd.DataFrame(rows).to_csv(f"results/{name}/trials.csv", index=False)
    Path("study.md").write_text("Expected: little.\n")
    write_study(study, Path("results"))
    page = Path("results/study/README.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table[1:11]] == [
        "| 12",
        "| 11",
        *(f"| {n}" for n in range(10, 2, -1)),
    ]
    assert re.fullmatch(r"\| 12 \| 4,096 \| 0.600 \(0.100 to 3.000\) \| 0.000769231 \| 4 \| 1 \|", table[1])
    assert "| 0 | no reason |" in page
    assert "13 trials in 15.0 h: 10 to 1,024 steps, 2 to 4,096 steps, 1 failed." in page
    assert "\nWhat is tried here?\n" in page
    assert "\nExpected: little.\n" in page
    for name in re.findall(r"figures/([\w-]+.png)\)", page):
        assert Path("results/study/figures", name).stat().st_size > 10_000
    assert "learning-rate = 0.0007692" in Path("results/study/study_best.toml").read_text()
    assert "update-epochs = 1\n" in Path("results/study/study_best.toml").read_text()
