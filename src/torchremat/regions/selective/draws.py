"""Generator states while a recompute gets kept outputs of operators that drew random numbers.

See NOTE [ Selective recompute ], 6.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torchremat._compat.transforms import is_in_batch, outside_batches
from torchremat.ambient.generators import set_generator
from torchremat.regions.threads import thread


class PutBack(AbstractContextManager[None]):
    """A block for a recompute that restores the generators moved in it."""

    __slots__ = ("_had",)

    def __enter__(self) -> None:
        now = thread.now
        self._had, now.moved = now.moved, {}

    def __exit__(self, *error: object) -> None:
        now = thread.now
        moved, now.moved = now.moved, self._had
        if moved:
            with outside_batches() if is_in_batch() else nullcontext():
                for generator, state in moved.items():
                    set_generator(generator, state)
