"""Copies between a device and pinned memory, overlapping the device's computation.

NOTE [ Who waits for whom ]
Three streams take part: one for copies out, one for copies in, and the compute stream, which is the caller's current
stream. A block of the device's memory belongs to the stream that allocates it, so all blocks are allocated by the
compute stream: it can reuse what it has freed.

    event       copy stream                           compute stream                 memory
    put         waits for the compute stream, copies  -                              the source is held for the copy
    landed      its event has fired                   -                              the source is released, and is free
    dropped     -                                     -                              as above: the copy still reads it
    prefetch    waits for the compute stream and      allocates                      the target is held for the copy
                the copy out, copies
    get         -                                     waits for the copy in, or for  the target is the caller's
                                                      the copy out and copies
    write       -                                     waits for the copy out         the memory may be read until then
    left        -                                     -                              a target that was never asked for
                                                                                     is held for the copy, too

The host waits for none of this, except where more would be in flight than is allowed, and where it asks to (`settle`).
Pinned memory waits for the last copy that uses it.

A copy that has not landed may see part of an in-place write that the host queued before that, so such a write counts as
an error; autograd treats it as one in any case. A write that the host queues after `get` comes after the copy in stream
order, and so does one that is announced.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchremat._compat.accelerators import Stream, accelerator_of
from torchremat._compat.streams import current_stream, record_stream, use_stream, wait_stream
from torchremat.errors import MutationError, UnsupportedError
from torchremat.stores.base import Content, Ledger
from torchremat.stores.pinned import PinnedBlock, Pool
from torchremat.tensors.versioned import Versioned

# Upper bound on the device bytes held for copies that have not ended: at most this many, and at most this share of the
# peak stored bytes, or one tensor. Otherwise a small model would have all of its memory in flight, and free nothing.
_FLYING_BYTES = 256 * 2**20
_FLYING_SHARE = 1 / 8


class CopyAhead(NamedTuple):
    """One copy in.

    Attributes:
        tensor: The target of the copy.
        copied: Fires when the copy is done.
        owner: The stream that allocated the target.
    """

    tensor: Tensor
    copied: torch.Event
    owner: Stream


@dataclass(eq=False, slots=True)
class Flight:
    """One copy out.

    Attributes:
        source: A view of the tensor, or a copy that no other code writes to; None once it was copied.
        copied: Fires when the copy is done.
        size_bytes: Its bytes.
        is_awaited: Whether the stream that writes waits for the copy.
        changed: The message of the error, if the tensor was written before it was copied.
    """

    source: Versioned | None
    copied: torch.Event
    size_bytes: int
    is_awaited: bool = False
    changed: str | None = None


class Transfers:
    """The streams of each device, and the copies that have not ended."""

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self.pool = pool
        self.ledger = ledger
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, torch.device], Stream] = {}
        self._flights: dict[torch.device, deque[Flight]] = {}  # in the order of their stream
        self._flying_bytes = 0
        self._left: deque[CopyAhead] = deque()  # never asked for, see NOTE [ What a finalizer may do ]

    def out(self, tensor: Tensor, content: Content) -> TransferHandle | None:
        """Begin to copy a tensor from a device; None if no pinned memory is left for it."""
        if accelerator_of(content.device).is_capturing():
            raise UnsupportedError(
                "Host: a tensor is to be stored while a graph is captured, where nothing can wait for its copy."
            )
        self.settle(most_bytes=max(0, self._most_flying() - content.size_bytes))
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
            self._flights.setdefault(content.device, deque()).append(flight)
            self._flying_bytes += flight.size_bytes
        return TransferHandle(self, flight, place, host, content)

    def stream(self, way: Literal["in", "out"], device: torch.device) -> Stream:
        """Return the stream for copies from a device, or for those to it that nothing waits for yet."""
        found = self._streams.get((way, device))  # without the lock, see NOTE [ What a finalizer may do ]
        if found is None:
            new = accelerator_of(device).new_stream(device)
            with self._lock:
                found = self._streams.setdefault((way, device), new)
        return found

    def land(self) -> None:
        """Release the sources of copies that have ended."""
        with self._lock:
            for flights in self._flights.values():
                while flights and flights[0].copied.query():
                    self._release(flights.popleft())
            for _ in range(len(self._left)):
                left = self._left.popleft()
                if not left.copied.query():
                    self._left.append(left)

    def settle(self, *, most_bytes: int | None = None) -> None:
        """Wait until at most so many bytes are held for copies; by default, as many as may always be."""
        most_bytes = self._most_flying() if most_bytes is None else most_bytes
        while True:
            self.land()
            with self._lock:
                oldest = [flights[0] for flights in self._flights.values() if flights]
                if self._flying_bytes <= most_bytes or not oldest:
                    return
            oldest[0].copied.synchronize()

    def leave(self, ahead: CopyAhead) -> None:
        """Hold the target of a copy that was never asked for until the copy ends. A finalizer may call it."""
        self._left.append(ahead)

    def __del__(self) -> None:
        # With the store goes the memory that copies read and write.
        for flights in self._flights.values():
            for flight in flights:
                flight.copied.synchronize()
        for left in self._left:
            left.copied.synchronize()

    def _begin(self, tensor: Tensor, host: Tensor, content: Content) -> Flight:
        line = content.line(tensor)
        stream = self.stream("out", content.device)
        wait_stream(stream, current_stream(content.device))
        with use_stream(stream):
            host.copy_(line, non_blocking=True)
        return Flight(Versioned(line), accelerator_of(content.device).event(stream), line.nbytes)

    def _release(self, flight: Flight) -> None:
        source = flight.source
        if source is not None and source.is_written and not flight.is_awaited:
            flight.changed = str(source.written())
        flight.source = None
        self._flying_bytes -= flight.size_bytes

    def _most_flying(self) -> int:
        return min(_FLYING_BYTES, int(_FLYING_SHARE * self.ledger.statistics().peak_stored_bytes))


class TransferHandle:
    """A tensor in pinned memory, or in transfer to it. See NOTE [ Who owns a stored tensor ]."""

    __slots__ = ("__weakref__", "_ahead", "_content", "_flight", "_host", "_lock", "_place", "_transfers")

    def __init__(
        self, transfers: Transfers, flight: Flight, place: PinnedBlock, host: Tensor, content: Content
    ) -> None:
        self._transfers = transfers
        self._flight = flight
        self._place = place
        self._host = host
        self._content = content
        self._lock = threading.Lock()
        self._ahead: CopyAhead | None = None

    @property
    def stored_bytes(self) -> int:
        """How many bytes of the host hold it."""
        return self._content.size_bytes

    def get(self) -> Tensor:
        """Return the tensor on its device, in fresh memory; the current stream waits for the copy, the host does not.

        Raises:
            MutationError: The tensor was written in place before it was copied.
        """
        self._check()
        current = current_stream(self._content.device)
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = self._copy(current, current)
        else:
            current.wait_event(ahead.copied)
            if ahead.owner != current:  # the owner's order does not cover what the current stream does with it
                record_stream(ahead.tensor, current)
        self._transfers.ledger.copied(in_bytes=self._content.size_bytes)
        return self._content.back(ahead.tensor)

    def prefetch(self) -> None:
        """Begin to copy it to its device, overlapping the device's computation."""
        with self._lock:
            if self._ahead is None:
                stream = self._transfers.stream("in", self._content.device)
                self._ahead = self._copy(stream, current_stream(self._content.device))

    def settle(self) -> None:
        """Wait until it is copied, so that its device memory is free."""
        self._flight.copied.synchronize()
        self._transfers.land()

    def before_write(self) -> None:
        """Let the current stream wait for the copy. See NOTE [ Who may write to what was put ]."""
        self._transfers.land()
        flight, source = self._flight, self._flight.source
        if source is not None and (flight.is_awaited or not source.is_written):
            current_stream(self._content.device).wait_event(flight.copied)
            flight.is_awaited = True

    def _copy(self, stream: Stream, owner: Stream) -> CopyAhead:
        """Copy it on a stream, to memory of the current one."""
        fresh = self._content.empty()
        if stream is not owner:
            wait_stream(stream, owner)  # the owner may still use the memory
        stream.wait_event(self._flight.copied)
        with use_stream(stream):
            fresh.copy_(self._host, non_blocking=True)
        copied = accelerator_of(self._content.device).event(stream)
        self._place.used(copied)
        return CopyAhead(fresh, copied, owner)

    def _check(self) -> None:
        self._transfers.land()
        if self._flight.changed is not None:
            raise MutationError(self._flight.changed)
        source = self._flight.source
        if source is not None and not self._flight.is_awaited:
            source.get()

    def __del__(self) -> None:
        # See NOTE [ What a finalizer may do ]
        if self._ahead is not None:
            self._transfers.leave(self._ahead)
        self._transfers.pool.give(self._place)
        self._transfers.ledger.release(self._content.size_bytes)
