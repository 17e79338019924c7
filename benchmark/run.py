"""Runs a grid of settings, environments and seeds, on this machine or on a Ray cluster.

    python benchmark/run.py benchmark/grids/smoke.toml                     a run for each core at a time
    python benchmark/run.py benchmark/grids/ppo.toml --dry-run             prints the commands
    python benchmark/run.py benchmark/grids/ppo.toml --ray-address auto    on the cluster that this node is of
    python benchmark/run.py --export runs/RUN benchmark/results/old        adds a run of its own to results

The same command goes on with a grid that was interrupted in whatever way: finished runs are skipped, the
others resumed from their checkpoints. A grid is a TOML file:

    [defaults]                            # settings of every run; of a list, every value is run
    seed = [1, 2, 3]
    greedy = true
    [[runs]]                              # the product of its lists; settings here override the defaults
    script = "ppo_continuous"             # of algos/; "peers" is benchmark/peers.py; a path that ends in .py,
                                          # from the folder of the grid, is a script of your own
    env-id = ["Walker2d-v4", "Hopper-v4"]
    hidden-size = 64                      # all but script are flags of the script: --hidden-size=64

Runs are in runs/<grid>/<run>/, what they print in runs/<grid>/<run>.log. What is kept of the finished ones is
in benchmark/results/<grid>/, for pandas to read: runs.jsonl, settings and versions, a line for each run;
evaluations.csv.gz, a row for each episode; progress.csv.gz, the TensorBoard scalars of each run in up to 200
rows. A run has one thread, or as many as its torch-threads says.
"""

import contextlib
import ctypes
import fcntl
import importlib.util
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NoReturn

import tyro
from tqdm import tqdm

BENCHMARK = Path(__file__).resolve().parent
SCRIPTS = [*BENCHMARK.parent.glob("algos/*.py"), BENCHMARK / "peers.py", BENCHMARK / "ppo_details.py"]
SCRIPTS = {path.stem: path for path in SCRIPTS}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
NOT_SETTINGS = ("run_dir", "resume", "evaluate")  # arguments of a script that say where, not what
PROGRESS_ROWS = 200
SYNC_SECONDS = 1.0  # how often what has changed in a run folder comes back from another machine


@dataclass
class Args:
    grid: Annotated[Path, tyro.conf.Positional]
    """TOML file that says what to run"""
    workers: int | None = None
    """runs at a time (default: as many as the cores have room for with their threads, or the Ray cluster)"""
    retries: int = 2
    """times that a run which died or lost its node goes on from its checkpoint, before it has failed"""
    results: Path = BENCHMARK / "results"
    """folder for the results of finished runs, in a folder of the grid's name"""
    dry_run: bool = False
    """print the commands of what is not finished, and run nothing"""
    ray_address: str | None = None
    """Ray cluster to run on ("auto": the one that this machine is a node of); needs the extra `cluster`"""
    cpus_per_run: float = 1
    """CPUs that a run takes up on the cluster: as many as it has threads"""
    gpus_per_run: float = 0
    """GPUs that a run takes up on the cluster"""


@dataclass(eq=False)
class Run:
    name: str
    script: Path
    given: dict[str, Any]
    """what the grid says, by the names of the script's flags"""
    settings: dict[str, Any]
    """every setting of the script, as config.json has them"""
    run_dir: Path
    results: Path
    """folder of the grid's results"""
    exported: bool
    """whether it is in the results"""
    failures: int = 0
    process: "subprocess.Popen | RemoteRun | None" = None

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.run_dir.with_name(f"{self.name}.log")

    @property
    def completed(self) -> Path:
        """Marks a run that has ended well: a resumed one might go on beyond its --stop-at-return."""
        return self.run_dir / "completed"

    @property
    def threads(self) -> int:
        return self.settings.get("torch_threads", 1)

    def resumable(self) -> bool:
        return (self.run_dir / "checkpoint.pt").exists()

    def command(self) -> list[str]:
        """The script and its arguments, to start or to go on."""
        if self.resumable():
            return [os.path.relpath(self.script), "--resume", str(self.run_dir)]
        return [os.path.relpath(self.script), *flags(self.given), "--run-dir", str(self.run_dir)]

    def fraction(self) -> float:
        """About which part of the run is done, by its evaluations."""
        with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
            step = int(tail(self.run_dir / "evaluations.csv").splitlines()[-1].split(",")[0])
            return min(step / self.settings["total_timesteps"], 1.0)
        return 0.0


