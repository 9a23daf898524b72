"""The free bytes of a file, computed on integers alone."""

from __future__ import annotations

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
        # Of free extents: by the first byte the one after the last, and the other way round.
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    @property
    def tail_bytes(self) -> int:
        """How many bytes at the end of the file are free."""
        return self.end - self._start_of.get(self.end, self.end)

    def grow(self, size: int) -> None:
        """Add free bytes at the end."""
        start = self.end
        self.end += size
        self.give([Extent(start, size)])

    def take_one(self, size: int) -> list[Extent] | None:
        """Take the smallest free extent that is large enough, or the part of it that is needed; None if none is."""
        fitting = [(end - start, start) for start, end in self._end_of.items() if end - start >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        return [self._cut(start, size)]

    def take_any(self, size: int) -> list[Extent] | None:
        """Take as many bytes in several extents, the largest first; None if too few are free."""
        if size > self.free_bytes:
            return None
        taken: list[Extent] = []
        for free, start in sorted(((end - start, start) for start, end in self._end_of.items()), reverse=True):
            if size == 0:
                break
            taken.append(self._cut(start, min(free, size)))
            size -= taken[-1].size
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Return extents that were taken."""
        for extent in extents:
            if extent.size:
                self.free_bytes += extent.size
                # With the free extents that end where it begins, and begin where it ends.
                start, end = self._start_of.pop(extent.start, extent.start), self._end_of.pop(extent.end, extent.end)
                self._end_of[start], self._start_of[end] = end, start

    def free(self) -> list[Extent]:
        """Return the free extents, in order."""
        return [Extent(start, end - start) for start, end in sorted(self._end_of.items())]

    def _cut(self, start: int, size: int) -> Extent:
        """Take the first bytes of a free extent."""
        taken, end = Extent(start, size), self._end_of.pop(start)
        if taken.end < end:
            self._end_of[taken.end], self._start_of[end] = end, taken.end
        else:
            del self._start_of[end]
        self.free_bytes -= size
        return taken
