"""The bytes that torch's CPU allocator has, counted below torch: see `allocations.c`, which has to be preloaded."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")


@dataclass
class Steps:
    """The steps of a training.

    Attributes:
        rises: Bytes of each step at its peak, over those that were live when it began.
        gradient_bytes: Bytes of the gradients that were live when it began.
    """

    rises: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)

    def begin(self, model: nn.Module) -> None:
        gc.collect()
        self.gradient_bytes.append(sum(one.grad.nbytes for one in model.parameters() if one.grad is not None))
        reset_peak()
        self._live, _ = live_and_peak()

    def end(self) -> None:
        self.rises.append(live_and_peak()[1] - self._live)

    @contextmanager
    def one(self, model: nn.Module) -> Generator[None]:
        self.begin(model)
        yield
        self.end()


def live_and_peak() -> tuple[int, int]:
    """Return the bytes that are live, and the most that were since the peak was reset."""
    library = ctypes.CDLL(None)
    library.counted_live.restype = library.counted_peak.restype = ctypes.c_long
    return library.counted_live(), library.counted_peak()


def reset_peak() -> None:
    """Begin a new peak with what is live."""
    ctypes.CDLL(None).counted_reset()


def run_counted(program: Path, arguments: Sequence[str]) -> object:
    """Run a program with its allocations counted; return what it prints, as JSON in its last line."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "allocations.so"
        command = [str(COMPILER), "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "allocations.c"), "-ldl"]
        subprocess.run(command, check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(program), *arguments], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
