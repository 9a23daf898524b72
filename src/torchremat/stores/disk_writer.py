"""Tensors that are written to a file and read back, by threads whose progress is never taken for granted.

NOTE [ Moves that are interrupted ]
A thread may be interrupted in the middle of any line, and a disk may stop answering. What interrupts a move, SystemExit
too, does not end the thread, and the work is done again. Repeating is safe: a write writes the same bytes to the same
place, a read goes to fresh memory. What interrupts every move is no interrupt but an error: after `_MOST_FAILURES` in a
row, with nothing moved between them, the threads end, and each wait and each put raises. If no thread could be started,
the waiter does the work itself. If nothing at all has moved for `timeout_s`, waiting ends with an error. Few waits are
needed: a tensor that is not written yet is still in memory, so reading it takes no disk.

The life of a tensor is a table in `disk_entries.py`.

A slot of the file needs no generation number: it is given back once its handle is gone, so no
reader of the old tensor is left that could see the next one's bytes; and if the disk returns the old content, the
checksum detects it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from torchremat.errors import MutationError, StoreError
from torchremat.stores.base import Ledger, goes_on_reading
from torchremat.stores.disk_entries import Entry, Patience, ReadAhead, State, WriteOutcome
from torchremat.stores.disk_file import DiskFile, bytes_of
from torchremat.stores.extents import Extent
from torchremat.tensors.versioned import Versioned

# How often a waiter looks whether the disk has stopped answering, in seconds.
_LOOK_S = 0.1
# How many moves in a row may be interrupted with nothing moved meanwhile. A program interrupts one or two.
_MOST_FAILURES = 50
# How long closing a store waits for writes in progress, in seconds.
_JOIN_S = 5.0
_HOST = torch.device("cpu")


class DiskWriter:
    """A disk file, the threads that write and read it, and the tensors that they transfer.

    The threads keep the disk writer alive; its owner closes it.

    Args:
        pending_limit_bytes: How many bytes may still wait to be written when `add` returns.
        timeout_s: How long to wait for a disk that makes no progress.
    """

    def __init__(
        self, file: DiskFile, ledger: Ledger, *, threads: int, pending_limit_bytes: int, timeout_s: float, name: str
    ) -> None:
        self.file = file
        self.ledger = ledger
        self.failure: str | None = None  # of a write, until it is reported
        self.dropped: deque[Entry] = deque()  # See NOTE [ What a finalizer may do ]
        self._broken: str | None = None  # what every move fails with: nothing moves any more
        self._name = name
        self._pending_limit_bytes = pending_limit_bytes
        self._pending_bytes = 0
        self._timeout_s = timeout_s
        self._condition = threading.Condition(threading.Lock())
        self._moves = 0  # how many tensors were written or read
        self._pending: dict[Entry, None] = {}  # entries that wait, move or are left, oldest first
        self._reads: deque[tuple[Entry, ReadAhead]] = deque()
        # Each item signals that there may be work; None ends a thread.
        self._calls: SimpleQueue[bool | None] = SimpleQueue()
        self._closing = False
        self._most_threads = threads
        self._threads: list[threading.Thread] = []

    def take(self, size: int) -> list[Extent] | None:
        """Take space in the file; None if the disk has no more.

        Raises:
            StoreError: The disk does not answer.
        """
        patience = Patience(self._timeout_s)
        with self._condition:
            while True:
                self._settle()
                extents = self.file.take(size)
                if extents is not None or all(entry.state is not State.LEFT for entry in self._pending):
                    return extents
                self._wait(patience)  # for space that is about to be given back

    def give(self, extents: list[Extent]) -> None:
        """Give back space that no tensor was put into."""
        with self._condition:
            self.file.give(extents)

    def add(self, entry: Entry) -> None:
        """Queue a tensor to be written, and wait until no more bytes are pending than the limit.

        Raises:
            StoreError: The disk does not answer, or every move fails.
        """
        with self._condition:
            self._settle()
            self._check()
            self._pending_bytes += entry.content.size_bytes
            self._pending[entry] = None
            self._start()
        self._calls.put(True)
        self._wait_until(lambda: self._pending_bytes <= self._pending_limit_bytes)

    def wait_until_written(self, entry: Entry) -> None:
        """Wait until a tensor is in the file, or is known not to reach it.

        Raises:
            StoreError: The disk does not answer.
        """
        self._wait_until(lambda: entry not in self._pending)

    def get(self, entry: Entry) -> Tensor:
        """Return a tensor in fresh host memory.

        Raises:
            StoreError: The tensor cannot be read, or differs from what was written.
            MutationError: The tensor was written in place before it was in the file.
        """
        with self._condition:
            source, changed = entry.source, entry.changed
            ahead, entry.ahead = entry.ahead, None
        if changed is not None:
            raise MutationError(changed)
        if source is not None:
            fresh = source.get().clone()
            source.get()  # it was not written meanwhile either
            return fresh
        fresh = None if ahead is None else self._await(ahead)
        if fresh is None:
            fresh = self._read(entry)
        self.ledger.copied(in_bytes=entry.content.size_bytes)
        return fresh

    def own(self, entry: Entry) -> None:
        """Replace a tensor that is held and not in the file by a copy, since the tensor is about to be written.

        See NOTE [ Who may write to what was put ].
        """
        with self._condition:
            source = entry.source
            if source is None or entry.is_own or source.is_written:
                return
            entry.source = copy = Versioned(source.tensor.clone())
            entry.is_own = True
            entry.restarts = entry.state is State.MOVING
        goes_on_reading(copy.tensor)

    def prefetch(self, entry: Entry) -> None:
        """Begin to read a tensor."""
        with self._condition:
            if entry.state is not State.STORED or entry.ahead is not None:
                return
            entry.ahead = ReadAhead(entry.content.empty(_HOST))
            self._reads.append((entry, entry.ahead))
            self._start()
        self._calls.put(True)

    def settle(self) -> None:
        """Account for entries that were dropped."""
        with self._condition:
            self._settle()

    def close(self) -> None:
        """End the threads; tensors that are not in the file yet are never written. A finalizer, so it takes no lock."""
        self._closing = True
        threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        # One thread of a disk writer does not wait for another: it may hold the lock that the other needs.
        if threading.current_thread() not in threads:
            for thread in threads:
                thread.join(_JOIN_S)

    # Everything down to the next such comment is called under the lock.

    def _settle(self) -> None:
        while self.dropped:
            entry = self.dropped.popleft()
            match entry.state:
                case State.WAITING:
                    self._free(entry)
                    self._done(entry, State.DROPPED)
                    self.ledger.release(entry.content.size_bytes)
                case State.MOVING:
                    entry.state = State.LEFT
                    self.ledger.release(entry.content.size_bytes)
                case State.STORED | State.CHANGED:
                    self._free(entry)
                    entry.state = State.DROPPED
                    self.ledger.release(entry.content.size_bytes)
                case State.KEPT:  # it returned all its space when it could not be written
                    entry.state = State.DROPPED
                case State.LEFT | State.DROPPED:  # only one finalizer drops it
                    pass

    def _done(self, entry: Entry, state: State) -> None:
        """Record that the transfer of a tensor has ended."""
        if entry in self._pending:  # not if `add` was interrupted before it began
            del self._pending[entry]
            self._pending_bytes -= entry.content.size_bytes
        self._moves += 1
        entry.state = state
        self._condition.notify_all()

    def _free(self, entry: Entry) -> None:
        extents, entry.extents = entry.extents, []
        self.file.give(extents)

    def _next(self) -> Entry | None:
        """Return the oldest tensor that waits to be written."""
        return next((entry for entry in self._pending if entry.state is State.WAITING), None)

    def _undo(self, entry: Entry) -> None:
        """Requeue a tensor whose write was cut short."""
        if entry.state is State.LEFT:
            self._free(entry)
            self._done(entry, State.DROPPED)
        elif entry.state is State.MOVING:
            entry.state = State.WAITING

    def _end(self, entry: Entry, outcome: WriteOutcome) -> None:
        """Record the outcome of a write."""
        if entry.state is State.LEFT:
            self._free(entry)
            self._done(entry, State.DROPPED)
            return
        if entry.restarts:
            entry.state = State.WAITING
            self._moves += 1
            self._calls.put(True)
            self._condition.notify_all()
            return
        if outcome.state is State.KEPT:
            self._free(entry)
            self.ledger.fail(entry.content.size_bytes)
            self.failure = outcome.message
        else:
            entry.source = None
        if outcome.state is State.CHANGED:
            entry.changed = outcome.message
        elif outcome.state is State.STORED:
            entry.checksum = outcome.checksum
            self.ledger.copied(out_bytes=entry.content.size_bytes)
        self._done(entry, outcome.state)

    def _start(self) -> None:
        if self._threads or self._closing:
            return
        for number in range(self._most_threads):
            thread = threading.Thread(target=self._work, name=f"torchremat disk {number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter shuts down, or the thread limit is reached
                return
            self._threads.append(thread)

    def _check(self) -> None:
        if self._broken is not None:
            raise StoreError(self._broken)

    def _wait(self, patience: Patience) -> None:
        """Wait for a change, for a short while; the caller polls again then."""
        self._check()
        if self._condition.wait(_LOOK_S):
            return
        self._calls.put(True)  # a thread that was interrupted while it went on may have lost one
        if patience.is_over(self._moves):
            raise StoreError(
                f"{self._name}: nothing was written or read for {self._timeout_s:g} s, and {self._pending_bytes} B "
                "wait to be written. The disk hangs or is very slow; `timeout_s=` says how long to wait."
            )

    # Everything below takes the lock itself.

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds, evaluated under the lock; move tensors if no thread is left to."""
        patience = Patience(self._timeout_s)
        while True:
            with self._condition:
                self._settle()
                if is_so():
                    return
                if self._broken or self._next() is None or any(thread.is_alive() for thread in self._threads):
                    self._wait(patience)
                    continue
            self._move()

    def _work(self) -> None:
        """Move tensors until the disk writer is closed: the body of each thread."""
        failures, moves = 0, self._moves
        while not self._closing and self._broken is None:
            try:
                if self._calls.get() is None:
                    return
                self._move()
            except BaseException as error:  # noqa: BLE001  See NOTE [ Moves that are interrupted ]
                failures, moves = (failures + 1 if moves == self._moves else 1), self._moves
                if failures >= _MOST_FAILURES:
                    self._break(f"{type(error).__name__}: {error}")
                    return
                self._calls.put(True)

    def _break(self, error: str) -> None:
        """Move nothing any more; tensors that are not in the file stay in memory."""
        with self._condition:
            self._broken = (
                f"{self._name}: its threads have ended, since {_MOST_FAILURES} moves in a row failed with {error}. "
                "Tensors that are not in the file yet stay in memory; make a new store."
            )
            self._condition.notify_all()
        for _ in self._threads:
            self._calls.put(None)

    def _move(self) -> None:
        """Move one tensor, if any waits. A function, since a thread that waits for the next must hold none."""
        read, entry = None, None
        try:
            with self._condition:
                self._settle()
                if self._reads:
                    read = self._reads.popleft()
                else:
                    entry = self._next()
                if entry is not None:  # under the same lock: two threads that found it would do the work of one
                    entry.state, entry.restarts = State.MOVING, False
            if read is not None:
                self._read_ahead(*read)
            if entry is not None:
                outcome = self._written(entry)
                with self._condition:
                    self._settle()
                    self._end(entry, outcome)
        except BaseException:
            if entry is not None:
                with self._condition:
                    self._undo(entry)
            raise

    def _written(self, entry: Entry) -> WriteOutcome:
        """Write the bytes of a tensor; no reference to it outlives this function."""
        source = entry.source
        if source is None:  # it was dropped just before
            return WriteOutcome(State.STORED)
        found = 0
        if not source.is_written:
            try:
                found = self.file.write(entry.extents, bytes_of(source.tensor))
            except Exception as error:  # noqa: BLE001  of the disk, or no memory left
                return WriteOutcome(State.KEPT, message=f"{self._name}: {entry.content} could not be written: {error}.")
        if source.is_written:
            return WriteOutcome(State.CHANGED, message=str(source.written()))
        return WriteOutcome(State.STORED, checksum=found)

    def _read(self, entry: Entry, fresh: Tensor | None = None) -> Tensor:
        fresh = entry.content.empty(_HOST) if fresh is None else fresh
        try:
            found = self.file.read(entry.extents, bytes_of(fresh))
        except OSError as error:
            raise StoreError(f"{self._name}: {entry.content} cannot be read back: {error}.") from error
        if found != entry.checksum:
            raise StoreError(
                f"{self._name}: {entry.content} is not what was written, its checksum differs. The disk or the file is "
                "damaged."
            )
        return fresh

    def _read_ahead(self, entry: Entry, ahead: ReadAhead) -> None:
        with self._condition:
            if ahead.done or entry.ahead is not ahead:
                return
            ahead.begun = True
        try:
            self._read(entry, ahead.tensor)
        except BaseException:  # noqa: BLE001  the caller reads again, and sees why
            ahead.tensor = None
        with self._condition:
            ahead.done = True
            self._moves += 1
            self._condition.notify_all()

    def _await(self, ahead: ReadAhead) -> Tensor | None:
        """Return the tensor that is read ahead; None if the caller must read it now."""
        patience = Patience(self._timeout_s)
        with self._condition:
            while not ahead.done:
                if not ahead.begun:
                    ahead.done, ahead.tensor = True, None
                    return None
                self._wait(patience)
            tensor, ahead.tensor = ahead.tensor, None  # its memory is freed with the caller's last reference
        return tensor
