"""The free bytes of a file, computed on integers alone."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of a file."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.size


class Extents:
    """The free bytes of a file; adjacent free extents are merged.

    A tensor may span several extents, so every free byte is usable: a limit in bytes is exact, whatever the order of
    earlier frees.
    """

    def __init__(self) -> None:
        self.end = 0  # of the file
        self.free_bytes = 0
        self._starts: list[int] = []  # of free extents, ascending
        self._sizes: dict[int, int] = {}

    @property
    def tail_bytes(self) -> int:
        """How many bytes at the end of the file are free."""
        if not self._starts:
            return 0
        last = self._starts[-1]
        return self._sizes[last] if last + self._sizes[last] == self.end else 0

    def grow(self, size: int) -> None:
        """Add free bytes at the end."""
        start = self.end
        self.end += size
        self.give([Extent(start, size)])

    def take_one(self, size: int) -> list[Extent] | None:
        """Take the smallest free extent that is large enough, or the part of it that is needed; None if none is."""
        fitting = [(free, start) for start, free in self._sizes.items() if free >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        return [self._cut(start, size)]

    def take_any(self, size: int) -> list[Extent] | None:
        """Take as many bytes in several extents, the largest first; None if too few are free."""
        if size > self.free_bytes:
            return None
        taken: list[Extent] = []
        for free, start in sorted(((free, start) for start, free in self._sizes.items()), reverse=True):
            if size == 0:
                break
            taken.append(self._cut(start, min(free, size)))
            size -= taken[-1].size
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Return extents that were taken."""
        for extent in extents:
            start, size = extent.start, extent.size
            if size == 0:
                continue
            self.free_bytes += size
            place = bisect_left(self._starts, start)
            if place < len(self._starts) and self._starts[place] == extent.end:
                size += self._sizes.pop(self._starts.pop(place))
            if place and self._starts[place - 1] + self._sizes[self._starts[place - 1]] == start:
                self._sizes[self._starts[place - 1]] += size
            else:
                self._starts.insert(place, start)
                self._sizes[start] = size

    def free(self) -> list[Extent]:
        """Return the free extents, in order."""
        return [Extent(start, self._sizes[start]) for start in self._starts]

    def _cut(self, start: int, size: int) -> Extent:
        """Take the first bytes of a free extent."""
        place = bisect_left(self._starts, start)
        rest = self._sizes.pop(start) - size
        if rest:
            self._starts[place] = start + size
            self._sizes[start + size] = rest
        else:
            del self._starts[place]
        self.free_bytes -= size
        return Extent(start, size)