def error(message: str) -> NoReturn:
    """Refuse bad input: one line on standard error, exit status 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def parse_args(cls: type, arguments: list[str]) -> Any:
    """The arguments as an instance of a dataclass. What tyro has to say of bad ones becomes one line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(cls, args=arguments, description=__doc__)
    except SystemExit as stopped:
        if stopped.code:
            error(re.sub(r"[^ -~]+", " ", output.getvalue()))
        raise


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as tyro reads them."""
    switches = {True: "--{}", False: "--no-{}"}
    return [
        switches[value].format(name) if isinstance(value, bool) else f"--{name}={value}"
        for name, value in settings.items()
    ]


def read_grid(path: Path) -> list[dict[str, Any]]:
    """The settings of each run, script among them; names are those of flags."""
    try:
        grid = tomllib.loads(path.read_text())
    except (OSError, ValueError) as exception:
        error(f"cannot read the grid {path}: {exception}")
    for key in ("beside", "differences_from", "aggregate"):  # for report.py
        grid.pop(key, None)
    entries = grid.pop("runs", [])
    tables = [grid.pop("defaults", {}), *(entries if isinstance(entries, list) else [entries])]
    if grid or not all(isinstance(table, dict) for table in tables):
        error(f"{path} must hold [defaults] and [[runs]], and nothing beside them")
    defaults, *entries = [{k.replace("_", "-"): v for k, v in table.items()} for table in tables]
    runs = []
    for entry in entries:
        axes = {k: v if isinstance(v, list) else [v] for k, v in (defaults | entry).items()}
        for name, values in axes.items():
            if not values or not all(isinstance(value, str | int | float) for value in values):
                error(f"{path}: {name} must be a number, a string, a truth value or a list of those")
            if name.replace("-", "_") in NOT_SETTINGS:
                error(f"{path}: {name} is not the grid's to set")
        runs += [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for run in runs:
        script = str(run.get("script"))
        if script.endswith(".py") and (path.parent / script).is_file():
            run["script"] = (path.parent / script).resolve()
        elif script in SCRIPTS:
            run["script"] = SCRIPTS[script]
        else:
            near = get_close_matches(script, SCRIPTS) or sorted(SCRIPTS)
            error(f"{path}: there is no script {run.get('script')!r}; there is {', '.join(near)}")
    if not runs:
        error(f"{path} holds no runs")
    return runs


def script_settings(script: Path) -> list[dict[str, Any]]:
    """Every setting of a script under each list of flags on standard input; refuses what the script does."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    sys.modules[script.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = []
    for command in json.load(sys.stdin):
        args = parse_args(module.Args, command)
        if hasattr(module, "check"):
            # Whether there is such an environment, or a GPU, is for the machine to say that runs it.
            module.make_envs = lambda *_: None
            module.check(replace(args, device="cpu", capture_video=False))
        settings.append(asdict(args))
    return settings


