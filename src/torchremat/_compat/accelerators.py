"""The capabilities of each kind of device. Only this file asks torch about a kind of device.

    kind     streams and events   memory counted by torch   allocations recorded          pinned memory
    cpu      one order            no                        by torch's profiler           needs none
    cuda     yes                  yes                       by its allocator's history    yes
    others   as torch.accelerator has them                  not at all                    where torch has it

Code that needs a capability that a kind lacks gets an `UnsupportedError` that says so. On the CPU the order of
execution acts as a stream of its own kind, so code for transfers and pipelines needs no branches for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, UntypedStorage
from torch.nn.functional import linear

from torchremat.errors import UnsupportedError


class CpuStream:
    """The order in which a CPU executes: only one exists, and it never needs waiting."""

    device = torch.device("cpu")

    def wait_event(self, event: torch.Event) -> None:
        """Wait until an event of a device has fired."""
        event.synchronize()

    def __repr__(self) -> str:
        return "CPU_STREAM"


CPU_STREAM = CpuStream()

# Of a fast device; a slower one is delayed for longer.
_CYCLES_PER_SECOND = 2e9

Stream = torch.Stream | CpuStream


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters of a device's allocator.

    Attributes:
        allocated_bytes: The bytes in blocks that are allocated.
        peak_bytes: The most of `allocated_bytes` since the counters were reset.
        reserved_bytes: The bytes that the allocator holds of the device.
        peak_reserved_bytes: The most of `reserved_bytes`.
        position: How many blocks have been allocated and freed, ever.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    position: int


@dataclass(frozen=True, slots=True)
class Happened:
    """A block that was allocated or freed: `delta_bytes` is the requested size, negative when the block is freed."""

    time_ns: int
    ptr: int
    delta_bytes: int


class Accelerator:
    """A kind of device known only through `torch.accelerator`.

    Attributes:
        type: As in `torch.device(type)`.
        records: How its allocations are recorded; None if they cannot be.
        counts: Whether its allocator counts bytes.
        is_host: Whether it executes in call order, in host memory.
        block_bytes: The granularity to which its allocator rounds sizes up.
        has_addresses: Whether a storage is memory at an address, so that its bytes can be moved elsewhere and back.
        pins: Whether copies to pinned memory overlap the device's computation.
    """

    records: Literal["profiler", "history"] | None = None
    counts = False
    is_host = False
    block_bytes = 1
    has_addresses = False
    pins = False

    def __init__(self, kind: str) -> None:
        self.type = kind

    def lacks(self, what: str) -> UnsupportedError:
        """Return the error for a capability that this kind of device lacks."""
        return UnsupportedError(f"{what} on cpu and cuda, not on {self.type}: torch does not support it there.")

    def devices(self) -> list[torch.device]:
        """Return all devices of this kind."""
        return [torch.device(self.type, index) for index in range(self._module().device_count())]

    def normalised(self, device: torch.device) -> torch.device:
        """Return the canonical device: with its index, the current device's if it has none; the CPU without."""
        current = getattr(getattr(torch, self.type, None), "current_device", None)
        if current is None or device != torch.device(self.type):
            return device
        return torch.device(self.type, current())

    def in_use(self) -> list[torch.device]:
        """Return the devices, if this process has begun to use any."""
        has_begun = getattr(self._module(), "is_initialized", lambda: True)
        return self.devices() if has_begun() else []

    def name(self, device: torch.device) -> str:
        """Return the name of the device."""
        return str(device)

    def use(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a device the current one in a block."""
        # Devices that compute nothing, like meta, have no module.
        return self._module().device(device) if hasattr(torch, self.type) else nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all work it was given."""
        self._module().synchronize(device)

    def seconds(self, device: torch.device) -> float:
        """Return the time at which the device has finished all work it was given."""
        self.synchronize(device)
        return time.perf_counter()

    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream on which the caller works."""
        return self._module().current_stream(device)

    def new_stream(self, device: torch.device) -> Stream:
        """Return a new stream."""
        return self._module().Stream(device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream and its device the current ones in a block."""
        return cast("AbstractContextManager[object]", self._module().stream(stream))

    def event(self, stream: Stream, *, timed: bool = False) -> torch.Event:
        """Return an event that fires when the stream has finished the work it has been given so far."""
        found = self._module().Event(enable_timing=timed)
        found.record(stream)
        return found

    def delay(self, device: torch.device, seconds: float) -> None:
        """Let the current stream do nothing for about so many seconds; nothing where a device cannot."""

    def is_capturing(self) -> bool:
        """Return whether a graph of kernels is being captured on the current stream."""
        return False

    def counters(self, device: torch.device) -> Counters:
        """Return the allocator's counters.

        Raises:
            UnsupportedError: The allocator does not count.
        """
        raise self.lacks("memory is counted")

    def reset_peak(self, device: torch.device) -> None:
        """Reset the peak to the current bytes."""

    def total_bytes(self, device: torch.device) -> int | None:
        """Return the total bytes of the device; None if unknown."""
        return None

    def free_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that this process could still allocate; None if unknown."""
        return None

    def context_bytes(self, device: torch.device) -> int | None:
        """Return the bytes in use on the device that no allocator of this process holds."""
        return None

    def warm(self, device: torch.device) -> None:
        """Let libraries allocate the memory that they keep, in this thread and in the one that runs backwards."""

    def check_no_history(self) -> None:
        """Raise an error if other code owns the allocator's history.

        Raises:
            UnsupportedError: Other code owns it, or it does not exist.
        """
        raise self.lacks("allocations can be recorded")

    def begin_history(self) -> None:
        """Let the allocator record its actions.

        Raises:
            UnsupportedError: It cannot record, or other code has asked it to.
        """
        raise self.lacks("allocations can be recorded")

    def end_history(self, device: torch.device) -> list[Happened]:
        """Return the allocator's record since `begin_history`, in order, and stop recording."""
        raise self.lacks("allocations can be recorded")

    def generator_states(self) -> list[Tensor]:
        """Return the states of the devices' own generators, if this process uses any."""
        return [self._module().get_rng_state(device) for device in self.in_use()]

    def set_generator_states(self, states: Sequence[Tensor]) -> None:
        """Restore the devices' own generators to these states."""
        for device, state in zip(self.devices(), states, strict=False):
            self._module().set_rng_state(state, device)


class _Cpu(Accelerator):
    records: Literal["profiler", "history"] | None = "profiler"
    is_host = True
    has_addresses = True

    def devices(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def normalised(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def use(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: every call has finished when it returns."""

    def current_stream(self, device: torch.device) -> Stream:
        return CPU_STREAM

    def new_stream(self, device: torch.device) -> Stream:
        return CPU_STREAM

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def generator_states(self) -> list[Tensor]:
        return [torch.get_rng_state()]

    def set_generator_states(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])


class _Cuda(Accelerator):
    records: Literal["profiler", "history"] | None = "history"
    counts = True
    block_bytes = 512
    has_addresses = True
    pins = True

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def counters(self, device: torch.device) -> Counters:
        found = torch.cuda.memory_stats_as_nested_dict(device)
        if not found:  # nothing has been allocated there yet
            return Counters(allocated_bytes=0, peak_bytes=0, reserved_bytes=0, peak_reserved_bytes=0, position=0)
        allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
        blocks = found["allocation"]["all"]
        return Counters(
            allocated_bytes=allocated["current"],
            peak_bytes=allocated["peak"],
            reserved_bytes=reserved["current"],
            peak_reserved_bytes=reserved["peak"],
            position=blocks["allocated"] + blocks["freed"],
        )

    def delay(self, device: torch.device, seconds: float) -> None:
        with torch.cuda.device(device):
            torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def total_bytes(self, device: torch.device) -> int | None:
        return torch.cuda.get_device_properties(device).total_memory

    def free_bytes(self, device: torch.device) -> int | None:
        counted = self.counters(device)
        return torch.cuda.mem_get_info(device)[0] + counted.reserved_bytes - counted.allocated_bytes

    def context_bytes(self, device: torch.device) -> int | None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes - free_bytes - self.counters(device).reserved_bytes

    def warm(self, device: torch.device) -> None:
        # A thread's first matrix product on a stream allocates the workspace of both, permanently, and its first one
        # with a bias allocates one more. The thread that runs backwards also runs recomputes, so both kinds run in both
        # threads.
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            x = torch.ones(8, 8, device=device, requires_grad=True)
            y = linear(x, x.detach(), x.detach()[0])
            y.register_hook(_with_bias)
            y.sum().backward()
        self.synchronize(device)

    def check_no_history(self) -> None:
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise UnsupportedError(
                f"allocations are read from the history of torch's own allocator, and {backend} keeps none: remove "
                f'"backend:{backend}" from PYTORCH_CUDA_ALLOC_CONF.'
            )
        # A CPU build of torch lacks this function, and old builds lack this query.
        if getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)():
            raise UnsupportedError(
                "the history of torch's CUDA allocator is being recorded (torch.cuda.memory._record_memory_history), "
                "and recording allocations would end it. Plan and measure outside of it."
            )

    def begin_history(self) -> None:
        self.check_no_history()
        torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)

    def end_history(self, device: torch.device) -> list[Happened]:
        try:
            traces = cast("Any", torch.cuda.memory._snapshot())["device_traces"]
        finally:
            torch.cuda.memory._record_memory_history(None)
        return [
            Happened(1000 * one["time_us"], one["addr"], one["size"] if one["action"] == "alloc" else -one["size"])
            for one in traces[device.index]
            # The counters count a block as freed on request, when a stream may still use it.
            if one["action"] in ("alloc", "free_requested")
        ]


class _Xpu(Accelerator):
    has_addresses = True


_KINDS: dict[str, type[Accelerator]] = {"cpu": _Cpu, "cuda": _Cuda, "xpu": _Xpu}


@cache
def _of(kind: str) -> Accelerator:
    return _KINDS.get(kind, Accelerator)(kind)


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the capabilities of a kind of device."""
    return _of(device.type)


def _with_bias(gradient: Tensor) -> Tensor:
    # The copy is a kernel, before which a thread has no context for a product to run in, and is contiguous: the bias
    # is added by a product of its own otherwise.
    gradient = gradient.contiguous()
    return linear(gradient, gradient, gradient[0])


def taken_bytes(memory: UntypedStorage) -> int:
    """Return the device bytes that a storage takes: its size, rounded up as the allocator does."""
    block_bytes = accelerator_of(memory.device).block_bytes
    return -(-memory.nbytes() // block_bytes) * block_bytes


def accelerators() -> list[Accelerator]:
    """Return the kinds of devices, other than the CPU, that this process has begun to use."""
    # Others, for example MPS, have one device and another generator interface, which only tensors ask for.
    begun = {"cuda": torch.cuda.is_initialized, "xpu": torch.xpu.is_initialized}
    return [accelerator_of(torch.device(kind)) for kind, has_begun in begun.items() if has_begun()]


def devices_in_use() -> list[torch.device]:
    """Return the devices, other than the CPU, that this process has begun to use."""
    return [device for accelerator in accelerators() for device in accelerator.in_use()]


def counting_devices() -> list[torch.device]:
    """Return this machine's accelerators whose allocator counts bytes; none if it has no such accelerator."""
    current = torch.accelerator.current_accelerator(check_available=True)
    accelerator = None if current is None else accelerator_of(current)
    return accelerator.devices() if accelerator is not None and accelerator.counts else []


def current_devices() -> list[torch.device]:
    """Return the current device of each kind, other than the CPU, that this process has begun to use."""
    return [accelerator.normalised(torch.device(accelerator.type)) for accelerator in accelerators()]
