"""How fast a store is: a tensor of typical size, put and brought back several times, and a tiny one."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchremat.planning.cargo import Speed
from torchremat.stores.landing import settle
from torchremat.tensors.handles import Handle, Store

_TIMES = 5
_TINY_ELEMENTS = 64
_NEVER_S = 1e9  # of a store that has no room


def measured_speed(store: Store, device: torch.device, sizes: list[int]) -> Speed:
    """Return how fast a store is for tensors of typical size."""
    # Half of all bytes are in tensors of this size or smaller ones.
    ordered = np.sort(np.array(sizes, np.int64))
    half = int(np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)) if sizes else 0
    elements = int(ordered[half]) // 4 if sizes else _TINY_ELEMENTS
    typical = _timed(store, torch.randn(max(elements, _TINY_ELEMENTS), device=device))
    tiny = _timed(store, torch.randn(_TINY_ELEMENTS, device=device))
    latency_s = min(tiny.out_s, tiny.in_s, typical.out_s / 2, typical.in_s / 2)
    return Speed(
        out_bytes_per_s=typical.size_bytes / max(typical.out_s - latency_s, 1e-9),
        in_bytes_per_s=typical.size_bytes / max(typical.in_s - latency_s, 1e-9),
        latency_s=latency_s,
        out_busy=min(1.0, typical.out_busy_s / max(typical.out_s, 1e-9)),
        in_busy=min(1.0, typical.in_busy_s / max(typical.in_s, 1e-9)),
    )


@dataclass(frozen=True, kw_only=True)
class _Timed:
    size_bytes: int
    out_s: float
    in_s: float
    out_busy_s: float
    in_busy_s: float


def _timed(store: Store, tensor: Tensor) -> _Timed:
    """Put copies of a tensor, all of them before any is brought back as in a step, and return the medians."""
    # Where the model runs on the CPU, what threads compute for a store is taken from it.
    on_cpu = tensor.device.type == "cpu"
    handles: list[Handle] = []
    out: list[tuple[float, float]] = []
    back: list[tuple[float, float]] = []
    for copy in [tensor.clone() for _ in range(_TIMES)]:
        start = _Clock(tensor.device)
        handle: Handle | None = store.put(copy)
        if handle is None:
            return _Timed(size_bytes=tensor.nbytes, out_s=_NEVER_S, in_s=_NEVER_S, out_busy_s=0.0, in_busy_s=0.0)
        put_s, _ = start.passed()
        settle(handle)
        wall_s, cpu_s = start.passed()
        out.append((wall_s, max(put_s, cpu_s if on_cpu else 0.0)))
        handles.append(handle)
    fresh: list[Tensor] = []
    for handle in handles:
        start = _Clock(tensor.device)
        handle.prefetch()
        fresh.append(handle.get())
        wall_s, cpu_s = start.passed()
        back.append((wall_s, cpu_s if on_cpu else 0.0))
    return _Timed(
        size_bytes=tensor.nbytes,
        out_s=statistics.median(wall_s for wall_s, _ in out),
        in_s=statistics.median(wall_s for wall_s, _ in back),
        out_busy_s=statistics.median(busy_s for _, busy_s in out),
        in_busy_s=statistics.median(busy_s for _, busy_s in back),
    )


class _Clock:
    """Seconds by the wall, and of all threads of the process on the CPU, since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._synchronize()
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def passed(self) -> tuple[float, float]:
        self._synchronize()
        return time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
