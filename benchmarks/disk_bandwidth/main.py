"""How fast the store on a disk writes and reads, against plain `pwrite` and `preadv` on the same disk."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import ratio
from _tables import MIB, bar, markdown, publish
from torch import Tensor

import torchremat

LEAST = 0.5
ROUNDS = 11
TOTAL_BYTES = 128 * MIB
SIZES_BYTES = [1 * MIB, 4 * MIB, 16 * MIB]
# How many tensors are asked for ahead of the one that is read.
AHEAD = 2

WRITE, TO_DISK, READ, COLD = "write", "write, and wait for the disk", "read", "read from the disk"


def open_files() -> set[int]:
    """Descriptors of files without a name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and os.readlink(path).endswith("(deleted)"):
            found.add(int(name))
    return found


class Plain:
    """One file that is written and read by one thread, from the beginning to the end, without checks."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.descriptor = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR, 0o600)
        os.posix_fallocate(self.descriptor, 0, sum(tensor.nbytes for tensor in tensors))

    def write(self) -> None:
        place = 0
        for tensor in self.tensors:
            data = memoryview(tensor.numpy())
            while data:
                written = os.pwrite(self.descriptor, data, place)
                data, place = data[written:], place + written

    def read(self) -> list[Tensor]:
        place, got = 0, []
        for tensor in self.tensors:
            got = [torch.empty_like(tensor)]
            data = memoryview(got[0].numpy())
            while data:
                read = os.preadv(self.descriptor, [data], place)
                data, place = data[read:], place + read
        return got


class Ours:
    """The store: threads write and read ahead, and every tensor has its checksum."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        before = open_files()
        self.store = torchremat.Disk()
        (self.descriptor,) = open_files() - before
        self.handles: list[object] = []

    def write(self) -> None:
        self.handles.clear()
        self.handles.extend(self.store.put(tensor) for tensor in self.tensors)
        for handle in self.handles:
            handle.settle()

    def read(self) -> list[Tensor]:
        got = []
        for index, handle in enumerate(self.handles):
            for other in self.handles[index + 1 : index + 1 + AHEAD]:
                other.prefetch()
            got = [handle.get()]
        return got


def timed(do: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    do()
    return time.perf_counter() - start_s


def one_round(way: Plain | Ours) -> dict[str, float]:
    """Seconds of everything, once."""

    def to_disk() -> None:
        way.write()
        os.fsync(way.descriptor)

    os.fsync(way.descriptor)  # what others have left to be written is not ours to wait for
    took = {WRITE: timed(way.write), READ: timed(way.read)}
    os.fsync(way.descriptor)
    took[TO_DISK] = timed(to_disk)
    os.posix_fadvise(way.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    took[COLD] = timed(way.read)
    return took


def measured(size: int, total: int, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    tensors = [torch.randint(256, (size,), dtype=torch.uint8) for _ in range(total // size)]
    ways = {"plain": Plain(tensors), "ours": Ours(tensors)}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            for what, took in one_round(way).items():
                if turn:
                    seconds[name].setdefault(what, []).append(took)
    last = ways["ours"].read()[0]
    return {
        "size_bytes": size,
        "equal": torch.equal(last, tensors[-1]),
        "bytes_per_s": {
            name: {what: total / statistics.median(each) for what, each in found.items()}
            for name, found in seconds.items()
        },
        # Of speeds, so the other way round than that of seconds.
        "ratio": {what: asdict(ratio(seconds["plain"][what], each)) for what, each in seconds["ours"].items()},
    }


def run(smoke: bool) -> dict[str, object]:
    sizes = [4096, 65536] if smoke else SIZES_BYTES
    found = [measured(size, 2**18 if smoke else TOTAL_BYTES, 1 if smoke else ROUNDS) for size in sizes]
    bars = []
    for one in found:
        mib = one["size_bytes"] // MIB
        for what in (WRITE, TO_DISK):
            median = one["ratio"][what]["median"]
            bars.append(bar(f"{what}, {mib} MiB: at least {LEAST} of plain", f"{median:.2f}", median >= LEAST))
        bars.append(bar(f"{mib} MiB: what comes back is equal", "yes" if one["equal"] else "no", one["equal"]))
    return {"sizes": found, "total_bytes": TOTAL_BYTES, "bars": bars}


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for one in results["sizes"]:
        for what in (WRITE, TO_DISK, READ, COLD):
            speed = [f"{one['bytes_per_s'][name][what] / 1e9:.2f}" for name in ("plain", "ours")]
            spread = one["ratio"][what]
            cell = f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})"
            rows.append([f"{one['size_bytes'] / MIB:g} MiB, {what}", *speed, cell])
    return {"bandwidth": markdown(["GB/s", "plain", "ours", "ours / plain"], rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
