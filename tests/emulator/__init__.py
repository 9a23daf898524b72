"""An emulated CUDA device: memory of the host under torch's dispatch key CUDA, with streams whose order is checked.

Install it before torch is imported:

    import emulator
    emulator.install()
    import torch

    x = torch.ones(3, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.mul_(2)  # which does not wait for the ones
    print(emulator.races())

README.md says what it is true to.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
from pathlib import Path

from emulator import surface
from emulator.building import CACHE, EmulatorError, build, torch_folder, why_not

__all__ = ["EmulatorError", "NEVER", "build", "configure", "install", "is_installed", "races", "why_not"]

# For `configure(lag=NEVER)`: an event does not say that it has fired before the host has waited for it.
NEVER = -1

# Python's part of torch may not be imported yet, so the libraries that ours needs are loaded one by one.
_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")


def install(folder: Path = CACHE) -> None:
    """Let torch, which must not be imported yet, find CUDA devices.

    Raises:
        EmulatorError: if torch is imported already, or the library cannot be built.
    """
    if is_installed():
        return
    if "torch" in sys.modules:
        raise EmulatorError("torch asks for its devices while it is imported: install the emulated ones before.")
    library = build(folder)
    for name in _LIBRARIES:
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, surface.Finder(library))
    import torch

    surface.let_storages_be_made(torch)
    torch.backends.cudnn.enabled = False  # it is not there, and modules of RNNs would warn of that
    # Autograd's device threads let go of a graph after backward() has returned, and need Python for that. If it is
    # being torn down at that moment, C++ ends the process; on a device that takes time nobody exits so soon.
    atexit.register(time.sleep, 0.05)


def is_installed() -> bool:
    return "emulator._device" in sys.modules


def configure(
    *,
    devices: int | None = None,
    capacity: int | None = None,
    lag: int | None = None,
    workspaces: bool | None = None,
    slack: bool | None = None,
) -> dict[str, int]:
    """Change what is given, and return all as it was, to be given back later.

    Args:
        devices: How many there are; torch asks once, when it first uses CUDA.
        capacity: Bytes of each.
        lag: How many times an event says that it has not fired, or NEVER.
        workspaces: Whether the first product of a thread on a stream takes 32 MiB.
        slack: Whether a large block keeps a rest of up to 1 MiB, as torch's allocator has it.
    """
    own = surface.device()
    before: dict[str, int] = own.configuration()
    given = {"devices": devices, "capacity": capacity, "lag": lag, "workspaces": workspaces, "slack": slack}
    own.configure(**before | {name: value for name, value in given.items() if value is not None})
    return before


def races() -> list[str]:
    """The races since the last call: each names an operator, its stream, and what it does not wait for."""
    return surface.device().races()
