"""`Simulation`: the allocator and the clock of an absent device, while a step runs on fake tensors.

Fakes run through autograd, regions and hooks as real tensors do, so their storages have the same live ranges. Fakes
cannot show the inside of kernels: temporaries and seconds. Both come from a `KernelModel`.

    of a real step                      of a simulated one
    allocation by an operator           a storage that an operator returns and did not get
    free                                its weak reference dies
    temporary of a kernel               `KernelCost.workspace_bytes`, above the operator's results
    state of a generator (CPU)          the same; it is real, and an operator with random numbers moves it
    sum of two gradients in place       one storage goes on as another: see NOTE [ Gradients that are added in place ]
    time                                sum of `KernelCost.seconds`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, Self, cast

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.fakes import (
    DATA_DEPENDENT,
    adds_in_place,
    counts_of_one,
    is_fake,
    lacks_fake_kernel,
    without_fakes,
)
from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat.ambient.generators import states_watched
from torchremat.errors import StepError, UnsupportedError
from torchremat.measuring.callers import asked_by_us, depends_on_data, place_of_user
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.storages import LIFTED, StorageMap, made_by, tensors_in
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace, TraceMark
from torchremat.regions.selective.cache import written_by
from torchremat.regions.selective.op_info import op_info_of

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_FOREIGN = -1, 0  # no allocation in the block that is recorded
_COPIES = (_ATEN.clone.default, _ATEN.detach.default, _ATEN.copy_.default)
# They write their statistics only if argument 5 is True.
_NORMS = (_ATEN.native_batch_norm.default, _ATEN.cudnn_batch_norm.default, _ATEN.miopen_batch_norm.default)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost of running an operator once."""

    seconds: float
    workspace_bytes: int = 0


class KernelModel(Protocol):
    """The operator costs of a device."""

    @property
    def block_bytes(self) -> int:
        """The granularity to which its allocator rounds sizes up."""
        ...

    @property
    def has_host_generator(self) -> bool:
        """Whether states of the CPU's generators are on the device."""
        ...

    def storage_bytes(self, func: Operation, args: Args, kwargs: Mapping[str, object]) -> tuple[int, ...]:
        """Return the bytes of the storages that an operator makes, for operators known to deviate from shapes.

        Some kernels compute in a buffer and return a part of it: `mse_loss` a scalar in a storage as large as its
        input.
        """
        ...

    def kernel(
        self,
        func: Operation,
        args: Args,
        kwargs: Mapping[str, object],
        result: object,
        made: list[Tensor],
    ) -> KernelCost:
        """Return the cost of an operator.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its named arguments.
            result: Its result.
            made: The tensors with new storages in its result.
        """
        ...


class SimulatedRecorder(AllocationRecorder):
    """See `AllocationRecorder`. Made by `Simulation.record`."""

    def __init__(self, owner: Simulation) -> None:
        super().__init__(_CPU)
        self._owner = owner
        self._marks: list[TraceMark] = []

    def mark(self, label: str) -> int:
        """See `AllocationRecorder`."""
        number = len(self._marks)
        time_ns, position = int(self._owner.now_ns), len(self._owner.events)
        self._marks.append(TraceMark(id=number, label=label, time_ns=time_ns, position=position))
        return number

    def seconds(self) -> float:
        """Return the simulated time."""
        return self._owner.now_ns * 1e-9

    def pointer_of(self, storage: UntypedStorage) -> int:
        """Return the address that a storage has in the trace; -1 for one from before."""
        return self._owner.pointer_of(storage)

    def finish(self) -> None:
        """Build the trace."""
        self._trace = AllocationTrace.of(_CPU, self._owner.events, self._marks)


