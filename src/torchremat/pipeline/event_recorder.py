"""Records the events of a step, from all threads and streams, and the nodes that mark a piece of backward.

On the CPU an event is the time between two readings of the clock. Work that is enqueued on a stream runs later: there
an event is two marks on the stream, whose times are queried when the step is over. Both are on one clock, since each
device gets a mark at a known time while nothing runs on it.

      forward:    begin to end, by a clock        backward:  Mark 2 runs, then the piece, then Mark 1

      ---- Mark 1 ---- piece ---- Mark 2 ----

A stage whose input requires no grad has no Mark 1. Its piece ends when its worker begins another piece, or when the
backward ends.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchremat._compat.accelerators import CpuStream, Stream, accelerator_of
from torchremat._compat.autograd import at_end_of_backward
from torchremat.pipeline.dependency import Passing, pass_all, with_grad
from torchremat.pipeline.events import PipelineEvent
from torchremat.schedules.pipelines import Kind

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class _Zero:
    """A mark on a device, and its time."""

    mark: torch.Event
    seconds: float


class Recorder:
    """Records events while it is on.

    Attributes:
        on: Whether events are recorded. While it is off, the only overhead of `event` is a call.
        step: How often it has been started.
    """

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self.step = 0
        self._lock = Lock()  # only for the zeros: appending to a list is thread-safe without it
        self._zeros: dict[torch.device, _Zero] = {}
        self._taken: list[_TakenEvent] = []
        self._start_s = perf_counter()

    def __reduce__(self) -> tuple[object, ...]:
        """Return the recipe of a copy, which has no events."""
        return partial(Recorder, on=self.on), ()

    def start(self, devices: Iterable[torch.device] = ()) -> None:
        """Forget all events, and count seconds from now. An event that has begun already is forgotten too.

        Args:
            devices: The devices to prepare for. The first event on any other device waits for it once.
        """
        with self._lock:
            self._zeros = {device: _zero(device) for device in devices if not accelerator_of(device).is_host}
        self._taken = []
        self.step += 1
        self._start_s = perf_counter()

    def event(
        self, stage: int, microbatch: int, kind: Kind, *, stream: torch.Stream | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that records an event, also if its block raises."""
        if not self.on:
            return _NOTHING
        zero = None if stream is None else self._zero_of(stream.device)
        return _time_event(self._taken, stage, microbatch, kind, stream, zero)

    def events(self) -> tuple[PipelineEvent, ...]:
        """Return the events since the start, in the order in which they ended; waits for the streams of the events."""
        return tuple(taken.event(self._start_s) for taken in list(self._taken))

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return perf_counter() - self._start_s

    def _zero_of(self, device: torch.device) -> _Zero:
        with self._lock:
            if device not in self._zeros:
                self._zeros[device] = _zero(device)
            return self._zeros[device]


@dataclass(frozen=True, slots=True)
class _TakenEvent:
    """An event from `start` to `end`: readings of the clock, or marks on a stream of a device with a `zero`."""

    stage: int
    microbatch: int
    kind: Kind
    start: Any
    end: Any
    zero: _Zero | None = None

    def event(self, since_s: float) -> PipelineEvent:
        start_s, end_s = self.start, self.end
        if self.zero is not None:
            self.end.synchronize()
            start_s, end_s = (self.zero.seconds + self.zero.mark.elapsed_time(one) / 1e3 for one in (start_s, end_s))
        return PipelineEvent(
            stage=self.stage,
            microbatch=self.microbatch,
            kind=self.kind,
            start_s=start_s - since_s,
            end_s=end_s - since_s,
        )


@contextmanager
def _time_event(
    taken: list[_TakenEvent], stage: int, microbatch: int, kind: Kind, stream: torch.Stream | None, zero: _Zero | None
) -> Generator[None]:
    start = _now(stream)
    try:
        yield
    finally:
        taken.append(_TakenEvent(stage, microbatch, kind, start, _now(stream), zero))


def _now(stream: torch.Stream | None) -> float | torch.Event:
    return perf_counter() if stream is None else accelerator_of(stream.device).event(stream, timed=True)


def _zero(device: torch.device) -> _Zero:
    accelerator = accelerator_of(device)
    seconds = accelerator.seconds(device)
    return _Zero(mark=accelerator.event(accelerator.current_stream(device), timed=True), seconds=seconds)


class BackwardMark(Passing):
    """In backward, reports that it runs."""


class Passage:
    """The work on one microbatch on one stage, forward and backward.

    Args:
        forward: The kind of its event in the forward.
        backward: The kind of its event in the backward.
        open_passages: Passages of the same worker whose backward has begun and has no Mark 1. Updated here.
    """

    def __init__(
        self,
        recorder: Recorder,
        stage: int,
        microbatch: int,
        *,
        forward: Kind,
        backward: Kind,
        stream: Stream,
        open_passages: list[Passage],
    ) -> None:
        self._recorder = recorder
        self._step = recorder.step
        self._at = stage, microbatch
        self._kinds: tuple[Kind, Kind] = forward, backward
        self._stream = None if isinstance(stream, CpuStream) else stream
        self._open_passages = open_passages
        self._has_end = False
        self._running = ExitStack()  # the event of its backward, while that runs

    def runs(self) -> AbstractContextManager[None]:
        """Return a context for its forward."""
        return self._event(self._kinds[0])

    def recomputes(self) -> AbstractContextManager[None]:
        """Return a context for its recompute."""
        return self._event("recompute")

    def given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return its inputs behind Mark 1."""
        if not self._recorder.on:
            return list(tensors)
        self._has_end = bool(with_grad(tensors))
        return pass_all(BackwardMark, self._end, tensors)

    def returned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return its outputs behind Mark 2."""
        return pass_all(BackwardMark, self._begin, tensors) if self._recorder.on else list(tensors)

    def _begin(self) -> None:
        for passage in list(self._open_passages):
            passage._end()
        self._running.close()
        self._running.enter_context(self._event(self._kinds[1]))
        if not self._has_end:
            self._open_passages.append(self)
            at_end_of_backward(self._end)

    def _end(self) -> None:
        self._running.close()
        if self in self._open_passages:
            self._open_passages.remove(self)

    def _event(self, kind: Kind) -> AbstractContextManager[None]:
        if self._recorder.step != self._step:
            return nullcontext()  # the backward of a step before the last one
        return self._recorder.event(*self._at, kind, stream=self._stream)
