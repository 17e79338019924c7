"""Run folders and the results of a grid: the only module that knows their files.

A run folder is what a script writes: config.json, evaluations.csv, TensorBoard events, checkpoint.pt, ...
Beside it the runner puts RUN.log, what the run prints, and in it `completed` once it has ended well. The
results of a grid are what is kept of its finished runs: runs.jsonl, settings and versions, a line for each
run; evaluations.csv.gz, a row for each episode; progress.csv.gz, the TensorBoard scalars of each run in up to
200 rows. A run is in them once runs.jsonl has it, which is written last.

pandas and TensorBoard are imported where they are used: the runner of a grid, which only waits, does without.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import pickletools
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from cli import error

if TYPE_CHECKING:
    import pandas as pd
    from records import Record

PLACES = ("run_dir", "resume", "evaluate")  # arguments of a script that say where, not what
PROGRESS_ROWS = 200


def log_of(run_dir: Path) -> Path:
    """The file of what a run prints."""
    return run_dir.with_name(f"{run_dir.name}.log")


def last_words(run_dir: Path, lines: int = 10) -> list[str]:
    """The end of what a run has printed since it was started last."""
    return tail(log_of(run_dir)).rpartition("\n$ ")[2].splitlines()[-lines:]


def is_resumable(run_dir: Path) -> bool:
    return (run_dir / "checkpoint.pt").exists()


def is_completed(run_dir: Path) -> bool:
    """Whether a run has ended well: a resumed one might go on beyond its --stop-at-return."""
    return (run_dir / "completed").exists()


def mark_completed(run_dir: Path) -> None:
    (run_dir / "completed").touch()


def checkpoint_step(run_dir: Path) -> int:
    """The step of a run's checkpoint, -1 before there is one. It takes a millisecond, and no PyTorch."""
    if not is_resumable(run_dir):
        return -1
    with zipfile.ZipFile(run_dir / "checkpoint.pt") as file:
        [name] = [name for name in file.namelist() if name.endswith("/data.pkl")]
        operations = pickletools.genops(file.read(name))
    any(key == "global_step" for _, key, _ in operations)  # goes on to the key; its value is the next number
    return next(value for operation, value, _ in operations if operation.name.startswith(("BININT", "LONG")))


def discard_unless_resumable(run_dir: Path) -> None:
    """Remove the folder of a run that was killed before its first checkpoint."""
    if run_dir.exists() and not is_resumable(run_dir):
        shutil.rmtree(run_dir)


def read_config(run_dir: Path) -> dict:
    """Settings and versions of a run; none of one that was killed before it had written them."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_dir / "config.json").read_text())
    return {}


def add_to_config(run_dir: Path, more: dict) -> None:
    """Have a run's config.json say more."""
    (run_dir / "config.json").write_text(json.dumps(read_config(run_dir) | more, indent=2) + "\n")


def latest_step(run_dir: Path) -> int:
    """The step of the latest evaluation, 0 before the first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(tail(run_dir / "evaluations.csv").splitlines()[-1].split(",")[0])
    return 0


def tail(path: Path, size: int = 4096) -> str:
    """The end of a text file, at most size bytes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def read_files(root: Path, run_dir: Path, seen: dict[str, tuple]) -> dict[str, bytes]:
    """Files of a run, by their paths below root, that are not as in `seen`, which is brought up to date.

    Checkpoints come first: what goes with a checkpoint was written before it, so is in what is read after it.
    """
    paths, files = [root / log_of(run_dir), *(root / run_dir).rglob("*")], {}
    for path in sorted(paths, key=lambda path: path.stem != "checkpoint"):
        if path.is_file() and path.suffix != ".tmp":
            with contextlib.suppress(FileNotFoundError):
                name, state = str(path.relative_to(root)), path.stat()
                version = (state.st_mtime_ns, state.st_size, state.st_ino)
                if seen.get(name) != version:
                    files[name], seen[name] = path.read_bytes(), version
    return files


def write_files(root: Path, files: dict[str, bytes]) -> None:
    """Write what `read_files` read, each file whole or not at all, checkpoints last."""
    for name, content in reversed(files.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)


def read_events(folder: Path) -> pd.DataFrame:
    """The scalars of a folder's TensorBoard events: global_step and a column for each tag, with gaps."""
    import pandas as pd
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    columns = {
        tag: pd.DataFrame(events.Scalars(tag)).groupby("step")["value"].mean()
        for tag in sorted(events.Tags()["scalars"])
    }
    return pd.DataFrame(columns).rename_axis("global_step").reset_index()


