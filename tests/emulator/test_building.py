import os
import subprocess
import sys
from pathlib import Path

import pytest

import emulator
from emulator import building

TESTS = Path(__file__).parents[1]
REASON = emulator.why_not()

needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def device():
    """The library, where it is there: it takes a minute of a core, and tests of all else need none of it."""
    if REASON is not None or not building.is_built():
        pytest.skip(REASON or "the emulated device is not built: make emulated")


def run(*arguments, **environment):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)


@pytest.mark.usefixtures("device")
def test_three_devices():
    program = """
import emulator
emulator.install()
emulator.configure(devices=3)
import torch
last = torch.ones(3, device="cuda:2")
moved = last.to("cuda:1") + 1
print(torch.cuda.device_count(), moved.tolist(), moved.device, emulator.races())
"""

    ended = run("-c", program)

    assert ended.stdout == "3 [2.0, 2.0, 2.0] cuda:1 []\n", ended.stderr


@pytest.mark.usefixtures("device")
def test_a_race_fails_the_test_that_has_it(tmp_path):
    (tmp_path / "test_one.py").write_text("""
import torch

def test_race():
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()

def test_none():
    torch.ones(3, device="cuda").sum()
""")

    plugins = ("-p", "emulator.plugin", "-p", "no:cacheprovider")
    ended = run("-m", "pytest", "-q", *plugins, str(tmp_path), TORCHREMAT_DEFAULT_DEVICE="cpu")

    assert ended.returncode == 1
    assert "test_one.py::test_race" in ended.stdout
    assert "test_one.py::test_none" not in ended.stdout
    assert "the emulated device has seen races" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout


def test_after_torch_it_is_too_late(monkeypatch):
    import torch  # noqa: F401

    monkeypatch.setattr(emulator, "is_installed", lambda: False)

    with pytest.raises(emulator.EmulatorError, match="install the emulated ones before"):
        emulator.install()


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")

    with pytest.raises(emulator.EmulatorError, match="'no-such-compiler' is not found; install g\\+\\+, or set CXX"):
        emulator.build()


def test_a_torch_that_nobody_has_tried_is_named(monkeypatch):
    monkeypatch.setattr(building, "torch_version", lambda: "2.99.1+cpu")
    monkeypatch.setenv("CXX", sys.executable)  # it is there, and is not asked

    with pytest.raises(emulator.EmulatorError, match=r"known to work with torch 2\.13, and this is 2\.99\.1\+cpu"):
        emulator.build()


@needs_compiler
def test_what_the_compiler_says_is_shown(monkeypatch, tmp_path):
    (tmp_path / "broken.cpp").write_text("this is no program;")
    monkeypatch.setattr(building, "SOURCES", tmp_path)

    with pytest.raises(emulator.EmulatorError, match=r"broken\.cpp.*failed:\n(.|\n)*error"):
        emulator.build(tmp_path / "out")
