"""`Recorder`: records the events of a step, from all threads and streams that run it.

On the CPU an event is the time between two readings of the clock. Work that is enqueued on a stream runs later: there
an event is two marks on the stream, whose times are queried when the step is over. Both are on one clock, since each
device gets a mark at a known time while nothing runs on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TypeAlias

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.pipeline.events import PipelineEvent
from torchremat.pipeline.timeline import Timeline
from torchremat.schedules.pipelines import Kind

_NOTHING = nullcontext()
_Taken: TypeAlias = "_OnCPU | _OnStream"


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
        self._taken: list[_Taken] = []
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
        """Return a context that records an event, also if its block raises.

        Args:
            stage: From 0.
            microbatch: From 0.
            kind: The kind of the event.
            stream: The device stream that it runs on; None if it runs while the CPU is in the context.
        """
        if not self.on:
            return _NOTHING
        if stream is None:
            return _OnCPU(self._taken, stage, microbatch, kind)
        return _OnStream(self._taken, stage, microbatch, kind, stream, self._zero_of(stream.device))

    def events(self) -> tuple[PipelineEvent, ...]:
        """Return the events since the start, in the order in which they ended; waits for the streams of the events."""
        return tuple(_event(taken, self._start_s) for taken in list(self._taken))

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return perf_counter() - self._start_s

    def timeline(
        self, *, stages: int, workers: tuple[tuple[int, ...], ...] = (), predicted: Timeline | None = None
    ) -> Timeline:
        """Return the events since the start as a timeline with the arguments as its attributes."""
        return Timeline(events=self.events(), stages=stages, workers=workers, predicted=predicted)

    def _zero_of(self, device: torch.device) -> _Zero:
        with self._lock:
            if device not in self._zeros:
                self._zeros[device] = _zero(device)
            return self._zeros[device]


class _OnCPU:
    """An event on the CPU, between two readings of the clock."""

    __slots__ = ("end_s", "kind", "microbatch", "stage", "start_s", "taken")

    def __init__(self, taken: list[_Taken], stage: int, microbatch: int, kind: Kind) -> None:
        self.taken = taken
        self.stage = stage
        self.microbatch = microbatch
        self.kind: Kind = kind

    def __enter__(self) -> None:
        self.start_s = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end_s = perf_counter()
        self.taken.append(self)

    def times(self) -> tuple[float, float]:
        return self.start_s, self.end_s


class _OnStream:
    """An event on a stream, between two marks."""

    __slots__ = ("end", "kind", "microbatch", "stage", "start", "stream", "taken", "zero")

    def __init__(
        self, taken: list[_Taken], stage: int, microbatch: int, kind: Kind, stream: torch.Stream, zero: _Zero
    ) -> None:
        self.taken = taken
        self.stage = stage
        self.microbatch = microbatch
        self.kind: Kind = kind
        self.stream = stream
        self.zero = zero

    def __enter__(self) -> None:
        self.start = _mark(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end = _mark(self.stream)
        self.taken.append(self)

    def times(self) -> tuple[float, float]:
        self.end.synchronize()
        zero = self.zero
        return (
            zero.seconds + zero.mark.elapsed_time(self.start) / 1e3,
            zero.seconds + zero.mark.elapsed_time(self.end) / 1e3,
        )


def _mark(stream: torch.Stream) -> torch.Event:
    return accelerator_of(stream.device).event(stream, timed=True)


def _zero(device: torch.device) -> _Zero:
    accelerator = accelerator_of(device)
    seconds = accelerator.seconds(device)
    return _Zero(mark=accelerator.event(accelerator.current_stream(device), timed=True), seconds=seconds)


def _event(taken: _Taken, since_s: float) -> PipelineEvent:
    start_s, end_s = taken.times()
    return PipelineEvent(
        stage=taken.stage,
        microbatch=taken.microbatch,
        kind=taken.kind,
        start_s=start_s - since_s,
        end_s=end_s - since_s,
    )
