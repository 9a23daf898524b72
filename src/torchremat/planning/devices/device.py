"""`Device`: the description of an absent device, as data. From a table of published figures, or saved by a machine.

`Planner.save_device` writes a device with its measured kernels; the devices of the table have none, so the workspace of
their kernels is unknown, and seconds come from a roofline.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

from torchremat.errors import DeviceError
from torchremat.json_data import fields_of, text_of
from torchremat.planning.devices.overheads import NOMINAL, Overheads

_FORMAT = "torchremat device"
_VERSION = 1

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """One operator with arguments of certain shapes, as it ran on a device.

    Attributes:
        seconds: Median over its runs.
        workspace_bytes: Its peak, over the bytes that it returned.
        storage_bytes: Bytes of each storage that it made and returned.
    """

    seconds: float
    workspace_bytes: int
    storage_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, described.

    Attributes:
        name: Its name in plans.
        type: `"cuda"` or `"cpu"`.
        memory_bytes: Its memory; no budget is larger.
        flops: Flops per second of matrix products by the name of the dtype, like `{"bfloat16": 989e12}`. A missing
            dtype is assumed to be as fast as the slowest one present.
        bandwidth: Bytes per second of its memory.
        latency_s: Seconds that the smallest kernel takes.
        efficiency: The share of flops and bandwidth that real kernels reach.
        block_bytes: Granularity to which its allocator rounds sizes up.
        overheads: Overhead of torchremat itself in seconds: for a region, for each tensor that is saved in one, and for
            each operator of a region that is kept in part.
        kernels: Measured kernels by signature.

    Raises:
        DeviceError: One of these is not valid; all invalid ones are named.
    """

    name: str
    type: DeviceType
    memory_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    latency_s: float
    efficiency: float = 0.7
    block_bytes: int = 512
    overheads: Overheads = NOMINAL
    kernels: Mapping[str, MeasuredKernel] = field(default_factory=dict[str, MeasuredKernel], repr=False)

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}, expected a number above 0"
            for name in _NUMBERS
            if not _is_positive(getattr(self, name))
        ]
        problems += [
            f"{name} is {getattr(self, name)!r}, expected an int"
            for name in _INTEGERS
            if isinstance(getattr(self, name), float)
        ]
        if self.type not in ("cpu", "cuda"):
            problems.append(f"type is {self.type!r}, expected 'cpu' or 'cuda'")
        rates = list(self.flops.values()) if isinstance(self.flops, Mapping) else []  # pyright: ignore[reportUnnecessaryIsInstance]  user input
        if not rates or not all(map(_is_positive, rates)):
            problems.append(f"flops is {self.flops!r}, expected at least one dtype with a number above 0")
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
            problems.append(f"name is {self.name!r}, expected a str")
        if not isinstance(self.overheads, Overheads) or not all(map(_is_amount, astuple(self.overheads))):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
            wanted = f"Overheads in seconds of at least 0: {', '.join(one.name for one in fields(Overheads))}"
            problems.append(f"overheads is {self.overheads!r:.80}, expected {wanted}")
        problems += _problems_of(self.kernels)
        if problems:
            raise DeviceError(f"device {self.name!r}: {'; '.join(problems)}.")

    def save(self, path: str | Path) -> None:
        """Write the description to a JSON file.

        Raises:
            OSError: The file cannot be written.
        """
        kernels = {
            name: [kernel.seconds, kernel.workspace_bytes, *kernel.storage_bytes]
            for name, kernel in sorted(self.kernels.items())
        }
        Path(path).write_text(text_of({"format": _FORMAT, "version": _VERSION, **fields_of(self), "kernels": kernels}))

    @staticmethod
    def load(path: str | Path) -> Device:
        """Return the description in a file.

        Raises:
            DeviceError: The file is no description; all missing or wrong fields are named.
        """
        try:
            content: object = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise DeviceError(f"{path}: cannot be read as the description of a device: {error}.") from error
        if not isinstance(content, dict):
            raise DeviceError(
                f"{path}: expected an object with {', '.join(_REQUIRED)}, not a {type(content).__name__}."
            )
        found = cast("dict[str, object]", content)
        if found.get("version", _VERSION) != _VERSION or found.get("format", _FORMAT) != _FORMAT:
            raise DeviceError(
                f"{path}: format {found.get('format')!r} version {found.get('version')!r}; this torchremat reads "
                f"{_FORMAT!r} version {_VERSION}."
            )
        return _read({key: value for key, value in found.items() if key not in _NOT_FIELDS}, str(path))


_REQUIRED = ("name", "type", "memory_bytes", "flops", "bandwidth", "latency_s")
_OPTIONAL = ("efficiency", "block_bytes", "overheads", "kernels")
_NOT_FIELDS = ("format", "version", "host_bandwidth")  # the last is in older files, and no plan depends on it
_NUMBERS = ("memory_bytes", "bandwidth", "latency_s", "efficiency", "block_bytes")
_INTEGERS = ("memory_bytes", "block_bytes")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _problems_of(kernels: object) -> list[str]:
    """Return the problems of a table of kernels; the first one is named."""
    if not isinstance(kernels, Mapping):
        return [f"kernels is {kernels!r:.40}, expected a dict of MeasuredKernel by signature"]
    for name, one in cast("Mapping[object, object]", kernels).items():
        if not isinstance(name, str) or not isinstance(one, MeasuredKernel):
            return [f"kernels[{name!r:.80}] is {one!r:.40}, expected a MeasuredKernel: seconds, and bytes"]
        sizes = (one.workspace_bytes, *one.storage_bytes)
        are_whole = all(isinstance(size, int) for size in sizes)  # pyright: ignore[reportUnnecessaryIsInstance]  user input
        if not (are_whole and all(map(_is_amount, (one.seconds, *sizes)))):
            return [f"kernels[{name!r:.80}] is {one!r}, expected seconds and bytes of at least 0"]
    return []


