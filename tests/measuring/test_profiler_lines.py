"""What torch's profiler and allocator write to stderr does not reach the terminal; errors and all else do."""

import os
import subprocess
import sys

import pytest
import torch

from torchremat._compat.profiler import errors_alone, profiler_silenced
from torchremat.measuring.allocator import record_allocations

MEASURED = """
import sys, torch, torchremat
from torch import nn

model, x = nn.Linear(64, 64), torch.randn(8, 64)
kept = [torch.randn(1000)]

def step(model):
    kept.clear()  # freed in the block, allocated before it: torch warns of these
    kept.append(torch.randn(1000))
    print("mine", file=sys.stderr)
    return model(x).sum()

torchremat.measure(model, step)
torchremat.plan(model, step, budget="100%")
"""


def run(code):
    environment = {name: value for name, value in os.environ.items() if name not in ("KINETO_LOG_LEVEL", "TORCH_LOGS")}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert found.returncode == 0, found.stderr
    return found.stderr.splitlines()


def test_measuring_and_planning_write_nothing_of_their_own():
    lines = run(MEASURED)

    assert set(lines) == {"mine"}


def test_torch_itself_does_write_them():
    # Otherwise the test above proves nothing, and this file can go.
    lines = run("import torch\nwith torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]): pass")

    assert any("profiler_start" in line for line in lines)


def test_an_error_that_the_user_writes_meanwhile_gets_through(capfd):
    with profiler_silenced():
        os.write(2, b"USDT:2026-01-01 00:00:00 1:1 Handler.cpp:52] profiler_start\nERROR: out of handles\nno line end")

    assert capfd.readouterr().err == "ERROR: out of handles\nno line end"


def test_an_error_in_the_block_gives_stderr_back(capfd):
    with pytest.raises(ValueError, match="mine"), profiler_silenced():
        raise ValueError("mine")

    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_a_process_without_stderr_is_measured_all_the_same():
    code = "import os, sys\nos.close(2)\n" + MEASURED.replace('print("mine", file=sys.stderr)', "pass")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert found.returncode == 0


def test_levels_of_torchs_log_come_back():
    from torchremat._compat.profiler import _level

    if _level is None:
        pytest.skip("this torch has no such variable")
    before = _level.value
    with record_allocations(torch.device("cpu")):
        assert _level.value >= 2
        with errors_alone():
            pass
        assert _level.value >= 2
    assert _level.value == before
