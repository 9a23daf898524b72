"""The roots that many calls have in common, and what they know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import ReferenceType, ref

from torch import nn

from torchremat.state.snapshot import Snapshot
from torchremat.state.structure import CannotBeHeldError, Structure
from torchremat.state.world import Reaching


class Root:
    """A root, as its calls know it: what it reaches. See NOTE [ Structure and stamps ].

    Args:
        of: The function whose calls they are, None for a module that keeps this.
        is_called_often: Whether already the first search is kept, else the second one.

    Attributes:
        of: See above.
    """

    __slots__ = ("__weakref__", "_last", "_searches", "_structure", "of")

    def __init__(self, of: Callable[..., object] | None = None, *, is_called_often: bool = False) -> None:
        self.of = of
        self._structure: Structure | None = None
        self._searches = int(is_called_often)  # since the structure was the same as before
        self._last: ReferenceType[Snapshot] | None = None

    def recall(self) -> Snapshot | None:
        """Return the snapshot of what it reaches now, None if it must be searched for.

        It is that of the call before, if nothing at all has changed since, and something still needs it.
        """
        known = self._structure
        if known is None:
            return None
        world = known.read()
        if world is None:
            self._structure = self._last = None
            return None
        self._searches = 1
        last = self._last() if self._last is not None else None
        if last is not None and last.is_of(world):
            return last
        found = Snapshot(world)
        self._last = ref(found)
        return found

    def remember(self, world: Reaching) -> None:
        """Keep the structure that the second search has found; later ones ever more rarely, if each finds another."""
        self._searches += 1
        if self._searches < 2 or self._searches & (self._searches - 1):
            return
        with suppress(CannotBeHeldError):
            self._structure = Structure(world, partial(_end, ref(self)))


class Rooted:
    """The forward of a module that is a root.

    Attributes:
        root: What its calls know.
    """

    def __init__(self) -> None:
        self.root = Root()


def known_root(roots: Sequence[object]) -> tuple[Root | None, Sequence[object]]:
    """Return what calls know of their root, None if nobody keeps that, and the roots as they are."""
    if len(roots) != 1:
        return None, roots
    only = roots[0]
    if isinstance(only, Root):
        return only, (only.of,)
    forward = only.__dict__.get("forward") if isinstance(only, nn.Module) else None
    return (forward.root if isinstance(forward, Rooted) else None), roots


def _end(root: ReferenceType[Root], _: object) -> None:
    if (alive := root()) is not None:
        alive._structure = None