def _read(content: dict[str, object], source: str) -> Device:
    missing = [name for name in _REQUIRED if name not in content]
    unknown = [name for name in content if name not in (*_REQUIRED, *_OPTIONAL)]
    problems = [f"misses {', '.join(missing)}"] if missing else []
    problems += [f"has {', '.join(unknown)}, which no device has"] if unknown else []
    if problems:
        raise DeviceError(f"{source}: the description of the device {'; it '.join(problems)}.")
    overheads, kernels = content.get("overheads", NOMINAL), content.get("kernels", {})
    if isinstance(overheads, dict):
        with suppress(TypeError):  # other names than an overhead has: told below
            overheads = Overheads(**cast("dict[str, float]", overheads))
    if isinstance(kernels, dict):
        table = cast("dict[str, object]", kernels)
        kernels = MappingProxyType({name: _kernel(numbers) for name, numbers in table.items()})
    try:
        return Device(**{**content, "overheads": overheads, "kernels": kernels})  # pyright: ignore[reportArgumentType]  checked there
    except DeviceError as error:
        raise DeviceError(f"{source}: {error}") from None


def _kernel(numbers: object) -> object:
    """Return the kernel that a file describes by a list; anything else as it is."""
    match numbers:
        case [seconds, workspace_bytes, *storage_bytes]:
            return MeasuredKernel(seconds=seconds, workspace_bytes=workspace_bytes, storage_bytes=tuple(storage_bytes))
        case _:
            return numbers


def _nvidia(name: str, memory_gib: int, flops: dict[str, float], *, bandwidth: float) -> tuple[str, Device]:
    return name, Device(
        name=name,
        type="cuda",
        memory_bytes=memory_gib << 30,
        flops=MappingProxyType(flops),
        bandwidth=bandwidth,
        latency_s=4e-6,
    )


# Dense tensor-core rates, no sparsity; `float32` is the rate without TF32, which is PyTorch's default. Memory is the
# nominal size; a driver keeps some of it.
_BUILT_IN: dict[str, Device] = dict(
    (
        # NVIDIA V100 data sheet (2020), SXM2: 125 TF fp16, 15.7 TF fp32, 900 GB/s. No bfloat16.
        _nvidia("v100", 32, {"float16": 125e12, "float32": 15.7e12}, bandwidth=900e9),
        # NVIDIA A100 data sheet (2021), SXM 80 GB: 312 TF bf16 and fp16, 19.5 TF fp32, 2039 GB/s.
        _nvidia("a100", 80, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}, bandwidth=2039e9),
        # NVIDIA A10 data sheet (2021): 125 TF bf16 and fp16, 31.2 TF fp32, 600 GB/s, 24 GB.
        _nvidia("a10", 24, {"bfloat16": 125e12, "float16": 125e12, "float32": 31.2e12}, bandwidth=600e9),
        # NVIDIA L4 data sheet (2023): 121 TF bf16 and fp16 (242 with sparsity), 30.3 TF fp32, 300 GB/s, 24 GB.
        _nvidia("l4", 24, {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12}, bandwidth=300e9),
        # NVIDIA H100 data sheet (2023), SXM: 1979 TF bf16 with sparsity, so 989 dense; 67 TF fp32, 3.35 TB/s. Of its
        # 80 GB the driver shows 79.2 GiB (see `benchmarks/gpu`).
        _nvidia("h100", 79, {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}, bandwidth=3350e9),
        # NVIDIA H200 data sheet (2024), SXM: as the H100, with 141 GB (decimal, so 131 GiB) and 4.8 TB/s.
        _nvidia("h200", 131, {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}, bandwidth=4800e9),
    )
)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # longer than a file name can be
        return False


def is_described(device: object) -> bool:
    """Return whether `device` names a description, in the table or in a file, and not a device of torch's."""
    if isinstance(device, str):
        return device.lower() in _BUILT_IN or device.endswith(".json")
    return isinstance(device, Device | Path)


def device_of(device: object) -> Device:
    """Return a description: a given one, one named in the table, or one in a file.

    Raises:
        DeviceError: It is none of these.
    """
    names = ", ".join(_BUILT_IN)
    allowed = f"Give one of {names}, a file that `Planner.save_device` has written, or a `torchremat.Device`"
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and device.lower() in _BUILT_IN:
        return _BUILT_IN[device.lower()]
    if isinstance(device, Path) or (isinstance(device, str) and (device.endswith(".json") or _is_file(device))):
        return Device.load(device)
    if device is None:
        raise DeviceError(f"on='meta' plans for another device: pass `device=`. {allowed}.")
    near = difflib.get_close_matches(str(device).lower(), _BUILT_IN, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DeviceError(f"device={device!r} is not a known device.{hint} {allowed}.")
