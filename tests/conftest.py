"""What the tests share. ALGOS_DIR puts another copy of the scripts under test.

Tests of a script that is missing there are skipped.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"  # before the first import of torch: the networks are small, the cores few

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_flatten

REPOSITORY = Path(__file__).resolve().parent.parent
ALGOS = Path(os.environ.get("ALGOS_DIR", REPOSITORY / "algos")).resolve()

# Hopper's random policy ends an episode every 20 steps or so, so that each rollout holds several ends.
SHORT_RUN = {
    "env_id": "Hopper-v4",
    "total_timesteps": 1024,
    "num_envs": 2,
    "num_steps": 64,
    "num_minibatches": 4,
    "update_epochs": 2,
    "learning_rate": 3e-3,
    "hidden_size": 64,
    "log_std_init": 0.0,
    "eval_interval": 384,
    "eval_episodes": 3,
    "greedy": False,
    "checkpoint_interval": 256,
}

OFF_POLICY = {
    "env_id": "Hopper-v4",
    "total_timesteps": 200,
    "num_envs": 2,
    "buffer_size": 90,  # full, and overwritten, before the run is killed
    "learning_starts": 40,
    "batch_size": 16,
    "eval_interval": 80,
    "eval_episodes": 2,
    "greedy": False,
    "torch_threads": 1,
    "checkpoint_interval": 40,
}
ATARI = {
    "env_id": "PlainRL/ShortBreakout-v0",
    "total_timesteps": 120,
    "num_envs": 2,
    "num_steps": 5,
    "eval_interval": 60,
    "eval_episodes": 2,
    "greedy": False,
    "torch_threads": 1,
    "checkpoint_interval": 60,
}
# Of every script, a run of a second or so with several checkpoints.
RUNS = {
    "ppo_continuous": SHORT_RUN,
    "sac_continuous": OFF_POLICY | {"hidden_size": 16},
    "crossq_continuous": OFF_POLICY | {"critic_hidden_size": 16, "policy_hidden_size": 16},
    "a2c_atari": ATARI,
    "qcritic_atari": ATARI,
    "ppo_atari": ATARI | {"num_minibatches": 2, "update_epochs": 2},
    "pqn_atari": ATARI | {"num_minibatches": 2},
    "reinforce_cartpole": {
        "total_timesteps": 1000,
        "num_envs": 2,
        "batch_episodes": 4,
        "eval_interval": 250,
        "eval_episodes": 3,
        "greedy": False,
        "checkpoint_interval": 200,
    },
    "qlearning_tabular": {"total_timesteps": 20_000, "eval_interval": 5000, "checkpoint_interval": 2000},
}
# Games of at most 25 steps: some are truncated within a short run.
SHORT_GAME = {"game": "breakout", "frameskip": 4, "max_num_frames_per_episode": 100, "noop_max": 0}
gym.register("PlainRL/ShortBreakout-v0", "ale_py.env:AtariEnv", kwargs=SHORT_GAME)

# Runs a script up to the given call of one of its functions, and dies there.
KILLER = """
import importlib.util, os, signal, sys
path, name, calls, *sys.argv[1:] = sys.argv[1:]
spec = importlib.util.spec_from_file_location("script", path)
sys.modules["script"] = script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
owner = os if name == "replace" else script
function, countdown = getattr(owner, name), iter(range(int(calls) - 1, -1, -1))
def wrapper(*args, **kwargs):
    next(countdown) or os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)
setattr(owner, name, wrapper)
script.main()
"""


# Runs a script that can write no more than so many bytes to any one file: to a program, a full disk.
LIMITED = """
import resource, runpy, sys
limit, *sys.argv = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def script_path(name: str, folder: Path = ALGOS) -> Path:
    path = folder / f"{name}.py"
    if "ALGOS_DIR" in os.environ and not path.exists():
        pytest.skip(f"there is no {path}")
    return path


def load_script(name: str, folder: Path = ALGOS) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, script_path(name, folder))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*arguments, cwd: Path, **environment: str | None) -> subprocess.CompletedProcess:
    """A Python of its own, in an environment like this one but for the variables given; None unsets one."""
    return subprocess.run(
        [sys.executable, "-B", *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in (os.environ | environment).items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_script(name: str, *flags, cwd: Path, **environment: str | None) -> subprocess.CompletedProcess:
    return run_python(script_path(name), *flags, cwd=cwd, **environment)


def flags(settings: dict) -> list[str]:
    """Settings as they stand on a command line."""
    parts = []
    for name, value in settings.items():
        name = name.replace("_", "-")
        parts += (
            [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
        )
    return parts


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and bytes of every file below a folder; folders count as empty files."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: for each tag, steps and values."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def evaluation_seed(seed: int, step: int) -> int:
    """That of a run's evaluation at a step: of a stream that training does not use."""
    return int(np.random.SeedSequence((seed, step, 2**31)).generate_state(1)[0])


def assert_same(a: dict, b: dict) -> None:
    """Every tensor and number of two checkpoints is equal, bit for bit; the arguments name the folder."""
    (leaves_a, spec_a), (leaves_b, spec_b) = (tree_flatten(state | {"args": None}) for state in (a, b))
    assert spec_a == spec_b
    for x, y in zip(leaves_a, leaves_b, strict=True):
        assert torch.equal(x, y) if torch.is_tensor(x) else x == y


@pytest.fixture(autouse=True)
def _restore_signal_handlers():
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="session")
def ppo() -> ModuleType:
    return load_script("ppo_continuous")


@pytest.fixture
def train(ppo, tmp_path, monkeypatch):
    """Trains in this process, in a new run folder of tmp_path; returns the checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(run_dir: str = "run", **settings) -> dict:
        ppo.train(ppo.Args(**(SHORT_RUN | settings | {"run_dir": Path(run_dir)})))
        return torch.load(Path(run_dir, "checkpoint.pt"), weights_only=True)

    return run