def make_runs(args: Args) -> list[Run]:
    """The runs of a grid, checked; nothing is created."""
    by_script = defaultdict(list)
    for given in read_grid(args.grid):
        by_script[given.pop("script")].append(given)
    # In processes of their own: this one, which only waits, should not hold in memory what scripts import.
    children = {}
    for script in by_script:
        command = [sys.executable, __file__, "--settings", str(script)]
        env = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        children[script] = subprocess.Popen(command, **pipes, text=True, env=env)
    groups = defaultdict(list)
    for script, child in children.items():
        output, complaint = child.communicate(json.dumps([flags(given) for given in by_script[script]]))
        if child.returncode:
            last = (complaint.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            error(f"{args.grid}: {script.stem}: {last.removeprefix('error: ')}")
        for given, settings in zip(by_script[script], json.loads(output), strict=True):
            if "torch_threads" in settings:
                given.setdefault("torch-threads", 1)
                settings["torch_threads"] = given["torch-threads"]
            groups[script, settings["env_id"]].append((given, settings))
    results = args.results / args.grid.stem
    runs, exported = {}, read_results(results)
    for (script, env_id), group in groups.items():
        common = set.intersection(*({*flags(given)} for given, _ in group))
        for given, settings in group:
            unnamed = ("env-id", "seed", "torch-threads")  # what threads change is the time
            varying = {key: value for key, value in sorted(given.items()) if key not in unnamed}
            # A peer is what its algorithm is, as a script is, though all of them be the same.
            shown = (x[2:] for x in flags(varying) if x not in common or x.startswith("--algorithm="))
            parts = [script.stem, env_id, *shown]
            name = "__".join(re.sub(r"[^\w.+-]", "-", x) for x in (*parts, f"seed{settings['seed']}"))
            if name in runs:
                error(f"{args.grid} holds the run {name} twice")
            run_dir = Path("runs", args.grid.stem, name)
            runs[name] = Run(name, script, given, settings, run_dir, results, name in exported)
            check_settings(runs[name], f"{results}: {name}", exported.get(name, {}))
            with contextlib.suppress(OSError, ValueError):  # none yet, or half of one: a run that was killed
                check_settings(runs[name], str(run_dir), json.loads((run_dir / "config.json").read_text()))
    return list(runs.values())


def check_settings(run: Run, where: str, config: dict) -> None:
    """Refuse a run whose folder, or whose results, are of other settings.

    Unless the grid sets it, a setting that the script has gained since then is none, nor is the device.
    """
    config = config and {"torch_threads": 1} | config  # what has no such setting has one thread
    for name, value in run.settings.items() if config else ():
        given = name.replace("_", "-") in run.given
        old = config.get(name, None if given else value)
        if old != value and name not in NOT_SETTINGS and (given or name != "device"):
            way_out = "give the grid another name, or remove the folder"
            error(f"{where} has {name} {old}, the grid now {value}; {way_out}")


def tail(path: Path, size: int = 4096) -> str:
    """The end of a text file, at most size bytes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: for each tag, steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def thin_progress(
    scalars: dict[str, list[tuple[int, float]]], rows: int = PROGRESS_ROWS
) -> list[dict[str, float]]:
    """At most `rows` rows: global_step, and each tag that has a value there.

    Of more steps than that, every few become one row: the last of them, with the mean of each tag over them.
    """
    steps = sorted({step for points in scalars.values() for step, _ in points})
    size = max(1, math.ceil(len(steps) / rows))
    row_of = {step: steps[min(i - i % size + size, len(steps)) - 1] for i, step in enumerate(steps)}
    table = {step: defaultdict(list) for step in row_of.values()}
    for tag, points in scalars.items():
        for step, value in points:
            table[row_of[step]][tag].append(value)
    return [
        {"global_step": step} | {tag: fmean(values) for tag, values in cells.items()}
        for step, cells in table.items()
    ]


def read_results(results: Path) -> dict[str, dict]:
    """The settings and versions of the runs in a grid's results, by their names."""
    with contextlib.suppress(FileNotFoundError):
        lines = map(json.loads, (results / "runs.jsonl").read_text().splitlines())
        return {config.pop("run"): config for config in lines}
    return {}


def export_run(run_dir: Path, results: Path) -> None:
    """Add a run to the results of a grid. It is in them once runs.jsonl has it, which is written last."""
    import pandas as pd

    if not (run_dir / "evaluations.csv").exists():
        error(f"{run_dir} is not a run folder")
    scalars, name = read_scalars(run_dir), run_dir.resolve().name
    progress = pd.DataFrame(thin_progress(scalars), columns=["global_step", *sorted(scalars)])
    cells = progress.drop(columns="global_step").map(lambda x: "" if math.isnan(x) else f"{x:.6g}")
    tables = {
        "evaluations": pd.read_csv(run_dir / "evaluations.csv", dtype=str, keep_default_na=False),
        "progress": progress[["global_step"]].astype(str).join(cells),
    }
    # Where the run lay is nobody else's business, and may be an absolute path.
    config = json.loads((run_dir / "config.json").read_text()) | dict.fromkeys(NOT_SETTINGS)
    results.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(results, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # two runs that end at once are added in turn
    configs = read_results(results)
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


def start_process(
    command: list[str], threads: int, log: Path, cwd: Path | None = None, **options: Any
) -> subprocess.Popen:
    """Python with the given arguments, its output added to a file; it ends when this process does."""
    command = [sys.executable, *command]
    # Elsewhere than on Linux it would go on; there the lock that it holds refuses a second runner.
    prctl, pr_set_pdeathsig = getattr(ctypes.CDLL(None), "prctl", None), 1
    if prctl:
        options["preexec_fn"] = lambda: prctl(pr_set_pdeathsig, signal.SIGKILL)
    with log.open("ab", buffering=0) as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        return subprocess.Popen(
            command,
            env=os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONUNBUFFERED": "1"},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C is for the runner alone, which passes it on
            **options,
        )


def lock(folder: Path) -> int:
    """Take a grid's folder for as long as this process or a run of its lives; returns a file descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(50):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(0.1)  # the runs of a runner that was killed are still ending
    error(f"{folder} is taken: a runner, or a run of one that was killed, is at work there")


def run_grid(
    runs: list[Run], args: Args, start: Callable[[Run], Any], capacity: Callable[[], int]
) -> tuple[list[Run], list[int]]:
    """Run what is not finished, `capacity` at a time; returns what failed, and the signals that ended it."""
    waiting, running, failed, interrupts = deque(run for run in runs if not run.exported), [], [], []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: interrupts.append(number))
    tty, reported, passed_on = sys.stderr.isatty(), time.monotonic(), 0
    tqdm.monitor_interval = 0  # no thread beside this one: runs are forked off it
    write = tqdm.write if tty else print
    bar = tqdm(
        total=len(runs),
        initial=len(runs) - len(waiting) + sum(run.fraction() for run in waiting),
        smoothing=0,
        delay=0 if tty else math.inf,
        bar_format="{percentage:3.0f}%|{bar}| {desc}, {remaining} left",
    )
    while running or (waiting and not interrupts):
        while waiting and not interrupts and len(running) < (args.workers or capacity()):
            running.append(waiting.popleft())
            running[-1].process = start(running[-1])
        for signum in interrupts[passed_on:]:
            for run in running:
                run.process.kill() if passed_on else run.process.send_signal(signum)
            passed_on += 1
        time.sleep(0.02)
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            status = run.process.returncode
            if status == 0 and run.completed.exists():
                run.exported = True
            elif status == 0:
                run.completed.touch()
                waiting.appendleft(run)  # to be exported
            elif status and interrupts:
                waiting.appendleft(run)
            elif status and run.failures < args.retries:
                run.failures += 1
                waiting.appendleft(run)
                attempt = f"retry {run.failures} of {args.retries}"
                write(f"{run.name}: exit status {status}, {attempt}", file=sys.stderr)
            elif status:
                failed.append(run)
                output = tail(run.log).rpartition("\n$ ")[2].splitlines()[-10:]
                write(f"{run.name}: exit status {status}, given up. The end of {run.log}:", file=sys.stderr)
                write("\n".join(f"    {line}" for line in output), file=sys.stderr)
        finished = len(runs) - len(waiting) - len(running) - len(failed)
        counts = f"{finished} of {len(runs)} runs done, {len(running)} running, {len(failed)} failed"
        bar.set_description_str(counts, refresh=False)
        if time.monotonic() > reported + (1 if tty else 60):
            bar.n = finished + len(failed) + sum(run.fraction() for run in (*running, *waiting))
            reported = time.monotonic()
            bar.refresh() if tty else print(bar, flush=True)
    bar.close()
    return failed, interrupts


def start_here(run: Run, descriptor: int) -> subprocess.Popen:
    """Start a run on this machine, go on with it, or export its results, by what its folder holds."""
    if run.completed.exists():
        command = [__file__, "--export", str(run.run_dir), str(run.results)]
    else:
        command = run.command()
        if not run.resumable() and run.run_dir.exists():
            shutil.rmtree(run.run_dir)
    return start_process(command, run.threads, run.log, pass_fds=(descriptor,))


def read_files(root: Path, run_dir: Path, seen: dict[str, tuple]) -> dict[str, bytes]:
    """Files of a run, by their paths below root, that are not as in `seen`, which is brought up to date.

    Checkpoints come first: what goes with a checkpoint was written before it, so is in what is read after it.
    """
    paths = [root / run_dir.with_name(f"{run_dir.name}.log"), *(root / run_dir).rglob("*")]
    files = {}
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


class Node:
    """Ray actor: a run on whichever machine has room for it, in a folder of its own there."""

    def __init__(self, files: dict[str, bytes], command: list[str], run_dir: Path, threads: int):
        self.folder, self.run_dir, self.seen = tempfile.TemporaryDirectory(prefix="plainrl"), run_dir, {}
        self.root = Path(self.folder.name)
        write_files(self.root, files)
        (self.root / run_dir.parent).mkdir(parents=True, exist_ok=True)
        log = self.root / run_dir.with_name(f"{run_dir.name}.log")
        read_files(self.root, run_dir, self.seen)
        self.process = start_process(command, threads, log, self.root)

    def poll(self, seconds: float) -> tuple[int | None, dict[str, bytes]]:
        """Exit status, None after so many seconds without one, and the files that have changed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        status = self.process.returncode
        changed = read_files(self.root, self.run_dir, self.seen)
        if status is not None:
            self.folder.cleanup()
        return status, changed

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)


class RemoteRun:
    """A run on a Ray cluster, with what `run_grid` needs of subprocess.Popen."""

    def __init__(self, run: Run, node: Any):
        if run.run_dir.exists() and not run.resumable():
            shutil.rmtree(run.run_dir)
        # All scripts, since peers.py imports some of the others; beside them one from elsewhere.
        paths = {str(path.relative_to(BENCHMARK.parent)): path for path in SCRIPTS.values()}
        name = next((name for name, path in paths.items() if path == run.script), run.script.name)
        scripts = {name: path.read_bytes() for name, path in (paths | {name: run.script}).items()}
        command = [name, *run.command()[1:]]
        # As much of a repository as tells a script there, which writes it down, the commit that it is of.
        git = "git rev-parse --verify --quiet HEAD"  # through a shell, since there may be no git
        commit = subprocess.run(git, shell=True, cwd=BENCHMARK, capture_output=True).stdout
        repository = {".git/HEAD": commit, ".git/objects/none": b"", ".git/refs/none": b""}
        files = scripts | repository | read_files(Path(), run.run_dir, {})
        self.node = node.remote(files, command, run.run_dir, run.threads)
        self.log, self.returncode = run.log, None
        self.reply = self.node.poll.remote(SYNC_SECONDS)

    def poll(self) -> int | None:
        """Take in what has come back; exit status if the run has ended, 1 if its machine is gone."""
        import ray

        if self.returncode is None and ray.wait([self.reply], timeout=0)[0]:
            try:
                self.returncode, files = ray.get(self.reply)
                write_files(Path(), files)
            except ray.exceptions.RayError as exception:
                self.returncode = 1
                with self.log.open("a") as file:
                    file.write(f"lost its node: {exception}\n")
            if self.returncode is None:
                self.reply = self.node.poll.remote(SYNC_SECONDS)
            else:
                self.kill()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        self.node.send_signal.remote(signum)

    def kill(self) -> None:
        import ray

        ray.kill(self.node)


def connect(args: Args) -> tuple[Callable[[Run], RemoteRun], Callable[[], int]]:
    """Functions that start a run on the Ray cluster, and that say how many it holds."""
    try:
        import ray
    except ModuleNotFoundError:
        error('--ray-address needs Ray: python -m pip install ".[cluster]"')
    try:
        ray.init(args.ray_address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as exception:
        error(f"--ray-address {args.ray_address}: {exception}")
    needs = {"CPU": args.cpus_per_run, "GPU": args.gpus_per_run}
    node = ray.remote(num_cpus=args.cpus_per_run, num_gpus=args.gpus_per_run)(Node)

    def capacity() -> int:
        has = ray.cluster_resources()
        return min(int(has.get(kind, 0) / need) for kind, need in needs.items() if need)

    if not capacity():
        error(f"--ray-address {args.ray_address}: no room for a run that takes up {needs}")
    return lambda run: RemoteRun(run, node), capacity


def main() -> None:
    args = parse_args(Args, sys.argv[1:])
    if args.workers is not None and args.workers < 1:
        error(f"--workers must be above 0, not {args.workers}")
    runs = make_runs(args)
    if args.dry_run:
        for run in runs:
            if not run.exported and not run.completed.exists():
                threads = [f"{name}={run.threads}" for name in THREAD_VARIABLES]
                print(*threads, shlex.join([sys.executable, *run.command()]))
        return
    # Threads beyond the cores wait for each other: on two cores, two runs of A2C with two threads each went
    # at 60 steps/s each, one alone at 1,300.
    threads = max((run.threads for run in runs if not run.exported), default=1)
    room = max(1, os.cpu_count() // threads)
    start_there, capacity = connect(args) if args.ray_address else (None, lambda: room)
    descriptor = lock(Path("runs", args.grid.stem))

    def start(run: Run) -> subprocess.Popen | RemoteRun:
        return start_there(run) if start_there and not run.completed.exists() else start_here(run, descriptor)

    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    failed, interrupts = run_grid(runs, args, start, capacity)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    finished, results = sum(run.exported for run in runs), args.results / args.grid.stem
    print(f"{finished} of {len(runs)} runs done, {len(failed)} failed; results in {results}")
    print(f"{seconds:.0f} s, {cores:.2f} cores here busy with runs, the runner took {megabytes:.0f} MB")
    if interrupts:
        print(f"to go on: {shlex.join(('python', *sys.argv))}")
        raise SystemExit(128 + interrupts[0])
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--settings"]:
        print(json.dumps(script_settings(Path(sys.argv[2])), default=str))
    elif sys.argv[1:2] == ["--export"]:
        export_run(*map(Path, sys.argv[2:]))
    else:
        main()
