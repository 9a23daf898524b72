"""The library of the emulated device: compiled once for each torch, compiler and state of the sources.

Needs g++ (or what CXX names) and torch's own headers, and nothing else. torch is not imported here: the library has to
be loaded before.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
CACHE = Path(__file__).parents[2] / "build" / "emulator"
LIBRARY = "_device.so"

# torch's interfaces for devices change from version to version; these were built and run.
KNOWN = ((2, 13),)

_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w")
_LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")


class EmulatorError(RuntimeError):
    """The emulated device cannot be built or installed here."""


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise EmulatorError("the emulated device needs torch, which is not installed.")
    return Path(found.submodule_search_locations[0])


def torch_version() -> str:
    text = (torch_folder() / "version.py").read_text()
    found = re.search(r"__version__ = '([^']+)'", text)
    assert found is not None, "torch/version.py names no version"
    return found[1]


def why_not() -> str | None:
    """Why it cannot be built here, or None."""
    if not sys.platform.startswith("linux"):
        return f"the emulated device is built on Linux only, and this is {sys.platform}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"the emulated device needs a C++ compiler, and {compiler!r} is not found; install g++, or set CXX"
    version = torch_version()
    known = [f"{major}.{minor}" for major, minor in KNOWN]
    if not any(re.match(rf"{one}\b", version) for one in known):
        return f"the emulated device is known to work with torch {', '.join(known)}, and this is {version}"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return f"the emulated device stands in for a CUDA that torch {version} has itself; install its CPU build"
    return None


def build(folder: Path = CACHE) -> Path:
    """The path of the library, which is compiled unless it is there already.

    Raises:
        EmulatorError: if there is no compiler, torch is not one known to work, or the compiler fails.
    """
    reason = why_not()
    if reason is not None:
        raise EmulatorError(reason + ".")
    compiler = os.environ.get("CXX", "g++")
    target = folder / _key(compiler)
    target.mkdir(parents=True, exist_ok=True)
    with open(target / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run ask at the same time
        if not (target / LIBRARY).exists():
            _compile(compiler, target)
    return target / LIBRARY


def is_built(folder: Path = CACHE) -> bool:
    """Whether the library is there already, if it can be built here."""
    return (folder / _key(os.environ.get("CXX", "g++")) / LIBRARY).exists()


def _key(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([torch_version(), sys.version, said, *_FLAGS]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, target: Path) -> None:
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, *(f"-I{include}" for include in includes)]

    def compile_one(source: Path) -> Path:
        compiled = target / f"{source.stem}.o"
        _run([compiler, *flags, "-c", str(source), "-o", str(compiled)])
        return compiled

    slowest_first = sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem != "module", source.stem))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_one, slowest_first))
    lib = torch / "lib"
    unfinished = target / f"{LIBRARY}.new"
    _run(
        [compiler, "-shared", "-o", str(unfinished), *map(str, compiled), f"-L{lib}", f"-Wl,-rpath,{lib}"]
        + [f"-l{library}" for library in _LIBRARIES]
    )
    unfinished.replace(target / LIBRARY)
    for path in compiled:
        path.unlink()


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EmulatorError(f"{' '.join(command)} failed:\n{ended.stderr[-4000:]}")
