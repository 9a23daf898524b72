"""Moves of parameters between memory and a store: as marks in a record of the step, and as places that they come to.

A plan counts parameters apart from all else, so that the record of a step has to show it as if they had never moved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor

MOVES = ("moves", "moved")  # the labels of these marks


class _Marking:
    """Takes marks around moves. Those that overlap, one inside another or in two threads, are one stretch."""

    def __init__(self, mark: Callable[[str], int]) -> None:
        self.stretches: list[tuple[int, int]] = []
        self._mark = mark
        self._lock = threading.Lock()
        self._open = 0
        self._begins = -1

    def begin(self) -> None:
        with self._lock:
            if not self._open:
                self._begins = self._mark(MOVES[0])
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self.stretches.append((self._begins, self._mark(MOVES[1])))


_marking: list[_Marking] = []


@contextmanager
def moving() -> Generator[None]:
    """Let `marking_moves` know that the block moves parameters."""
    told = list(_marking)
    for one in told:
        one.begin()
    try:
        yield
    finally:
        for one in told:
            one.end()


@contextmanager
def marking_moves(mark: Callable[[str], int]) -> Generator[list[tuple[int, int]]]:
    """Yield a list that gets the marks around each stretch of moves in the block, of all threads, in order.

    Args:
        mark: Marks the current time, and returns the number of the mark.
    """
    own = _Marking(mark)
    _marking.append(own)
    try:
        yield own.stretches
    finally:
        _marking.remove(own)


class MemoryWatch:
    """Tells which parameters leave with other memory than they came to, since code has set their `.data`.

    Attributes:
        replaced: These parameters, by id.
    """

    def __init__(self) -> None:
        self.replaced: dict[int, Tensor] = {}
        self._came: dict[int, tuple[Tensor, int]] = {}

    def comes(self, parameter: Tensor) -> None:
        """Take note of a parameter that has come in."""
        self._came[id(parameter)] = parameter, parameter.untyped_storage()._cdata

    def leaves(self, parameter: Tensor) -> None:
        """Take note of a parameter that is about to leave."""
        _, came = self._came.pop(id(parameter), (None, None))
        if came is not None and came != parameter.untyped_storage()._cdata:
            self.replaced[id(parameter)] = parameter

    def end(self) -> None:
        """Look at those that are in memory still."""
        for parameter, _ in [*self._came.values()]:
            self.leaves(parameter)


watching: list[MemoryWatch] = []  # told of each move


@contextmanager
def memory_watched() -> Generator[MemoryWatch]:
    """Watch the parameters that come and leave in the block, and those that are there at its end."""
    watch = MemoryWatch()
    watching.append(watch)
    try:
        yield watch
    finally:
        watching.remove(watch)
        watch.end()
