"""What autograd saves in a traced forward, and what of it goes before the end, with a graph that nobody has any more.

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
    """What a graph holds in the place of a saved tensor."""

    __slots__ = ("__weakref__",)


class Saves:
    """Follows what is saved until its graph goes.

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
        """Note a save, and return what is to be saved in its place.

        Args:
            saved: The save.
            values: The same among the operators, as far as they know it.
            flops: The calls that are open, with what each has computed so far.
        """
        one = _GraphSave()

        def goes(_: object) -> None:
            saved.dropped = self._now()

        self._noted.append((ref(one, goes), saved, values, list(flops)))
        return one

    def close(self) -> None:
        """The forward has ended, with a graph: tell operators and calls what that has, and follow no longer."""
        for _, saved, values, flops in self._noted:
            if saved.dropped is None:
                for call, so_far in flops:
                    call.flops_saved = so_far
            else:
                for value in values:
                    value.is_dropped = True
        self._noted.clear()
        del self._now  # whoever has the time has this object
