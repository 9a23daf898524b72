"""What torch's profiler and allocator write to stderr does not reach the terminal; errors and all else do."""

import os

import pytest
import torch

from forked import run_main
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


@pytest.fixture
def run(tmp_path):
    """Runs a program, and returns the lines that it has written to stderr."""

    def ran(code):
        program = tmp_path / "program.py"
        program.write_text(f"import warnings\nwarnings.simplefilter('ignore')\n{code}")
        ended = run_main(program, folder=tmp_path, timeout=120)
        assert ended.code == 0, ended.err
        return ended.err.splitlines()

    return ran


def test_measuring_and_planning_write_nothing_of_their_own(run):
    lines = run(MEASURED)

    assert set(lines) == {"mine"}


def test_torch_itself_does_write_them(run):
    # Otherwise the test above proves nothing, and this file can go.
    lines = run("import torch\nwith torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]): pass")

    assert any("profiler_start" in line for line in lines)


def test_an_error_that_the_user_writes_meanwhile_gets_through(capfd):
    with profiler_silenced():
        os.write(2, b"USDT:2026-01-01 00:00:00 1:1 Handler.cpp:52] profiler_start\nERROR: out of handles\nno line end")

    assert capfd.readouterr().err == "ERROR: out of handles\nno line end"


def test_a_build_for_cuda_without_a_device_is_no_error(capfd):
    with profiler_silenced():
        os.write(2, b"ERROR:2026-01-01 00:00:00 1:1 Device.cpp:50] gpuGetDeviceCount failed with code 35\nmine\n")

    assert capfd.readouterr().err == "mine\n"


def test_an_error_in_the_block_gives_stderr_back(capfd):
    with pytest.raises(ValueError, match="mine"), profiler_silenced():
        raise ValueError("mine")

    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_a_process_without_stderr_is_measured_all_the_same(run):
    run("import os\nos.close(2)\n" + MEASURED.replace('print("mine", file=sys.stderr)', "pass"))


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
