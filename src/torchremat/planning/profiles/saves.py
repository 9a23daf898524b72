"""The saves of a traced forward, and those freed before its end, with a graph that is no longer referenced.

`x + (rounded(x) - x).detach()` saves what the backward of `rounded` would need, and drops that graph at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from torchremat.planning.profiles.traces import SavedStorage

if TYPE_CHECKING:
    from torchremat.planning.profiles.operators import SavedValue
    from torchremat.planning.profiles.traces import TracedCall


class _GraphSave:
    """The object that a graph holds in place of a saved tensor."""

    __slots__ = ("__weakref__",)


class Saves:
    """Tracks saved tensors until their graphs are freed.

    Args:
        now: Returns the time.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._noted: list[
            tuple[ReferenceType[_GraphSave], SavedStorage, Sequence[SavedValue], list[tuple[TracedCall, int]]]
        ] = []

    def note(
        self, saved: SavedStorage, values: Sequence[SavedValue], flops: Iterable[tuple[TracedCall, int]]
    ) -> object:
        """Record a save, and return the object to save in its place.

        Args:
            saved: The save.
            values: The same save among the operators, if they have it.
            flops: The calls that are open, with the flops of each so far.
        """
        one = _GraphSave()

        def goes(_: object) -> None:
            saved.dropped = self._now()

        self._noted.append((ref(one, goes), saved, values, list(flops)))
        return one

    def close(self) -> None:
        """The forward has ended, with a graph: pass its saves to operators and calls, and stop tracking."""
        for _, saved, values, flops in self._noted:
            if saved.dropped is None:
                for call, so_far in flops:
                    call.flops_saved = so_far
            else:
                for value in values:
                    value.is_dropped = True
        self._noted.clear()
        del self._now  # the clock references this object
