"""The scripts that a grid can name, and one of them as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARK, ALGOS = REPOSITORY / "benchmark", REPOSITORY / "algos"
SCRIPTS = {path.stem: path for path in (*ALGOS.glob("*.py"), BENCHMARK / "peers.py")}


def load_script(path: Path) -> ModuleType:
    """A script as a module of its own: whoever changes it changes nobody else's."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