def thin(progress: pd.DataFrame, rows: int = PROGRESS_ROWS) -> pd.DataFrame:
    """At most `rows` rows: every few become one, with the last of their steps and the means of the rest."""
    size = max(1, math.ceil(len(progress) / rows))
    groups = progress.groupby(progress.index // size)
    return groups.mean().assign(global_step=groups["global_step"].last())


def read_configs(results: Path) -> dict[str, dict]:
    """The settings and versions of the runs in a grid's results, by their names; none without results."""
    with contextlib.suppress(FileNotFoundError):
        lines = map(json.loads, (results / "runs.jsonl").read_text().splitlines())
        return {config.pop("run"): config for config in lines}
    return {}


def export_run(run_dir: Path, results: Path) -> None:
    """Add a run to the results of a grid."""
    import pandas as pd

    if not (run_dir / "evaluations.csv").exists():
        error(f"{run_dir} is not a run folder")
    name, progress = run_dir.resolve().name, thin(read_events(run_dir))
    cells = progress.drop(columns="global_step").map(lambda x: "" if math.isnan(x) else f"{x:.6g}")
    tables = {
        "evaluations": pd.read_csv(run_dir / "evaluations.csv", dtype=str, keep_default_na=False),
        "progress": progress[["global_step"]].astype(str).join(cells),
    }
    # Where the run lay is nobody else's business, and may be an absolute path.
    config = json.loads((run_dir / "config.json").read_text()) | dict.fromkeys(PLACES)
    results.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(results, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # two runs that end at once are added in turn
    configs = read_configs(results)
    if name in configs:
        error(f"{results} has a run {name} already")
    for table, rows in tables.items():
        path = results / f"{table}.csv.gz"
        rows.insert(0, "run", name)
        if path.exists():
            old = pd.read_csv(path, dtype=str, keep_default_na=False)
            rows = pd.concat([old[old["run"] != name], rows]).fillna("").sort_values("run", kind="stable")
        if table == "progress":  # the tags of one script are not those of another
            rows = rows[["run", "global_step", *sorted(set(rows) - {"run", "global_step"})]]
        packed = {"method": "gzip", "mtime": 0}
        rows.to_csv(path.with_suffix(".tmp"), index=False, lineterminator="\n", compression=packed)
        os.replace(path.with_suffix(".tmp"), path)
    lines = [json.dumps({"run": n} | c) for n, c in sorted((configs | {name: config}).items())]
    (results / "runs.tmp").write_text("\n".join(lines) + "\n")
    os.replace(results / "runs.tmp", results / "runs.jsonl")


def read_runs(paths: list[Path], out: Path) -> list[Record]:
    """The runs at or below the paths, each once; out is the folder of a report, whose figures are none."""
    found = {}
    for path in paths:
        grids = {file.parent for file in path.rglob("runs.jsonl")}
        files = [*path.rglob("config.json"), *path.rglob("events.out.tfevents*")]
        runs = [*map(read_run, {file.parent for file in files}), *itertools.chain(*map(read_results, grids))]
        # A shell's RESULTS/*/ has the figures of the last report among the grids.
        if not runs and path.resolve() != (out / "figures").resolve():
            error(f"there is no run in {path}")
        found |= {run.folder.resolve(): run for run in runs}
    return [found[folder] for folder in sorted(found)]


def read_results(grid: Path) -> list[Record]:
    """The runs in the results of a grid; each has the folder that it would have of its own."""
    import pandas as pd

    try:
        evaluations, progress = (
            dict(list(pd.read_csv(grid / f"{name}.csv.gz", dtype={"run": str}).groupby("run")))
            for name in ("evaluations", "progress")
        )
        return [
            make_record(grid / name, config, evaluations.get(name), progress.get(name))
            for name, config in read_configs(grid).items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as exception:
        error(f"cannot read the results in {grid}: {type(exception).__name__}: {exception}")


def read_run(folder: Path) -> Record:
    """A run folder of a script, of peers.py or of CleanRL."""
    import pandas as pd

    names, tables = folder.resolve().name.split("__"), {"evaluations": None, "progress": None}
    try:
        if own := (folder / "config.json").exists():
            config = json.loads((folder / "config.json").read_text())
        elif len(names) == 4:
            config = {"env_id": names[0], "script": names[1], "seed": int(names[2])}
        else:
            error(f"{folder} has no config.json, nor a name like <env id>__<exp name>__<seed>__<unix time>")
        if any(folder.glob("events.out.tfevents*")):
            tables["progress"] = read_events(folder)
        for name in tables:
            if (folder / f"{name}.csv").exists():
                tables[name] = pd.read_csv(folder / f"{name}.csv")
        return make_record(folder, config, *tables.values(), own)
    except (OSError, ValueError, KeyError, TypeError) as exception:
        error(f"cannot read the run {folder}: {type(exception).__name__}: {exception}")


def make_record(
    folder: Path,
    config: dict,
    evaluations: pd.DataFrame | None,
    progress: pd.DataFrame | None,
    own: bool = True,
) -> Record:
    """A run from its tables. own: its speed is that since the row before; CleanRL's is since the start."""
    import pandas as pd
    from records import RETURN, SPS, Record

    config.setdefault("script", script_of(folder, config["env_id"]))
    none = pd.DataFrame(columns=["global_step", "return"])
    evaluations = (none if evaluations is None else evaluations)[["global_step", "return"]].astype(float)
    progress = none[["global_step"]] if progress is None else progress.drop(columns="run", errors="ignore")
    progress = progress.astype({"global_step": float}).reset_index(drop=True)
    # What no row of this run fills, be it that it has none, is not told of it.
    progress = progress[["global_step", *progress.drop(columns="global_step").dropna(axis=1, how="all")]]
    if SPS in progress:
        steps, speed = progress["global_step"], progress[SPS].bfill().ffill()
        progress["hours"] = (steps.diff().fillna(steps) / speed).cumsum() if own else steps / speed
        progress["hours"] /= 3600
    if evaluations.empty and RETURN not in progress:
        error(f"{folder} holds neither an evaluation nor a return in training")
    return Record(folder, config, evaluations, progress)


def grid_of(folder: Path, env_id: str) -> Path:
    """The folder of the grid of a run: the first above it that is not named for the environment."""
    return folder.parent.parent if folder.resolve().parent.name == env_id else folder.parent


def script_of(folder: Path, env_id: str) -> str:
    """The script that a run folder is named for, or else its grid: for a config.json that does not tell."""
    names = folder.resolve().name.split("__")
    named = [name for name in names if name != env_id.replace("/", "-") and not name.startswith("seed")]
    return named[0] if len(names) > 1 and named else grid_of(folder, env_id).resolve().name
