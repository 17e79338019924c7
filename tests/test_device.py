"""Every script that has a network, on a device other than the CPU, where mixing the two fails as on a GPU.

And on a GPU where there is one.
"""

import math
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import other_device
import pytest
import torch
from conftest import RUNS, assert_same, flags, load_script
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="the device needs a C++ compiler")


def check_device(part, device: torch.device) -> None:
    """Fails unless all tensors of a network, an optimizer or a replay buffer are on the device."""
    state = [vars(part), part.state_dict()]
    if isinstance(part, torch.optim.Optimizer):  # some count their steps on the CPU
        state = [{**moments, "step": None} for moments in part.state.values()]
    wrong = {(x.shape, x.device) for x in tree_leaves(state) if isinstance(x, Tensor) and x.device != device}
    assert not wrong, f"{type(part).__name__} has {wrong}"


def run(library: Path, gpu: bool, folder: Path, name: str, arguments: list[str], killed_at: float) -> None:
    """Run a script's command on the other device; its process dies as it reaches the step `killed_at`."""
    os.chdir(folder)
    device = torch.device("cuda", 0) if gpu else other_device.register(library)
    script = load_script(name)
    prepare, make_policy = script.prepare, script.make_policy

    def prepare_other(args) -> torch.device:
        chosen = prepare(args)
        return chosen if gpu else device

    def make_policy_checked(args, agent, space) -> Callable:
        check_device(agent, device)
        return make_policy(args, agent, space)

    class Run(script.Run):
        def end_iteration(self, steps: int, *rest) -> None:
            for name, part in self.parts.items():
                if name != "games":  # which are always on the CPU
                    check_device(part, device)
            if self.global_step + steps >= killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            super().end_iteration(steps, *rest)

    script.prepare, script.make_policy, script.Run = prepare_other, make_policy_checked, Run
    sys.argv = [f"{name}.py", *arguments]
    with Path("output").open("w") as file, redirect_stdout(file):
        script.main()


def mix(library: Path) -> None:
    """Fails unless the device refuses what a GPU refuses, and takes what it takes."""
    device = other_device.register(library)
    ours, theirs, index = torch.ones(2, device=device), torch.ones(2), torch.zeros(2, dtype=torch.long)
    generator = torch.Generator(device)
    mixtures = (
        lambda: ours + theirs,
        lambda: theirs.add_(ours),
        lambda: torch.tensor(1.0).add_(ours[0]),
        lambda: torch.cat([ours, theirs]),
        lambda: torch.where(ours > 0, ours, theirs),
        lambda: torch.nn.functional.linear(theirs, ours),
        lambda: ours.gather(0, index),
        lambda: theirs[index.to(device)],
        lambda: ours.index_put_((index,), theirs),
        lambda: torch.rand(2, generator=generator),
        lambda: torch.rand(2, device=device, generator=torch.Generator()),
        lambda: ours.numpy(),
    )
    for mixture in mixtures:
        with pytest.raises((RuntimeError, TypeError), match="device"):
            mixture()
    ours[index] = 2 * torch.tensor(1.5)
    assert (ours + torch.tensor(1.0)).tolist() == [4.0, 2.0]
    assert torch.rand(2, device=device, generator=generator).device == device


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Callable:
    """Calls a function with the device's library, in a process of its own; returns the exit status."""
    library = other_device.build(tmp_path_factory.mktemp("device"))
    context = multiprocessing.get_context("forkserver")
    # What takes seconds to import, once for all; the device's name can be given only once in a process.
    slow = ["torch._dynamo", "torch.utils.tensorboard", "tyro", "gymnasium.envs.mujoco"]
    context.set_forkserver_preload(slow)

    def launch(function: Callable, *arguments) -> int:
        process = context.Process(target=function, args=(library, *arguments))
        process.start()
        process.join(timeout=300)
        return process.exitcode

    return launch


def test_device_refuses_what_a_gpu_refuses(launch):
    assert launch(mix) == 0


