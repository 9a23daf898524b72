"""Measures training steps while the user's loop runs them: forward and backward, and the optimizer.

On the CPU only the profiler sees the allocator's events, and it takes time. So steps are sounded occasionally: the
second, and others at doubling distances, as long as this is a small share of the elapsed time.

    a forward begins      live bytes are counted, and the recording begins
    backward begins       the freed gradients are known
    backward has ended    the peak of forward and backward is known
    the optimizer steps   the peak of its step is known
    a forward begins      an excess over the budget is reported

The live bytes before are counted, the events after that are recorded, and neither is complete: frees of earlier tensors
are not recorded. So the remaining gradients are counted once more when backward begins, since they may have been set to
None meanwhile. Tensors that are not passed to the model (labels, outputs of the previous step) are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import TypeVar, cast
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor

from torchremat._compat.autograd import at_end_of_backward
from torchremat._compat.dynamo import traced_as
from torchremat._compat.transforms import is_transformed
from torchremat.errors import UnsupportedError
from torchremat.measuring.profiled import Glance
from torchremat.planning.training.trained import Optimizer, Trained
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.state.optimizer_steps import after_each_step, before_each_step
from torchremat.tensors.parts import parts_of
from torchremat.tensors.structure import tensors_in

T = TypeVar("T")

# A forward in grad mode without a backward must not be recorded forever.
_MOST_CALLS = 32


@dataclass
class Log:
    """The results of measuring, and its time.

    Attributes:
        clock: Returns the current time in seconds.
        spent_s: Seconds spent.
        peaks: Measured peaks in absolute bytes, with descriptions of when they occurred.
    """

    clock: Callable[[], float]
    spent_s: float = 0.0
    peaks: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    @contextmanager
    def spending(self) -> Generator[None]:
        """Count the seconds of the block."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.spent_s += self.clock() - start_s


class SoundedStep:
    """A forward and its backward, from now to the end of the first backward through the forward's output.

    Attributes:
        inputs: The live tensors other than the model's.
        glance: The recording. Only the thread that has begun it can end it.

    Raises:
        UnsupportedError: A profiler is active, or another recording.
    """

    def __init__(self, trained: Trained, device: torch.device, args: object, log: Log) -> None:
        self._trained = trained
        self._log = log
        self._thread = get_ident()
        self._calls = 1
        self._late: list[tuple[int, int, int]] = []  # address, bytes and time of arguments of later calls
        self._backward: int | None = None  # when it began
        self._end: int | None = None  # when it had ended
        self.inputs = HeldInputs(device)
        self._known = {address for address, _ in self.inputs.add(args)}
        self._before = trained.bytes_now()
        self._before_bytes = self._before.total_bytes + self.inputs.bytes
        self._gradient_bytes = 0
        self.glance = Glance(device)
        self._start = self.glance.recorder.mark("start")

    def goes_on(self, args: object) -> bool:
        """Return whether one more forward, with these arguments, belongs to the step; if not, the step has ended."""
        self._calls += 1
        if self._backward is not None or self._calls > _MOST_CALLS or self.glance.is_over:
            self.settle()
            return False
        mark = self.glance.recorder.mark("call")
        added = self.inputs.add(args)
        self._late += [(address, size, mark) for address, size in added if address not in self._known]
        self._known.update(address for address, _ in added)
        return True

    def watch(self, output: object) -> None:
        """Watch for the backward through the output of a forward."""
        begins = WeakMethod(self._begins)
        for node in dict.fromkeys(one.grad_fn for one in tensors_in(output)):
            if node is not None and not self.glance.is_over:
                node.register_prehook(partial(_call, begins))

    def _begins(self, *_: object) -> None:
        if self._backward is not None or self.glance.is_over or get_ident() != self._thread:
            return
        self._backward = self.glance.recorder.mark("backward")
        self._gradient_bytes = self._trained.bytes_now().gradient_bytes
        at_end_of_backward(partial(_call, WeakMethod(self._ends)))

    def _ends(self) -> None:
        # The recording ends later, see `Glance.end`.
        self._end = self.glance.recorder.mark("end")

    def settle(self) -> bool:
        """End the recording, and log the peak if it is known; return whether no other recording can be running."""
        was_over = self.glance.is_over
        with self._log.spending():
            self.glance.end()
        self._tell()
        return not (was_over or self.glance.is_wanted)

    def _tell(self) -> None:
        trace, self.glance.trace = self.glance.trace, None
        if trace is None or self._backward is None or self._end is None:
            return
        late_bytes = sum(size for address, size, mark in self._late if not trace.has(address, mark))
        gone_bytes = max(0, self._before.gradient_bytes - self._gradient_bytes)
        forward_bytes = trace.peak_bytes_between(self._start, self._backward)
        backward_bytes = trace.peak_bytes_between(self._backward, self._end) - gone_bytes
        peak_bytes = self._before_bytes + late_bytes + max(forward_bytes, backward_bytes)
        self._log.peaks.append((peak_bytes, "forward and backward"))


