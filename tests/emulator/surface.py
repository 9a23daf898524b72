"""What a CUDA build of torch has in `torch._C`, and the CPU build lacks.

`torch.cuda` itself is torch's own: it is imported after this table has been put into `torch._C`, and finds there what
it looks for. CUDA graphs are refused. What is not in the table is missing, as in a CPU build: memory pools and NCCL.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CUDA = 1  # c10::DeviceType::CUDA


@dataclasses.dataclass(frozen=True)
class Properties:
    """Of a device, as far as they are true of this one; the capability is an H100's, so that bfloat16 is supported."""

    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    L2_cache_size: int = 50 * 2**20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


class Finder:
    """Puts the table into `torch._C` when `torch.cuda` is about to be imported, and finds nothing itself."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torch.cuda":
            sys.meta_path.remove(self)
            furnish(sys.modules["torch._C"], device(self._library))
        return None


def device(library: Path | None = None) -> Any:
    """The module of the library, which is loaded once."""
    name = "emulator._device"
    if name not in sys.modules:
        assert library is not None, "the emulated device is not installed"
        spec = importlib.util.spec_from_file_location("_device", library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def furnish(c: ModuleType, own: Any) -> None:
    """Put what a CUDA build has into `torch._C`, by its own names."""
    initialized_in: list[int] = []

    def init() -> None:
        import torch

        initialized_in.append(os.getpid())
        torch.cuda.default_generators = tuple(own.defaultGenerator(index) for index in range(own.getDeviceCount()))
        torch.cuda._get_device_properties = properties  # pyright: ignore[reportAttributeAccessIssue]

    def properties(index: int) -> Properties:
        if not 0 <= index < own.getDeviceCount():
            raise AssertionError("Invalid device id")
        return Properties("Emulated", own.memoryInfo(index)[1])

    def current(index: int | None) -> int:
        return own.getDevice() if index is None or index < 0 else index

    def record_history(
        enabled: str | None,
        context: str | None = None,
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: list[str] | None = None,
    ) -> None:
        if enabled not in (None, "state", "all"):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if skip_actions:
            raise NotImplementedError("the emulated device skips no actions in its history")
        own.recordHistory(enabled is not None, max_entries if enabled == "all" else 0, clear_history)

    class StreamBase(c.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int | None = None,
            device_type: int = CUDA,
            stream_ptr: int | None = None,
        ):
            if stream_ptr is not None:
                raise NotImplementedError("the emulated device has no streams of others")
            if stream_id is None:
                stream_id, device_index = own.newStream(priority < 0), own.getDevice()
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def priority(self) -> int:
            return -1 if own.isHighPriority(self.stream_id) else 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, c.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

        __hash__ = c.Stream.__hash__

    class EventBase(c.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ):
            if interprocess or external:
                raise NotImplementedError("the emulated device has no events of other processes or of graphs")
            event = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
            event._has_timing = enable_timing
            return event

        def elapsed_time(self, end: EventBase) -> float:
            if not (self._has_timing and end._has_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not (self.event_id and end.event_id):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return own.elapsedTime(self.event_id, end.event_id)

        @property
        def cuda_event(self) -> int:
            return self.event_id

    table = {
        "_has_cuda": True,
        "_cudart": Runtime(own),
        "_CudaDeviceProperties": Properties,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        # Devices
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: bool(initialized_in) and initialized_in[0] != os.getpid(),
        "_cuda_getDeviceCount": own.getDeviceCount,
        "_cuda_getDevice": own.getDevice,
        "_cuda_setDevice": lambda index: own.exchangeDevice(index) and None,
        "_cuda_exchangeDevice": own.exchangeDevice,
        "_cuda_maybeExchangeDevice": own.maybeExchangeDevice,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_synchronize": own.synchronize,
        "_cuda_sleep": lambda cycles: None,  # kernels take no time here
        "_cuda_get_sync_debug_mode": lambda: 0,
        # Streams
        "_cuda_getCurrentStream": lambda index: (own.getCurrentStream(current(index)), current(index), CUDA),
        "_cuda_getDefaultStream": lambda index: (0, current(index), CUDA),
        "_cuda_setStream": lambda stream_id, device_index, device_type: own.setStream(device_index, stream_id),
        "_cuda_getCurrentRawStream": lambda index: own.getCurrentStream(current(index)),
        # Graphs
        "_CUDAGraph": Graph,
        "_cuda_CUDAAllocator_AllocatorState": Graph,
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_graph_pool_handle": Graph,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        # Memory
        "_cuda_memoryStats": lambda index: own.memoryStats(current(index)),
        "_cuda_memorySnapshot": lambda pool=None: own.memorySnapshot(),
        "_cuda_resetPeakMemoryStats": lambda index: own.resetPeakMemoryStats(current(index)),
        "_cuda_resetAccumulatedMemoryStats": lambda index: own.resetAccumulatedMemoryStats(current(index)),
        "_cuda_emptyCache": own.emptyCache,
        "_cuda_setMemoryFraction": lambda fraction, index: own.setMemoryFraction(fraction, current(index)),
        "_cuda_getMemoryFraction": lambda index: own.getMemoryFraction(current(index)),
        "_cuda_record_memory_history": record_history,
        "_cuda_isHistoryEnabled": own.isHistoryEnabled,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_clearCublasWorkspaces": own.clearCublasWorkspaces,
        "_host_emptyCache": own.emptyHostCache,
        "_cuda_ipc_collect": lambda: None,
    }
    for name, value in table.items():
        setattr(c, name, value)


def let_storages_be_made(torch: Any) -> None:
    """`torch.UntypedStorage(size, device="cuda")`, which the CPU build refuses; deep copies of tensors call it."""
    plain = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(cls, *args, **kwargs) if device is None else plain(cls, *args, device=device, **kwargs)
        values = args[0] if args else 0
        if not isinstance(values, int):
            return torch.tensor(list(values), dtype=torch.uint8, device=device).untyped_storage()
        return torch.empty(values, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new


class Graph:
    """What `torch.cuda.CUDAGraph` inherits from."""

    def __new__(cls, *args: object, **kwargs: object):
        raise NotImplementedError("the emulated device captures no CUDA graphs")


class Runtime:
    """The functions of CUDA's runtime that torch calls by `torch.cuda.cudart()`."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:
        return self._own.memoryInfo(self._own.getDevice() if index is None or index < 0 else index)
