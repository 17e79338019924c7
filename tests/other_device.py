"""The device of other_device.cpp, which stands in for a GPU."""

import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

NAME = "other"


def build(folder: Path) -> Path:
    """Compile the device, in some ten seconds; returns the library, which lies in the folder."""
    library, source, torch_folder = folder / "other_device.so", Path(__file__), Path(torch.__file__).parent
    headers, libraries = f"-isystem{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"
    flags = ("-std=c++20", "-O0", "-shared", "-fPIC", headers, libraries, "-ltorch_cpu", "-lc10")
    subprocess.run(["c++", source.with_suffix(".cpp"), "-o", library, *flags], check=True)
    return library


def register(library: Path) -> torch.device:
    """Make the device known to PyTorch, once and for all in this process."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    # What PyTorch asks of a device's Python module: torch.manual_seed, the optimizers, torch.autocast.
    functions = {
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    torch._register_device_module(NAME, SimpleNamespace(**functions))
    # Of PyTorch's own mse_loss, where a device has no kernel for it.
    warnings.filterwarnings("ignore", "An output with one or more elements was resized")
    return torch.device(NAME, 0)