class SoundedUpdate:
    """The next step of an optimizer on the model.

    The step before it is settled when the optimizer steps, and its remaining inputs count.
    """

    def __init__(self, trained: Trained, device: torch.device, step: SoundedStep, log: Log) -> None:
        self._trained = trained
        self._device = device
        self._step = step
        self._log = log
        self._glance: Glance | None = None
        self._optimizer: Optimizer | None = None
        self._before_bytes = 0
        stops = [
            before_each_step(partial(_call, WeakMethod(self._begins))),
            after_each_step(partial(_call, WeakMethod(self._ends))),
        ]
        self._stops = [finalize(self, stop) for stop in stops]

    def drop(self) -> None:
        """Stop measuring."""
        for stop in self._stops:
            stop()
        if self._glance is not None:
            self._glance.end()

    def _begins(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        # An optimizer stepped by another one has hooks as well; the outermost is the step.
        if self._optimizer is not None or is_rehearsing() or not self._trained.is_stepped_by(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begin(optimizer)
            return None
        # A closure runs forward and backward, and the step of the optimizer begins when these are done.
        begin = WeakMethod(self._begin)

        def then_begin() -> object:
            loss = cast("Callable[[], object]", closure)()
            _call(begin, optimizer)
            return loss

        return (*args[:1], then_begin, *args[2:]), {name: one for name, one in kwargs.items() if name != "closure"}

    def _begin(self, optimizer: Optimizer) -> None:
        if self._optimizer is not None:
            return
        self._optimizer = optimizer
        self._trained.note(optimizer)
        is_free = self._step.settle()
        if self._step.glance.is_wanted:
            self.drop()
            return
        with self._log.spending():
            self._before_bytes = self._trained.bytes_now().total_bytes + self._step.inputs.bytes
            try:
                self._glance = Glance(self._device, is_free=is_free)
            except UnsupportedError:
                self.drop()

    def _ends(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer or self._glance is None:
            return
        with self._log.spending():
            self.drop()
        if self._glance.trace is not None:
            peak_bytes = self._before_bytes + self._glance.trace.peak_bytes
            self._log.peaks.append((peak_bytes, f"{type(optimizer).__name__}.step()"))
        self._glance = None


class HeldInputs:
    """The tensors passed to forwards; it keeps none of them alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[ref[Tensor]] = []

    @property
    def bytes(self) -> int:
        """Bytes of those still live. Of a view only its own part: a batch may be a view of a whole data set."""
        taken: dict[int, int] = {}
        for known in self._tensors:
            if (tensor := known()) is not None:
                storage = tensor.untyped_storage()
                own_bytes = taken.get(storage.data_ptr(), 0) + tensor.numel() * tensor.element_size()
                taken[storage.data_ptr()] = min(own_bytes, storage.nbytes())
        return sum(taken.values())

    def add(self, args: object) -> list[tuple[int, int]]:
        """Add those of one more forward, and return the address and the bytes of each."""
        try:
            found = tensors_in(args)
        except RecursionError:  # an object that contains itself has no end
            return []
        here = [one for one in found if one.layout is torch.strided and one.device == self._device]
        parts = [part for one in here for part in parts_of(one)]
        self._tensors += map(ref, parts)
        return [(one.untyped_storage().data_ptr(), one.numel() * one.element_size()) for one in parts]


# The first step differs from the others: optimizers make their state in it.
_FIRST = 2
# The share of the training time that measuring may take. The first time it may take more, as planning did.
_SHARE = 0.01


class Soundings:
    """Measures steps of a model on the CPU occasionally.

    Attributes:
        measured: The forwards whose steps were measured, by number.
    """

    def __init__(
        self, trained: Trained, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._trained = trained
        self._device = device
        self._log = Log(clock)
        self._forwards = 0
        self._due = _FIRST
        self._began_s = 0.0
        self._step: SoundedStep | None = None
        self._update: SoundedUpdate | None = None
        self.measured: list[int] = []

    def begun(self, args: object) -> tuple[int, str] | None:
        """Record that a forward begins, and return the highest peak measured since, with its description."""
        self._forwards += 1
        if self._step is not None and self._step.glance.is_elsewhere:
            return None
        if self._step is not None and self._step.goes_on(args):
            return None
        self._step = None
        found = max(self._log.peaks, default=None)
        self._log.peaks.clear()
        if self._forwards == 1:
            self._began_s = self._log.clock()
        if self._forwards >= self._due and not is_transformed():
            self._due = 2 * self._forwards
            self._sound(args)
        return found

    def came(self, output: object) -> None:
        """Record the output of a forward."""
        if self._step is not None:
            self._step.watch(output)

    def stop(self) -> None:
        """Stop the running measurement: the forward has raised, or the result is no longer needed."""
        if self._step is not None and self._step.glance.is_elsewhere:
            return
        if self._step is not None:
            self._step.settle()
        if self._update is not None:
            self._update.drop()
        self._step = self._update = None

    def _sound(self, args: object) -> None:
        if self.measured and self._log.spent_s > _SHARE * (self._log.clock() - self._began_s):
            return
        self.stop()  # an optimizer that has not stepped yet
        with suppress(UnsupportedError), self._log.spending():  # a profiler runs, or another step is measured
            self._step = step = SoundedStep(self._trained, self._device, args, self._log)
            self._update = SoundedUpdate(self._trained, self._device, step, self._log)
            self.measured.append(self._forwards)


def _unseen(*_: object) -> None:
    pass


@traced_as(_unseen)  # under compiled autograd it is never called, and no graph breaks
def _call(method: WeakMethod[Callable[..., T]], *args: object) -> T | None:
    own = method()
    return None if own is None else own(*args)
