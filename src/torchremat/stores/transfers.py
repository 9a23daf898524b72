"""Copies between a CUDA device and pinned memory, beside what the device computes.

The life of a tensor that goes out, and of its memory on the device:

    put         the copy is queued on a stream of its own, after what the current stream has queued so far;
                the memory is held, since the stream that computes knows nothing of the copy
    landed      the copy's event has fired, which the next call of the store sees: the version is compared, and the
                memory let go
    dropped     the memory is let go at once: nobody asks what the copy reads. The pinned memory waits for the event

A write in place that the host has queued before a copy has landed may be seen by it in part, so it counts as an error
then; autograd calls it one in any case. One that it queues after `get` comes after the copy in the order of streams,
and so does one that is announced: the stream that writes waits for the copy, and the host does not.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from torchremat.errors import MutationError, UnsupportedError
from torchremat.stores.contents import Content, check_version, written_since
from torchremat.stores.pinned import Place, Pool
from torchremat.stores.statistics import Ledger
from torchremat.tensors.held import version_of

# How many bytes of a device are held for copies that have not ended, at most.
_FLYING_BYTES = 256 * 2**20


class Flight:
    """One copy out."""

    __slots__ = ("changed", "copied", "is_awaited", "landed", "size_bytes", "source", "version")

    def __init__(self, source: Tensor, copied: torch.cuda.Event) -> None:
        self.source: Tensor | None = source  # a view of the tensor, or a copy that nobody writes to
        self.version = version_of(source)
        self.copied = copied
        self.size_bytes = source.nbytes
        self.landed = False
        self.is_awaited = False  # whether the stream that writes waits for the copy
        self.changed: str | None = None


class Transfers:
    """The streams of each device, and the copies that have not ended.

    Args:
        pool: Where tensors go.
        ledger: Where bytes are counted.
    """

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self.pool = pool
        self.ledger = ledger
        self._lock = threading.Lock()
        self._out: dict[torch.device, torch.cuda.Stream] = {}
        self._in: dict[torch.device, torch.cuda.Stream] = {}
        self._flights: deque[Flight] = deque()
        self._flying_bytes = 0

    def out(self, tensor: Tensor, content: Content) -> TransferHandle | None:
        """Begin to copy a tensor of a CUDA device; None if there is no pinned memory for it."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "Host: a tensor is to be stored while a CUDA graph is captured, where nothing can wait for its copy."
            )
        self._wait_for_some(content.size_bytes)
        place = self.pool.take(content.size_bytes)
        if place is None:
            return None
        try:
            host = place.tensor(content)
            flight = self._begin(tensor, host, content)
        except BaseException:
            self.pool.give(place)
            raise
        place.used(flight.copied)
        self.ledger.copied(out_bytes=content.size_bytes)
        with self._lock:
            self._flights.append(flight)
            self._flying_bytes += flight.size_bytes
        return TransferHandle(self, flight, place, host, content)

    def incoming(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies to a device that nobody waits for yet."""
        return self._stream(self._in, device)

    def land(self) -> None:
        """Let go of what has been copied."""
        with self._lock:
            flying: deque[Flight] = deque()
            while self._flights:
                flight = self._flights.popleft()
                if flight.copied.query():
                    self._landed(flight)
                else:
                    flying.append(flight)
            self._flights = flying

    def _begin(self, tensor: Tensor, host: Tensor, content: Content) -> Flight:
        line = content.line(tensor)
        stream = self._stream(self._out, content.device)
        stream.wait_stream(torch.cuda.current_stream(content.device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(stream):
            host.copy_(line, non_blocking=True)
            copied.record(stream)
        return Flight(line, copied)

    def _landed(self, flight: Flight) -> None:
        source = flight.source
        if source is not None:
            now = version_of(source)
            if now != flight.version and not flight.is_awaited:
                flight.changed = str(written_since(source, version=flight.version, now=now))
        flight.source = None
        flight.landed = True
        self._flying_bytes -= flight.size_bytes

    def _wait_for_some(self, size: int) -> None:
        """Wait until so many bytes more may be held."""
        while True:
            self.land()
            with self._lock:
                if self._flying_bytes + size <= _FLYING_BYTES or not self._flights:
                    return
                oldest = self._flights[0]
            oldest.copied.synchronize()

    def _stream(self, streams: dict[torch.device, torch.cuda.Stream], device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in streams:
                streams[device] = torch.cuda.Stream(device)
            return streams[device]


class TransferHandle:
    """A tensor in pinned memory, or on its way there. See NOTE [ Who owns a stored tensor ]."""

    __slots__ = ("__weakref__", "_ahead", "_content", "_flight", "_host", "_lock", "_place", "_transfers")

    def __init__(self, transfers: Transfers, flight: Flight, place: Place, host: Tensor, content: Content) -> None:
        self._transfers = transfers
        self._flight = flight
        self._place = place
        self._host = host
        self._content = content
        self._lock = threading.Lock()
        self._ahead: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def stored_bytes(self) -> int:
        """How many bytes of the host hold it."""
        return self._content.size_bytes

    def get(self) -> Tensor:
        """Return the tensor on its device, in fresh memory; the current stream waits for the copy, the host does not.

        Raises:
            MutationError: It was written in place before it was copied.
        """
        self._check()
        device = self._content.device
        current = torch.cuda.current_stream(device)
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is None:
            with torch.cuda.stream(current):
                fresh, event = self._copy(current)
        else:
            fresh, event = ahead
            current.wait_event(event)
            # It was made on another stream, whose order says nothing of what the current one does with it.
            fresh.record_stream(current)
        self._transfers.ledger.copied(in_bytes=self._content.size_bytes)
        return self._content.back(fresh)

    def prefetch(self) -> None:
        """Begin to copy it to its device, beside what the device computes."""
        with self._lock:
            if self._ahead is not None:
                return
            stream = self._transfers.incoming(self._content.device)
            with torch.cuda.stream(stream):
                self._ahead = self._copy(stream)

    def settle(self) -> None:
        """Wait until it is copied, so that its memory on the device is free."""
        self._flight.copied.synchronize()
        self._transfers.land()

    def before_write(self) -> None:
        """Let the current stream wait for the copy. See NOTE [ Who may write to what was put ]."""
        self._transfers.land()
        flight, source = self._flight, self._flight.source
        if source is not None and (flight.is_awaited or version_of(source) == flight.version):
            torch.cuda.current_stream(self._content.device).wait_event(flight.copied)
            flight.is_awaited = True

    def _copy(self, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        stream.wait_event(self._flight.copied)
        fresh = self._content.empty()
        fresh.copy_(self._host, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        self._place.used(event)
        return fresh, event

    def _check(self) -> None:
        self._transfers.land()
        if self._flight.changed is not None:
            raise MutationError(self._flight.changed)
        source = self._flight.source
        if source is not None and not self._flight.is_awaited:
            check_version(source, self._flight.version)

    def __del__(self) -> None:
        # See NOTE [ What a finalizer may do ]
        self._flight.source = None
        self._transfers.pool.give(self._place)
        self._transfers.ledger.release(self._content.size_bytes)