def saved(folder: Path) -> dict[str, dict]:
    """Every file of tensors in a run folder."""
    return {x.stem: torch.load(x, map_location="cpu", weights_only=True) for x in folder.glob("*.pt")}


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize(
    "gpu", [pytest.param(False, id="other"), pytest.param(True, marks=on_a_gpu, id="gpu")]
)
@pytest.mark.parametrize(
    "name", [name for name in RUNS if name != "qlearning_tabular"]
)  # which has no network
def test_trains_resumes_to_the_same_bits_and_plays(name, gpu, launch, tmp_path):
    script, settings, killed_at = load_script(name), flags(RUNS[name]), RUNS[name]["total_timesteps"] * 0.7
    whole, killed, cpu = tmp_path / "whole", tmp_path / "killed", tmp_path / "cpu"

    def command(*arguments, killed_at: float = math.inf) -> int:
        device = ("--device", "cuda") if gpu else ()
        return launch(run, gpu, tmp_path, name, [*map(str, arguments), *device], killed_at)

    assert command(*settings, "--run-dir", whole) == 0
    assert command(*settings, "--run-dir", killed, killed_at=killed_at) == -signal.SIGKILL
    assert 0 < saved(killed)["checkpoint"]["global_step"] < killed_at
    assert command("--resume", killed) == 0
    ours, theirs = saved(killed), saved(whole)
    assert ours.keys() == theirs.keys()
    for file in ours:
        assert_same(ours[file], theirs[file])
    assert (killed / "evaluations.csv").read_text() == (whole / "evaluations.csv").read_text()

    assert command("--evaluate", killed, "--eval-episodes", 2) == 0
    lines = (tmp_path / "output").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["episode", "episode", "mean"]

    if gpu:  # whose generators draw other numbers
        return
    # What shares its memory with an array on the CPU, and does not elsewhere, must make no difference.
    script.train(script.Args(**RUNS[name], device="cpu", run_dir=cpu))
    # But for rounding: Adam's first steps are of the gradient's sign, also where that is next to nothing.
    for name, weights in saved(cpu)["model"]["agent"].items():
        close = torch.isclose(ours["model"]["agent"][name], weights, atol=1e-4, rtol=1e-4)
        assert close.double().mean() > 0.9999, name


@on_a_gpu
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["ppo_atari", "pqn_atari"])
def test_a_graph_computes_what_the_network_does(name, bf16):
    script, computed = load_script(name), []
    args = script.Args(device="cuda", bf16=bf16)
    device = script.prepare(args)
    agent = script.make_agent(args, script.make_envs(args, 1)).to(device)
    first, obs = torch.randint(0, 256, (2, 16, 4, 84, 84), dtype=torch.uint8, device=device)
    graph = script.graphed(agent, first)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.mul_(1.5)  # as an update changes them, in place
    for function in (agent, graph):
        outputs = tree_leaves(function(obs))
        gradient = torch.autograd.grad(sum(x.square().sum() for x in outputs), [*agent.parameters()])
        computed.append([x.detach().clone() for x in (*outputs, *gradient)])
    torch.testing.assert_close(*computed)


@pytest.mark.parametrize("name", ["ppo_atari", "pqn_atari"])
def test_nothing_is_used_that_a_graph_has_overwritten(name, monkeypatch, tmp_path):
    script = load_script(name)

    def overwriting(agent: torch.nn.Module, obs: Tensor) -> Callable:
        returned = []

        def call(obs: Tensor) -> Tensor | tuple[Tensor, ...]:
            for x in returned:
                x.detach().fill_(math.nan)
            outputs = agent(obs)
            returned[:] = tree_leaves(outputs)
            return outputs

        return call

    for folder, graphed in (("plain", script.graphed), ("overwriting", overwriting)):
        monkeypatch.setattr(script, "graphed", graphed)
        script.train(script.Args(**RUNS[name], device="cpu", run_dir=tmp_path / folder))
    assert_same(
        saved(tmp_path / "plain")["model"]["agent"], saved(tmp_path / "overwriting")["model"]["agent"]
    )
