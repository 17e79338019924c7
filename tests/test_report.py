"""Curves, sweeps, tables and figures of runs whose statistics are known by hand."""

import csv
import gzip
import json
import re

import estimates
import figures
import numpy as np
import pytest
import report
from conftest import REPOSITORY, contents, run_python
from records import curves, swept_setting
from results_store import read_runs
from torch.utils.tensorboard import SummaryWriter


def write_run(folder, evaluations: dict[int, list[float]], progress: list[dict] = (), **config):
    """A run folder, with the returns of each evaluation by its step."""
    folder.mkdir(parents=True)
    config = {"script": "ppo_continuous", "env_id": "Swimmer-v4", "seed": 1, "greedy": True} | config
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "evaluations.csv").open("w") as file:
        rows = [(step, i, r, 7) for step, returns in evaluations.items() for i, r in enumerate(returns)]
        csv.writer(file).writerows([("global_step", "episode", "return", "length"), *rows])
    if progress:
        with (folder / "progress.csv").open("w") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in progress for key in row))
            writer.writeheader()
            writer.writerows(progress)
    return folder


def write_events(folder, **columns: list[float]):
    """A folder of CleanRL: events alone, a value every 1,000 steps."""
    with SummaryWriter(str(folder)) as writer:
        for tag, values in columns.items():
            for i, value in enumerate(values):
                writer.add_scalar(f"charts/{tag}", value, 1000 * (i + 1))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Reads the runs below a folder of tmp_path."""
    return lambda name: read_runs([tmp_path / name], tmp_path / "out")


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of runs below folders of tmp_path."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str, **options) -> str:
        report.main(report.Args([report.Path(name) for name in names], report.Path("out"), **options))
        return (tmp_path / "out" / "README.md").read_text()

    return make


def test_evaluation_curve_pools_episodes_and_trims_seeds(runs, tmp_path):
    ends = {1: [0, 2], 2: [10, 10], 3: [20, 24], 4: [100, 300]}
    for seed, returns in ends.items():
        write_run(tmp_path / f"grid/{seed}", {1000: [seed, seed], 2000: returns}, seed=seed)
    curve = estimates.evaluation_curve(runs("grid"), "steps")
    pooled = np.concatenate(list(ends.values()))
    assert curve.index.tolist() == [1000, 2000]
    assert curve["mean"].tolist() == pytest.approx([2.5, pooled.mean()])
    assert curve["stderr"].iloc[1] == pytest.approx(pooled.std(ddof=1) / np.sqrt(8))
    assert curve["iqm"].tolist() == [2.5, 16]  # the middle two of 1, 10, 22, 200
    # Of 4 draws from four seeds, those that give the trimmed mean its extremes are more likely than 2.5%.
    assert (curve["low"].iloc[1], curve["high"].iloc[1]) == (1, 200)


def test_evaluation_curve_of_one_seed_has_no_width(runs, tmp_path):
    write_run(tmp_path / "grid/1", {1000: [3, 5]})
    assert estimates.evaluation_curve(runs("grid"), "steps")[["iqm", "low", "high"]].to_numpy().tolist() == [
        [4] * 3
    ]


def test_runs_that_were_evaluated_elsewhere_stand_with_their_latest_evaluation(runs, tmp_path):
    """And the curve ends where the first of them does."""
    write_run(tmp_path / "grid/1", {1000: [1], 2000: [2], 3000: [3]}, seed=1)
    write_run(tmp_path / "grid/2", {1500: [10], 2500: [20], 4000: [30]}, seed=2)
    curve = estimates.evaluation_curve(runs("grid"), "steps")
    assert curve["mean"].to_dict() == {1500: 5.5, 2250: 6, 3000: 11.5}


def test_an_unfinished_seed_ends_the_curve(runs, tmp_path):
    write_run(tmp_path / "grid/1", {1000: [1], 2000: [2], 3000: [3]}, seed=1)
    write_run(tmp_path / "grid/2", {1000: [3], 2000: [6]}, seed=2)
    assert estimates.evaluation_curve(runs("grid"), "steps")["mean"].to_dict() == {1000: 2, 2000: 4}


@pytest.mark.parametrize(
    ("threshold", "mean"),
    [(5, {1000: 2, 2000: 5, 3000: 7}), (7, {1000: 2, 2000: 5}), (None, {1000: 2, 2000: 5})],
)
def test_run_that_was_stopped_at_its_return_stays_there(runs, tmp_path, threshold, mean):
    write_run(tmp_path / "grid/1", {1000: [1], 2000: [6]}, stop_at_return=threshold)
    write_run(tmp_path / "grid/2", {1000: [3], 2000: [4], 3000: [8]}, stop_at_return=threshold, seed=2)
    assert estimates.evaluation_curve(runs("grid"), "steps")["mean"].to_dict() == mean


def test_curves_by_episodes(runs, tmp_path):
    for seed, pace in ((1, 100), (2, 50)):
        progress = [
            {"global_step": n * pace, "charts/episodes": n, "charts/episodic_return": seed * n}
            for n in range(1, 101)
        ]
        write_run(tmp_path / f"grid/{seed}", {50 * pace: [seed], 100 * pace: [3 * seed]}, progress, seed=seed)
    evaluated, trained = (
        f(runs("grid"), "episodes") for f in (estimates.evaluation_curve, estimates.training_curve)
    )
    assert evaluated["mean"].to_dict() == {50: 1.5, 100: 4.5}
    # Bins of two episodes each: n - 1 and n, about n - 1.
    assert trained.index.tolist() == list(range(1, 100, 2))
    assert trained["mean"].tolist() == pytest.approx([1.5 * (n - 0.5) for n in range(2, 101, 2)])
    assert trained["stderr"].iloc[-1] == pytest.approx(99.5 / 2)


def test_grouping(runs, tmp_path):
    for seed in (1, 2):
        common = {"seed": seed, "run_dir": f"runs/{seed}", "git_commit": f"{seed}", "gamma": 0.9}
        write_run(tmp_path / f"grid/a{seed}", {1: [0]}, **common, estimator="total")
        write_run(tmp_path / f"grid/b{seed}", {1: [0]}, **common, estimator="baseline")
        write_run(tmp_path / f"grid/c{seed}", {1: [0]}, **common, script="sb3_ppo")
    named = {name: [r.folder.name for r in seeds] for name, seeds in curves(runs("grid")).items()}
    assert named == {
        "ppo_continuous: estimator baseline": ["b1", "b2"],
        "ppo_continuous: estimator total": ["a1", "a2"],
        "sb3_ppo": ["c1", "c2"],
    }


def test_sweep(runs, page, tmp_path):
    returns = {0.01: (1, 3), 0.1: (8, 12), 0.5: (7, 9), 1.0: (0, 4)}
    for alpha, means in returns.items():
        for seed, value in enumerate(means):
            write_run(
                tmp_path / f"grid/{alpha}-{seed}", {1: [0], 2: [value]}, seed=seed, alpha=alpha, gamma=0.9
            )
    assert swept_setting(runs("grid")) == "alpha"
    curve = estimates.sweep_curve(runs("grid"), "alpha")
    assert curve["mean"].to_dict() == {0.01: 2, 0.1: 10, 0.5: 8, 1: 2}
    assert curve.loc[0.1, ["low", "high", "seeds"]].tolist() == [8, 12, 2]
    text = page("grid")
    assert "of 4 values of `alpha` the best is **0.1**, with 10.0 (8.0 to 12.0)" in text
    assert "Its interval overlaps those of 0.5." in text
    assert (tmp_path / "out/figures/grid-Swimmer-v4-ppo_continuous-alpha.png").exists()
    write_run(tmp_path / "grid/other", {1: [0], 2: [5]}, gamma=0.5, alpha=0.1)  # of one value none is best
    assert "gamma 0.5: with `alpha` **0.1** 5.000 (5.000 to 5.000)." in page("grid")


def test_two_values_are_curves_and_no_sweep(runs, tmp_path):
    for alpha in (0.1, 0.2):
        write_run(tmp_path / f"grid/{alpha}", {1: [0]}, alpha=alpha, gamma=0.9)
    assert swept_setting(runs("grid")) is None
    assert list(curves(runs("grid"))) == ["alpha 0.1", "alpha 0.2"]
    write_run(tmp_path / "grid/0.3", {1: [0]}, alpha=0.3, gamma=0.5)  # nor is a third with another difference
    assert swept_setting(runs("grid")) is None


def test_words_and_two_settings_at_once_are_no_sweep(runs, tmp_path):
    for value in (1, 2, 3):
        write_run(tmp_path / f"words/{value}", {1: [0]}, estimator=f"word{value}", alpha=0.1)
        write_run(tmp_path / f"both/alpha{value}", {1: [0]}, alpha=value, gamma=1)
        write_run(tmp_path / f"both/gamma{value}", {1: [0]}, alpha=1, gamma=value)
    assert swept_setting(runs("words")) is None
    assert swept_setting(runs("both")) is None


def test_flags_in_words(runs, tmp_path):
    """No name stands for two groups, whether half of them have a flag or most do."""
    for name, flags in {
        "ab": (1, 1, 1),
        "a": (1, 0, 1),
        "b": (0, 1, 1),
        "-": (0, 0, 1),
        "c": (0, 0, 0),
    }.items():
        write_run(tmp_path / f"five/{name}", {1: [0]}, **dict(zip("abc", map(bool, flags), strict=True)))
        if name != "c":
            write_run(tmp_path / f"four/{name}", {1: [0]}, a=bool(flags[0]), b=bool(flags[1]))
    named = {name: seeds[0].folder.name for name, seeds in curves(runs("four")).items()}
    assert named == {"a, b": "ab", "a": "a", "b": "b", "no a, no b": "-"}
    named = {name: seeds[0].folder.name for name, seeds in curves(runs("five")).items()}
    assert named == {"a, b": "ab", "a": "a", "b": "b", "ppo_continuous": "-", "no c": "c"}


def test_tables_of_a_page(page, tmp_path):
    """1,000 steps at 0.5 a second and 1,000 at 0.25 are 6,000 s; the threshold is passed at the second."""
    progress = [{"global_step": 1000, "charts/SPS": 0.5}, {"global_step": 2000, "charts/SPS": 0.25}]
    common = {"env_id": "HalfCheetah-v4"}
    for seed, last in enumerate((6000, 6200, 5000)):
        write_run(tmp_path / f"grid/{seed}", {1000: [9], 2000: [last, last]}, progress, seed=seed, **common)
    text = page("grid")
    headline, row = [line for line in text.splitlines() if line.startswith("| HalfCheetah-v4")][:2]
    zoo = "SB3 zoo's PPO (v3) 5,819 ± 664 (1M steps, ± over one run's episodes)"
    assert headline == f"| HalfCheetah-v4 | ppo_continuous | 2,000 | 3 | 5,733 ± 371 | {zoo} | 1.7 h |"
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "HalfCheetah-v4",
        "ppo_continuous",
        "2,000",
        "3",
        "2 greedy",
        "5,733 ± 371",
        "5,000 to 6,200",
        "5,733 (5,000 to 6,200)",
        "1.7 h",
    ]
    published = f"CleanRL's PPO 1,443 ± 46 (1M steps, ± over seeds); {zoo}"
    assert f"- HalfCheetah-v4, published: {published}.\n" in text
    assert "| HalfCheetah-v4 | ppo_continuous | 5,819 | 2 of 3 seeds | 2,000 | 1.7 h |" in text
    assert "| 5 | 3 of 3 seeds | 1,000 | 33.3 min |" in page("grid", threshold=5)


def test_headlines_have_of_each_script_the_curve_of_most_seeds_and_the_best_beside_it(page, tmp_path):
    """Of CleanRL's 5,626 after 8M steps and a peer's 4,000 after 2,000 the latter took no more steps."""
    for grid, seeds, value in (("few", 1, 9000), ("many", 2, 3000)):
        for seed in range(seeds):
            for env_id, script, end in (
                ("InvertedDoublePendulum-v4", "ppo_continuous", value),
                ("InvertedDoublePendulum-v4", "sb3_ppo", 4000),
                ("InvertedDoublePendulum-v4", "sb3_sac", 9000),
                ("Swimmer-v4", "ppo_continuous", 7),
            ):
                folder = tmp_path / f"results/{grid}/{script}{env_id}{seed}"
                write_run(folder, {2000: [end]}, env_id=env_id, script=script, seed=seed)
    top, _, rest = page("results").partition("\n- [few](#few): \n- [many](#many): \n")
    assert top.splitlines()[2:] == [
        "| environment | script | steps | seeds | return | best reference |",
        "|---|---|---|---|---|---|",
        "| InvertedDoublePendulum-v4 | ppo_continuous | 2,000 | 2 | 3,000 ± 0 "
        "| sb3_ppo, run here, 4,000 ± 0 (2 seeds) |",
        "| Swimmer-v4 | ppo_continuous | 2,000 | 2 | 7.000 ± 0.000 |  |",
    ]
    assert rest.index("## few") < rest.index("## many")


def test_table_alone(tmp_path):
    for seed, value in enumerate((1, 3)):
        write_run(tmp_path / f"grid/{seed}", {1: [0], 1500 - seed: [value, value]}, seed=seed)
    printed = run_python(REPOSITORY / "benchmark" / "report.py", "grid", "--table", cwd=tmp_path)
    assert printed.stdout.splitlines() == [
        "| environment | steps | seeds | episodes each | mean return | lowest to highest seed |",
        "|---|---|---|---|---|---|",
        "| Swimmer-v4 | 1,499 to 1,500 | 2 | 2 greedy | 2.000 ± 1.000 | 1.000 to 3.000 |",
    ]


@pytest.mark.parametrize(("returns", "shown"), [([2, 5], "3.500 ± 1.500"), ([2], "2.000")])
def test_one_seed_shows_the_error_over_its_episodes(tmp_path, returns, shown):
    write_run(tmp_path / "grid", {1: [0, 9], 1500: returns})
    printed = run_python(REPOSITORY / "benchmark" / "report.py", "grid", "--table", cwd=tmp_path)
    assert f"| {shown} |" in printed.stdout


def test_folder_of_cleanrl(runs, page, tmp_path):
    for seed in (1, 2):
        folder = tmp_path / f"cleanrl/Swimmer-v4__ppo_continuous_action__{seed}__1700000000"
        write_events(folder, episodic_return=np.arange(200) * seed, SPS=[10] * 200)
    first, _ = runs("cleanrl")
    assert first.config == {"env_id": "Swimmer-v4", "script": "ppo_continuous_action", "seed": 1}
    assert first.mean_returns().iloc[-1] == np.arange(100, 200).mean()
    assert first.at("hours", [200_000]) == pytest.approx(200_000 / 10 / 3600)
    curve = estimates.training_curve(runs("cleanrl"), "steps")
    assert curve["mean"].iloc[0] == pytest.approx(
        1.5 * 1.5
    )  # the first of 50 bins holds 0, 1, 2, 3 times the seed
    assert "| Swimmer-v4 | ppo_continuous_action | 200,000 | 2 | 100 in training | 224 ± 75 |" in page(
        "cleanrl"
    )


def test_events_stand_in_for_progress(runs, tmp_path):
    write_events(write_run(tmp_path / "grid/1", {2000: [1]}), episodes=[3, 5], SPS=[10, 5])
    (run,) = runs("grid")
    assert run.at("charts/episodes", [1500]) == 4
    assert run.at("hours", [2000]) * 3600 == pytest.approx(1000 / 10 + 1000 / 5)


def test_page_has_a_section_for_each_grid_and_is_the_same_each_time(page, tmp_path, monkeypatch):
    for grid in ("b", "a"):
        for seed in (1, 2):
            returns = {1000: [seed, 2], 2000: [seed, 9]}
            write_run(tmp_path / f"results/{grid}/Swimmer-v4__seed{seed}", returns, seed=seed)
    (tmp_path / "grids").mkdir()
    (tmp_path / "grids/a.toml").write_text("# Which is\n# better?\n\n# not this\nscript = 1\n")
    monkeypatch.setattr(report, "BENCHMARK", tmp_path)
    text = page("results")
    assert re.findall("^## .*", text, re.MULTILINE) == ["## a", "## b"]
    assert "## a\n\nWhich is\nbetter?\n\n![" in text
    assert "not this" not in text
    figures = contents(tmp_path / "out/figures")
    assert (
        set(re.findall(r"\(figures/(.*)\)", text)) == set(figures) == {"a-Swimmer-v4.png", "b-Swimmer-v4.png"}
    )
    assert all(len(png) < 200_000 for _, png in figures.values())
    assert page("results") == text
    assert [png for _, png in contents(tmp_path / "out/figures").values()] == [
        png for _, png in figures.values()
    ]


def test_what_is_said_of_a_grid_and_the_curves_of_another_stand_in_its_section(page, tmp_path, monkeypatch):
    progress = [{"global_step": 1000 * n, "charts/SPS": 10} for n in (1, 2)]
    for grid, script, env_id in (
        ("a", "sac", "Swimmer-v4"),
        ("b", "ppo", "Swimmer-v4"),
        ("b", "ppo", "Ant-v4"),
        ("b", "sac", "Ant-v4"),
    ):
        returns = {1000: [1], 2000: [2]}
        folder = tmp_path / f"results/{grid}/{script}__{env_id}"
        write_run(folder, returns, progress, script=script, env_id=env_id)
    (tmp_path / "grids").mkdir()
    (tmp_path / "grids/a.toml").write_text('# Which?\nbeside = ["b"]\n')
    (tmp_path / "grids/a.md").write_text("Seen: *neither*.\n")
    drawn, draw = [], report.learning_figure
    monkeypatch.setattr(report, "learning_figure", lambda *given: drawn.append(given[:2]) or draw(*given))
    monkeypatch.setattr(report, "BENCHMARK", tmp_path)
    text = page("results")
    figures = [f"![a-Swimmer-v4{x}](figures/a-Swimmer-v4{x}.png)" for x in ("", "-hours")]
    assert "\n\n".join(["## a", "Which?", *figures, "Seen: *neither*.", "| environment"]) in text
    assert [(set(named), axis) for named, axis in drawn] == [
        ({"ppo", "sac"}, "auto"),
        ({"ppo", "sac"}, "hours"),
        ({"ppo", "sac"}, "auto"),
        ({"ppo", "sac"}, "hours"),
        ({"ppo"}, "auto"),
    ]
    html = (tmp_path / "out/report.html").read_text()
    assert html.count('src="data:image/png;base64,iVBOR') == 5
    assert "figures/" not in html.replace("figure:", "")
    assert "<em>neither</em>" in html


def test_differences_from_another_grid(page, tmp_path, monkeypatch):
    """Each change on each environment against the unchanged runs of the same script there."""
    for env_id, ends in {"Ant-v4": (100, 300), "Swimmer-v4": (10, 20)}.items():
        common = {"env_id": env_id, "norm_adv": True, "clip_vloss": False, "hidden_size": 64}
        for seed, end in enumerate(ends):
            write_run(tmp_path / f"results/ppo/{env_id}{seed}", {1000: [end]}, seed=seed, **common)
            write_run(
                tmp_path / f"results/ppo/sb3{env_id}{seed}",
                {1000: [9]},
                script="sb3_ppo",
                seed=seed,
                **common,
            )
            changes = ({"norm_adv": False}, -50), ({"clip_vloss": True}, 1), ({"hidden_size": 9}, 2)
            for change, difference in changes:
                folder = tmp_path / f"results/details/{env_id}{change}{seed}"
                write_run(folder, {1000: [end + difference]}, seed=seed, **common | change)
    (tmp_path / "grids").mkdir()
    (tmp_path / "grids/details.toml").write_text('differences_from = "ppo"\n')
    monkeypatch.setattr(report, "BENCHMARK", tmp_path)
    text = page("results")
    rows = re.findall(r"\| (\S+) \| (\D+\S+) \| (\S+) \((.*?)\) \| (\S+) \| 2 and 2 \|", text)
    assert [(env_id, name, middle, relative) for env_id, name, middle, _, relative in rows] == [
        ("Ant-v4", "no norm adv", "-50", "-25%"),
        ("Ant-v4", "clip vloss", "+1", "+0%"),
        ("Ant-v4", "hidden size 9", "+2", "+1%"),
        ("Swimmer-v4", "no norm adv", "-50", "-333%"),
        ("Swimmer-v4", "clip vloss", "+1", "+7%"),
        ("Swimmer-v4", "hidden size 9", "+2", "+13%"),
    ]
    assert {interval for env_id, name, _, interval, _ in rows if name == "no norm adv"} == {
        "-250 to +150",  # (100, 100) - 50 against (300, 300), and the other way round
        "-60 to -40",
    }
    assert set(re.findall(r"\(figures/(details.*)\)", text)) == {"details.png"}
    one = read_runs([tmp_path / "results/details"], tmp_path / "out")
    others = read_runs([tmp_path / "results/ppo"], tmp_path / "out")
    ant = estimates.differences_of([run for run in one if run.config["env_id"] == "Ant-v4"], others)
    assert figures.difference_figure(ant, "ppo", "").startswith(b"\x89PNG")  # of one environment, too


def test_aggregate_over_environments(runs, page, tmp_path, monkeypatch):
    """An environment counts as much with one seed as with two, and as far as its shortest run goes."""
    thresholds = {"HalfCheetah-v4": 5819, "Hopper-v4": 2410}
    for script, env_id, scores, settings in (
        ("ppo_continuous", "HalfCheetah-v4", (1, 2), {"hidden_size": 256}),
        ("ppo_continuous", "Hopper-v4", (3,), {"hidden_size": 64}),
        ("sb3_ppo", "HalfCheetah-v4", (0.5,), {"zoo": False, "same_settings": True}),
        ("sb3_ppo", "HalfCheetah-v4", (8,), {"zoo": True, "same_settings": False}),
        ("sb3_ppo", "Hopper-v4", (1.5,), {"zoo": False, "same_settings": True}),
        ("sac_continuous", "Hopper-v4", (9,), {}),
        ("ppo_continuous", "Swimmer-v4", (9,), {"hidden_size": 64}),
    ):
        for seed, score in enumerate(scores):
            value = score * thresholds.get(env_id, 1)
            evaluations = {1000: [value - 1, value + 1]} | ({2000: [99 * value]} if script[0] == "p" else {})
            folder = tmp_path / f"results/ppo/{script}__{env_id}__{settings}{seed}"
            write_run(folder, evaluations, script=script, env_id=env_id, seed=seed, **settings)
    scores = estimates.scores_of(runs("results"), list(thresholds))
    assert {name: [x.ravel().tolist() for x in curve] for name, curve in scores.items()} == {
        "ppo_continuous": [pytest.approx([1, 2]), pytest.approx([3])],
        "sb3_ppo: same settings": [pytest.approx([0.5]), pytest.approx([1.5])],
    }
    profile = estimates.profile(*scores["ppo_continuous"], above=np.array([0, 1.5, 2.5, 4]))
    assert profile.tolist() == pytest.approx([2.5, 2.25, 1, 0.75, 0.5, 0])  # of 1, 2, 3, 3

    (tmp_path / "grids").mkdir()
    (tmp_path / "grids/ppo.toml").write_text(f"aggregate = {list(thresholds)}\n")
    monkeypatch.setattr(report, "BENCHMARK", tmp_path)
    text = page("results")
    assert "](figures/ppo.png)" in text
    columns = "| environments | runs | seeds | score, interquartile mean | score, mean |"
    # Two seeds of 1 and 2 are drawn as 1, 1 or 2, 2 in a quarter of the draws each.
    ours = "| ppo_continuous | 2, 1 | 2.50 (2.00 to 2.50) | 2.25 (2.00 to 2.50) |"
    sb3 = "| sb3_ppo: same settings | 1, 1 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |"
    both = [f"| HalfCheetah-v4, Hopper-v4 {row}" for row in (ours, sb3)]
    assert "\n".join([columns, "|---|---|---|---|---|", *both]) in text


def test_probability_that_ones_own_script_is_better(page, tmp_path):
    """Of 3 x 2 pairs of runs it wins 4 and draws 1."""
    for script, returns in (("my_ppo", (1, 5, 9)), ("ppo_continuous", (1, 2))):
        for seed, value in enumerate(returns):
            write_run(tmp_path / f"grid/{script}{seed}", {1000: [value]}, script=script, seed=seed)
    text = page("grid")
    lines = [line for line in text.splitlines() if "with probability" in line]
    assert len(lines) == 1
    assert "a run of my_ppo ends above one of ppo_continuous with probability **0.75**" in lines[0]
    assert "3 seeds and 2 seeds" in lines[0]


def test_figures_beside_the_grids_are_no_runs(tmp_path):
    write_run(tmp_path / "results/a/1", {1: [1]})
    (tmp_path / "results/figures").mkdir()
    paths = [tmp_path / "results/a", tmp_path / "results/figures"]
    assert len(read_runs(paths, tmp_path / "results")) == 1
    with pytest.raises(SystemExit):
        read_runs(paths, tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("config.json", None, "there is no run in bad"),
        ("config.json", "{", "JSONDecodeError"),
        ("config.json", "{}", "env_id"),
        ("evaluations.csv", None, "neither an evaluation"),
        ("evaluations.csv", "", "EmptyDataError"),
        ("evaluations.csv", "global_step,return\n", "neither an evaluation"),
        ("evaluations.csv", "global_step,return\n1,high\n", "high"),
        ("evaluations.csv", "step,return\n1,2\n", "global_step"),
        ("progress.csv", "step\n1\n", "global_step"),
        ("progress.csv", "", "EmptyDataError"),
    ],
)
def test_bad_input(name, text, complaint, page, tmp_path, capfd):
    write_run(tmp_path / "good/1", {1: [1]})
    path = write_run(tmp_path / "bad/1", {1: [1]}) / name
    path.unlink() if text is None else path.write_text(text)
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        page("good", "bad")
    assert stopped.value.code == 2
    assert re.fullmatch(f"error: .*{complaint}.*\n", capfd.readouterr().err)
    assert contents(tmp_path) == before


def test_tables_without_rows(page, tmp_path):
    """What has no rows tells nothing; a run of which nothing else is known is refused above."""
    run = write_run(tmp_path / "good/1", {1: [1]})
    (run / "progress.csv").write_text("global_step,charts/episodic_return,charts/SPS\n")
    trained = [{"global_step": 1, "charts/episodic_return": 2, "charts/SPS": 3}]
    run = write_run(tmp_path / "other/1", {1: [1]}, trained)
    (run / "evaluations.csv").write_text("global_step,episode,return,length\n")
    text = page("good", "other")
    assert "| Swimmer-v4 | ppo_continuous | 1 | 1 | 1 greedy | 1.000 |" in text
    assert "| Swimmer-v4 | ppo_continuous | 1 | 1 | 100 in training | 2.000 |" in text


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [("", "there is no run in results"), ('{"run": "a", "env_id": "Ant-v4"}\n', "neither an evaluation")],
)
def test_results_without_rows(runs, complaint, page, tmp_path, capfd):
    folder = tmp_path / "results/grid"
    folder.mkdir(parents=True)
    (folder / "runs.jsonl").write_text(runs)
    for name in ("evaluations", "progress"):
        with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
            file.write("run,global_step,return,charts/episodic_return\n")
    with pytest.raises(SystemExit) as stopped:
        page("results")
    assert stopped.value.code == 2
    assert re.fullmatch(f"error: .*{complaint}.*\n", capfd.readouterr().err)


def test_no_folder(page, capfd):
    with pytest.raises(SystemExit) as stopped:
        page("nowhere")
    assert stopped.value.code == 2
    assert re.fullmatch("error: .*nowhere\n", capfd.readouterr().err)


def test_bad_command(tmp_path):
    refused = run_python(REPOSITORY / "benchmark" / "report.py", "--x=years", cwd=tmp_path)
    assert refused.returncode == 2
    assert re.fullmatch("error: .*\n", refused.stderr)
    assert not any(tmp_path.iterdir())