class Simulation(EagerMode):
    """Runs all operators on fakes while it is entered, on one device, and records allocations for `record`.

    Attributes:
        now_ns: The simulated time.
        events: (time, pointer, bytes) of each allocation and free in the recording block.
    """

    def __init__(self, model: KernelModel, faked: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.now_ns = 0.0
        self.events: list[tuple[int, int, int]] = []
        self._faked = faked  # makes a fake of a real tensor, the same one each time
        self._recording = False
        self._pointers = 0
        self._known = StorageMap[tuple[int, int]](self._free)  # pointers and bytes of their allocations
        self._contents = _Contents()
        self._scalar: float | None = None
        self._watching: list[ExitStack] = []
        self._interrupt: Callable[[], None] | None = None

    @contextmanager
    def interrupted_between_operators(self) -> Generator[None]:
        """Let signals of the block do what they do where an operator begins: elsewhere, what raises ends the process.

        torch asks a mode for devices, and Python for a mode's kernels, from code that passes no exception on.
        """
        if self._interrupt is not None:
            yield
            return
        with uninterrupted() as interrupt:
            self._interrupt = interrupt
            try:
                yield
            finally:
                self._interrupt = None

    def __enter__(self) -> Self:
        counts_of_one()
        super().__enter__()
        stack = ExitStack()
        if self.model.has_host_generator:
            stack.enter_context(states_watched(self._sees_state))
        self._watching.append(stack)
        return self

    def __exit__(self, *error: object) -> None:
        self._watching.pop().close()
        super().__exit__(*error)

    @contextmanager
    def record(self) -> Generator[SimulatedRecorder]:
        """Record the allocations of the block. The recorder takes marks and has the `trace` afterwards."""
        recorder = SimulatedRecorder(self)
        self.events = []
        for storage in self._known.storages():
            self._known[storage] = _FOREIGN
        self._recording = True
        try:
            yield recorder
        finally:
            self._recording = False
        recorder.finish()

    @contextmanager
    def scalars(self, value: float) -> Generator[None]:
        """Let `.item()` return `value` in the block: for code that reads numbers that bytes do not depend on."""
        self._scalar = value
        try:
            yield
        finally:
            self._scalar = None

    def pointer_of(self, storage: UntypedStorage) -> int:
        """Return the address that a storage has in the trace; -1 for one from before."""
        return (self._known.get(storage) or _FOREIGN)[0]

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        if func is torch.ops.prim.device.default:
            return _CPU
        if self._interrupt is not None:
            self._interrupt()
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = _CPU
        goes_on = adds_in_place(func, args)
        # Torch makes a lifted tensor a fake that knows its value.
        if func not in LIFTED and not all(map(is_fake, tensors_in([*args, *named.values()]))):
            args = cast("tuple[object, ...]", self._with_fakes(args))
            named = {key: self._with_fakes(value) for key, value in named.items()}
        if func is _ATEN.equal.default and asked_by_us():
            return self._contents.of(args[0]) == self._contents.of(args[1])
        if func is _ATEN._local_scalar_dense.default:
            if self._scalar is not None:
                return _number(cast("Tensor", args[0]), self._scalar)
            if asked_by_us():
                return _number(cast("Tensor", args[0]), 0.0)
        try:
            result = func(*args, **named)
        except DATA_DEPENDENT as error:
            raise StepError(depends_on_data(func)) from error
        except RuntimeError as error:
            if not lacks_fake_kernel(error):
                # Either the step is wrong, or torch's fake implementation is stricter than the operator.
                error.add_note(
                    f"{func} at {place_of_user()} was not run, because tensors have no data here: torch's fake "
                    "implementation of the operator raised this. If the step runs with data, plan it without "
                    "on='meta', or in a dtype that the fake implementation takes."
                )
                raise
            raise UnsupportedError(
                f"{func} at {place_of_user()} has no kernel for tensors without data, so it cannot be planned "
                "without running it. If the operator is yours, give it one with `torch.library.register_fake`; else "
                f"plan where it can run. Torch says: {error}"
            ) from error
        self._ran(func, args, named, result, goes_on=goes_on)
        return result

    def _with_fakes(self, value: object) -> object:
        """Return a value with fakes in place of real tensors."""
        if isinstance(value, Tensor):
            return value if is_fake(value) else self._faked(value)
        if isinstance(value, list | tuple):
            items = [self._with_fakes(item) for item in cast("list[object]", value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _ran(
        self,
        func: Operation,
        args: Args,
        kwargs: Mapping[str, object],
        result: object,
        *,
        goes_on: bool,
    ) -> None:
        made = made_by(() if func in LIFTED else (args, kwargs), result)
        if func not in LIFTED:
            made = [tensor for tensor in made if tensor.untyped_storage() not in self._known]
        self._contents.ran(func, args, kwargs, result)
        if self.model.has_host_generator and _draws(func):
            with without_fakes():
                torch.rand(())
        known_bytes = self.model.storage_bytes(func, args, kwargs) if made else ()
        for tensor, size in zip(made, known_bytes, strict=False):
            storage = tensor.untyped_storage()
            if storage.nbytes() < size:
                storage.resize_(size)
        if not self._recording:
            for tensor in made:
                self._known[tensor.untyped_storage()] = _FOREIGN
            return
        kernel = self.model.kernel(func, args, kwargs, result, made)
        if goes_on and made:
            # One storage takes over the allocation of another.
            old = cast("Tensor", args[0]).untyped_storage()
            self._known[made.pop().untyped_storage()] = self._known.get(old) or _FOREIGN
            self._known[old] = _FOREIGN
        sizes = [self._rounded(tensor.untyped_storage().nbytes()) for tensor in made]
        for tensor, size in zip(made, sizes, strict=True):
            self._allocate(tensor.untyped_storage(), size)
        if kernel.workspace_bytes:
            self._pointers += 1
            self._event(self._pointers, self._rounded(kernel.workspace_bytes))
            self._event(self._pointers, -self._rounded(kernel.workspace_bytes))
        self.now_ns += kernel.seconds * 1e9

    def _rounded(self, size: int) -> int:
        block = self.model.block_bytes
        return -(-size // block) * block

    def _allocate(self, storage: UntypedStorage, size: int) -> None:
        block = _FOREIGN
        if size:
            self._pointers += 1
            block = self._pointers, size
            self._event(*block)
        self._known[storage] = block

    def _free(self, block: tuple[int, int]) -> None:
        pointer, size = block
        if size and self._recording:
            self._event(pointer, -size)

    def _event(self, pointer: int, delta_bytes: int) -> None:
        self.events.append((int(self.now_ns), pointer, delta_bytes))

    def _sees_state(self, state: Tensor) -> None:
        """Count the state of a generator, which C++ allocates outside of any operator."""
        if self._recording:
            storage = state.untyped_storage()
            self._allocate(storage, storage.nbytes())


def _draws(func: Operation) -> bool:
    # Attention is tagged as random, but draws nothing without dropout; with dropout it is decomposed on the CPU.
    tags = getattr(func, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and "attention" not in str(func)


def _number(tensor: Tensor, value: float) -> complex | float | bool:
    if tensor.dtype is torch.bool:
        return bool(value)
    return value if tensor.dtype.is_floating_point or tensor.dtype.is_complex else math.floor(value)


class _Contents:
    """The contents of each storage, as a number that copies share: it answers the library's own comparisons.

    Two tensors without data are equal if one is a copy of the other.
    """

    def __init__(self) -> None:
        self._numbers = StorageMap[int]()
        self._values = 0

    def of(self, value: object) -> int:
        """Return the number of a tensor's contents."""
        tensor = cast("Tensor", value)
        known = self._numbers.get(tensor.untyped_storage())
        return self._set(tensor) if known is None else known

    def ran(self, func: Operation, args: Args, kwargs: Mapping[str, object], result: object) -> None:
        """Note the storages that an operator has written, and the contents of copies."""
        if func in _COPIES:
            source = args[1] if func is _ATEN.copy_.default else args[0]
            self._numbers[cast("Tensor", result).untyped_storage()] = self.of(source)
            return
        if func in _NORMS and not args[5]:
            return
        for tensor in tensors_in(written_by(op_info_of(func).writes, args, kwargs)):
            self._set(tensor)

    def _set(self, tensor: Tensor) -> int:
        self._values += 1
        self._numbers[tensor.untyped_storage()] = self._values
        return self._values
