"""Describes this machine as a `Device`: measures each operator of a step in place, its seconds and its kernel's bytes.

The allocator's events between two marks around an operator give its peak over the bytes that it left. The operators
also give the rates of the device: the best that any of them has reached.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import cast

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat.measuring.allocator import check_free_to_record, record_allocations
from torchremat.measuring.runs import Subject, unobserved
from torchremat.measuring.storages import made_by
from torchremat.measuring.traces import AllocationTrace
from torchremat.planning.budgets import capacity_of
from torchremat.planning.devices.device import Device, DeviceType, MeasuredKernel
from torchremat.planning.devices.kernels import intensity, is_mutable, signature
from torchremat.planning.devices.overheads import overheads
from torchremat.planning.profiles.optimizers import stepped_and_undone

_FLOPS_OF_NOTE = 10_000  # below this, an operator's seconds say nothing about the rates of a device


@dataclass(frozen=True, slots=True)
class _TimedOperator:
    """One operator that ran: its kernel's signature, the marks around it, its seconds, and what it computed."""

    signature: str
    first: int
    last: int
    storage_bytes: tuple[int, ...]
    seconds: float
    flops: int
    touched_bytes: int
    dtype: torch.dtype

    def kernel(self, trace: AllocationTrace) -> MeasuredKernel:
        """Return its kernel, with the workspace that the allocator's events show."""
        workspace_bytes = max(0, trace.rise_bytes_between(self.first, self.last) - sum(self.storage_bytes))
        return MeasuredKernel(seconds=self.seconds, workspace_bytes=workspace_bytes, storage_bytes=self.storage_bytes)


class _KernelTimer(EagerMode):
    """Takes marks and times around each operator that computes something."""

    def __init__(self, mark: Callable[[str], int], device: torch.device) -> None:
        super().__init__()
        self.runs: list[_TimedOperator] = []
        self._mark = mark
        self._wait = partial(accelerator_of(device).synchronize, device)

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        named = kwargs or {}
        first = self._mark("operator")
        self._wait()
        start_s = time.perf_counter()
        result = func(*args, **named)
        self._wait()
        seconds = time.perf_counter() - start_s
        last = self._mark("done")
        made = made_by((args, named), result)
        if made or is_mutable(func):
            sizes = tuple(one.untyped_storage().nbytes() for one in made)
            work = intensity(func, args, named, result, made)
            self.runs.append(_TimedOperator(signature(func, args, named), first, last, sizes, seconds, *work))
        return result


def device_here(subject: Subject, device: torch.device) -> Device:
    """Return the description of a device of this machine, with the kernels of a step.

    The step is run as it is, and must fit.

    Raises:
        UnsupportedError: A profiler is active.
    """
    check_free_to_record(device)
    runs: list[_TimedOperator] = []
    table: dict[str, list[MeasuredKernel]] = {}

    @contextmanager
    def noting() -> Generator[None]:
        with record_allocations(device) as recorder, _KernelTimer(recorder.mark, device) as timer:
            yield
        runs.extend(timer.runs)
        for one in timer.runs:
            table.setdefault(one.signature, []).append(one.kernel(recorder.trace))

    subject.train(unobserved(noting()))
    if subject.optimizer is not None:
        with stepped_and_undone(subject, subject.optimizer) as step, noting():
            step()
    return _described(device, runs, table)


def _described(device: torch.device, runs: list[_TimedOperator], table: dict[str, list[MeasuredKernel]]) -> Device:
    flops: dict[str, float] = {}
    for run in runs:
        if run.flops > _FLOPS_OF_NOTE:
            name = str(run.dtype).removeprefix("torch.")
            flops[name] = max(flops.get(name, 0.0), run.flops / run.seconds)
    bandwidth = max((run.touched_bytes / run.seconds for run in runs), default=1e9)
    accelerator = accelerator_of(device)
    return Device(
        name=f"{platform.machine()} CPU" if accelerator.is_host else accelerator.name(device),
        type=cast("DeviceType", accelerator.type),
        memory_bytes=capacity_of(device) or 1 << 40,
        # A step without a matrix product says nothing about their rate.
        flops=flops or {"float32": bandwidth},
        bandwidth=bandwidth,
        latency_s=min((run.seconds for run in runs), default=1e-6),
        efficiency=1.0,
        block_bytes=accelerator.block_bytes,
        overheads=overheads(),
        kernels={
            name: MeasuredKernel(
                seconds=median(one.seconds for one in found),
                workspace_bytes=max(one.workspace_bytes for one in found),
                storage_bytes=found[0].storage_bytes,
            )
            for name, found in table.items()
        },
    )
