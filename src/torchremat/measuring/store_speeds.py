"""The speed of a store: tensors like the model's move as under a plan, alone and overlapped with compute.

A graph of two units is run. The first saves the tensors; the second computes, and the saved tensors of the first are in
flight meanwhile, out in the forward and back in the backward, by the same offload schedule as under a plan.

                 nothing to compute     enough to compute
    kept                 a                      b              the tensors stay where they are
    moved                c                      d

    c - a    seconds of a transfer if the step waits for it
    d - b    seconds that the model loses without waiting: the work of the training thread itself, and the cores,
             memory bandwidth, or interpreter time that copies take from its kernels

All four run in turn, several times, for tensors as one unit saves them and for tiny ones: both together give the
seconds per tensor, whatever its size, and per byte. The compute consists of matrix products and elementwise functions,
like the kernels of a model.

A store may be slow: the moved part grows from one small tensor as long as the next one is expected to move within a
tenth of a second each way; some thirty of these transfers are waited for. A store that takes longer for the smallest
part is tried once, and all its seconds are assumed to be lost by the model.

Deliberately missing: the speed of a disk that has to write immediately. Transfers go to the page cache here, like those
of a step; a step that stores more than the system lets wait there is slower, which `verify` reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from torchremat._compat.accelerators import accelerator_of
from torchremat.regions.offload_schedule import OffloadRun, OffloadSchedule, Transfer, Trigger
from torchremat.tensors.handles import Store
from torchremat.tensors.sizes import format_bytes

# The most and the fewest rounds, and in between as many as take about this many seconds.
_ROUNDS = 7
_FEWEST_ROUNDS = 3
_ENOUGH_S = 1.0
# Only the first tensors of a unit are moved, up to this many bytes.
_MOST_BYTES = 32 * 2**20
# A transfer of more seconds each way is not measured again, and none is tried that is expected to take longer.
_LONGEST_S = 0.1
_GROWTH = 4
# Large enough to be stored at all, see `Catalog`.
_TINY_BYTES = 1024
_TINY_TENSORS = 32
# The unit of compute: long compared to its launch time.
_WIDTH = {"cpu": 256}
_WIDTH_OF_DEVICES = 2048
# The compute takes this many times the seconds of the transfer alone.
_BESIDE = 1.5
_NEVER_S = 1e9  # for a store that has no room


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """The cost of transfers in one direction, measured.

    Attributes:
        tensor_s: Seconds per tensor, whatever its size, if the model waits for it.
        byte_s: Seconds per byte, likewise.
        busy_tensor_s: The part of `tensor_s` that the model loses even without waiting.
        busy_byte_s: The same of `byte_s`.
    """

    tensor_s: float
    byte_s: float
    busy_tensor_s: float
    busy_byte_s: float

    def seconds(self, tensors: int, size_bytes: int) -> float:
        """Return the seconds of one transfer of some tensors, with so many bytes in all."""
        return tensors * self.tensor_s + size_bytes * self.byte_s

    def busy_s(self, tensors: int, size_bytes: int) -> float:
        """Return the part of these seconds that the model loses even without waiting."""
        return tensors * self.busy_tensor_s + size_bytes * self.busy_byte_s


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a store is, measured.

    Attributes:
        out: Bandwidth into it.
        back: Bandwidth out of it.
        spread: Half the interquartile range of the measurements, relative to the measured value.
        measured_bytes: Bytes moved in each measurement.
    """

    out: Bandwidth
    back: Bandwidth
    spread: float
    measured_bytes: int

    def __str__(self) -> str:
        out, back = self.out, self.back
        return (
            f"{1e6 * out.tensor_s:.0f} us a tensor and {2**30 * out.byte_s:.2f} s a GiB out, "
            f"{1e6 * back.tensor_s:.0f} us and {2**30 * back.byte_s:.2f} s back; of these "
            f"{1e6 * out.busy_tensor_s:.0f} us, {2**30 * out.busy_byte_s:.2f} s, {1e6 * back.busy_tensor_s:.0f} us, "
            f"{2**30 * back.busy_byte_s:.2f} s even if nothing waits; measured here with "
            f"{format_bytes(self.measured_bytes)}, +-{100 * self.spread:.0f}%"
        )


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The payload that one unit gives to a store: the tensors, by size and type, and how often each is saved."""

    tensors: tuple[tuple[int, torch.dtype], ...]
    times: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size for size, _ in self.tensors)

    def within(self, limit_bytes: int) -> Payload:
        """Return the first tensors, at most `limit_bytes` of them."""
        taken, total = list[tuple[int, torch.dtype]](), 0
        for size, dtype in self.tensors:
            total += size
            if total > limit_bytes:
                break
            taken.append((size, dtype))
        return Payload(tensors=tuple(taken), times=self.times)

    def part(self, limit_bytes: int) -> Payload:
        """Return the first `limit_bytes`; the last tensor may be a part of one."""
        taken, left = list[tuple[int, torch.dtype]](), limit_bytes
        for size, dtype in self.tensors:
            if left < min(size, _TINY_BYTES):
                break
            taken.append((min(size, left), dtype))
            left -= size
        return Payload(tensors=tuple(taken), times=self.times)


def measured_speed(store: Store, device: torch.device, payload: Payload, limit_bytes: int | None) -> Speed:
    """Return the speed of a store.

    Args:
        store: The store.
        device: The device of the tensors.
        payload: The payload of a typical unit.
        limit_bytes: Its capacity in bytes.
    """
    most_bytes = _MOST_BYTES if limit_bytes is None else min(limit_bytes, _MOST_BYTES)
    payload = payload.within(most_bytes)
    tiny = Payload(tensors=((_TINY_BYTES, torch.float32),) * _TINY_TENSORS, times=payload.times).within(most_bytes)
    refused = tiny.tensors and store.put(torch.zeros(_TINY_BYTES // 4, device=device)) is None
    if not payload.tensors or not tiny.tensors or refused:
        never = Bandwidth(tensor_s=_NEVER_S, byte_s=0.0, busy_tensor_s=_NEVER_S, busy_byte_s=0.0)
        return Speed(out=never, back=never, spread=0.0, measured_bytes=0)
    of_tiny, of_all = _Timed(store, device, tiny), _Timed(store, device, payload)
    return Speed(
        out=_bandwidth(of_tiny.payload, of_tiny.out, of_all.payload, of_all.out),
        back=_bandwidth(of_tiny.payload, of_tiny.back, of_all.payload, of_all.back),
        spread=of_all.spread,
        measured_bytes=of_all.payload.size_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Move:
    """Seconds of one transfer: if the step waits for it, and those that the model loses without waiting."""

    alone_s: float
    busy_s: float


def _bandwidth(tiny: Payload, of_tiny: _Move, payload: Payload, of_all: _Move) -> Bandwidth:
    tensor_s = of_tiny.alone_s / len(tiny.tensors)
    busy_tensor_s = of_tiny.busy_s / len(tiny.tensors)
    rest_s = max(0.0, of_all.alone_s - len(payload.tensors) * tensor_s)
    busy_rest_s = max(0.0, of_all.busy_s - len(payload.tensors) * busy_tensor_s)
    return Bandwidth(
        tensor_s=tensor_s,
        byte_s=rest_s / payload.size_bytes,
        busy_tensor_s=busy_tensor_s,
        busy_byte_s=min(rest_s, busy_rest_s) / payload.size_bytes,
    )


class _Timed:
    """The seconds of moving a payload, or the quick part of it, out and back.

    Attributes:
        payload: The moved payload.
        out: Its way out.
        back: Its way back.
        spread: The variation of its transfers.
    """

    def __init__(self, store: Store, device: torch.device, payload: Payload) -> None:
        self._store, self._device = store, device
        width = _WIDTH.get(device.type, _WIDTH_OF_DEVICES)
        # The generators that the model draws from stay untouched.
        self._generator = torch.Generator(device).manual_seed(0)
        self._matrix = self._random(width, width)
        self.payload = payload.part(_TINY_BYTES)
        self._step(1, moves=True)  # threads start
        once = self._grown(payload)
        if max(once) > _LONGEST_S:
            alone = busy = [once]
            self.spread = 1.0
        else:
            alone, busy = self._rounds()
            self.spread = _spread([sum(one) for one in alone])
        self.out, self.back = (_move([one[i] for one in alone], [one[i] for one in busy]) for i in (0, 1))

    def _grown(self, payload: Payload) -> tuple[float, float]:
        """Move more of a payload as long as that is expected to be quick; return the seconds of a transfer."""
        took = self._added(0)
        while self.payload != payload and _GROWTH * max(took) <= _LONGEST_S:
            self.payload = payload.part(_GROWTH * self.payload.size_bytes)
            took = self._added(0)
        return took

    def _rounds(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Return the seconds of transfers without compute, and with enough compute."""
        found = [self._step(0, moves=True) for _ in range(_FEWEST_ROUNDS)]
        most_s = max(statistics.median(column) for column in zip(*found, strict=True))
        once_s = min(sum(self._step(1, moves=False)) for _ in range(_FEWEST_ROUNDS)) / 2
        times = max(1, int(_BESIDE * most_s / max(once_s, 1e-9)))
        round_s = (2 + 4 * _BESIDE) * most_s
        rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(_ENOUGH_S / max(round_s, 1e-9))))
        alone, busy = list[tuple[float, float]](), list[tuple[float, float]]()
        for _ in range(rounds):
            alone.append(self._added(0))
            busy.append(self._added(times))
        return alone, busy

    def _added(self, times: int) -> tuple[float, float]:
        kept, moved = self._step(times, moves=False), self._step(times, moves=True)
        return moved[0] - kept[0], moved[1] - kept[1]

    def _step(self, times: int, *, moves: bool) -> tuple[float, float]:
        """Return the seconds of a forward and a backward with `times` units of compute."""
        transfers = {0: Transfer(store=0, leaves_after=1, comes_before=1)} if moves else {}
        offload_run = OffloadRun(OffloadSchedule((self._store,), transfers))
        tensors = [self._made(size, dtype) for size, dtype in self.payload.tensors]
        start = torch.zeros(2, device=self._device, requires_grad=True)

        def save() -> object:
            return _Saving.apply(start, tensors, self.payload.times)

        def compute() -> object:
            return _Computing.apply(saved, lambda: self._compute(times))

        start_s = self._now()
        saved = offload_run.run(Trigger(0, is_last=True), None, save)
        tensors.clear()
        output = cast("Tensor", offload_run.run(Trigger(1, is_last=True), None, compute))
        middle_s = self._now()
        output.backward(torch.ones_like(output))
        return middle_s - start_s, self._now() - middle_s

    def _compute(self, times: int) -> None:
        for _ in range(times):
            F.gelu(self._matrix @ self._matrix)
            F.gelu(self._matrix)

    def _made(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of two dimensions, since a store may treat 1-D tensors apart from their aliases."""
        made = self._random(1, max(1, size // dtype.itemsize))
        return made.to(dtype) if dtype.is_floating_point or dtype.is_complex else (made > 0).to(dtype)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self._device, generator=self._generator)

    def _now(self) -> float:
        return accelerator_of(self._device).seconds(self._device)


def _move(alone: Sequence[float], busy: Sequence[float]) -> _Move:
    alone_s = max(0.0, statistics.median(alone))
    return _Move(alone_s=alone_s, busy_s=min(alone_s, max(0.0, statistics.median(busy))))


def _spread(seconds: Sequence[float]) -> float:
    """Return half the interquartile range of some seconds, relative to their median."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / median if median > 0 else 1.0


class _Saving(torch.autograd.Function):
    """The identity, which saves some tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensors: list[Tensor], times: int) -> Tensor:
        ctx.save_for_backward(*(tensor.view(1, -1) for tensor in tensors for _ in range(times)))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return gradients[0], None, None


class _Computing(torch.autograd.Function):
    """The identity, which computes something in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[], None]) -> Tensor:
        ctx.compute = compute
        compute()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.compute()
        return gradients[0], None
