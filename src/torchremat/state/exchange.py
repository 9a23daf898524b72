"""Shows a recompute a snapshot in place of the current world."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor

from torchremat.ambient.global_state import EXCHANGING
from torchremat.state.leaves import copied_hooks, flags_of, put_hooks_back
from torchremat.state.reading import WrittenTensors
from torchremat.state.snapshot import Snapshot
from torchremat.state.world_state import WorldState


class Exchange:
    """A world that a recompute is shown in place of the current one.

    Args:
        snapshot: The world as the forward saw it.
        without_gradients: Whether the gradients of leaves are set aside meanwhile.

    Raises:
        UnsupportedError: A parameter is sharded now, and was not then.

    Attributes:
        written: The tensors that the forward could reach, that were written since, and that cannot be restored.
        wrote: The tensors that the recompute has written in place, once it is closed.
    """

    __slots__ = (
        "_aside", "_flags", "_hooks", "_now", "_snapshot", "_stack", "_then", "_without_gradients", "written", "wrote",
    )  # fmt: skip

    def __init__(self, snapshot: Snapshot, *, without_gradients: bool = False) -> None:
        self._snapshot = snapshot
        self._without_gradients = without_gradients
        self._stack: ExitStack | None = None
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        self.wrote: list[Tensor] = []
        self.written = _NONE
        # Where tensors are swapped it is not, and they are copied once.
        swaps = snapshot.backups is not None and snapshot.backups.written
        if not swaps and self._is_today():
            return
        with EXCHANGING:
            # Another thread may have shown its recompute other contents until now.
            if self._is_today():
                return
            self._now = snapshot.contents.now()
            self._stack = ExitStack()
            try:
                self._show(self._stack)
            except BaseException:
                self.close()
                raise

    def _is_today(self) -> bool:
        """Read the current world; return whether nothing needs to be swapped, and no thread is about to change it."""
        snapshot = self._snapshot
        self._flags = now = [*map(flags_of, snapshot.watched)]
        self._hooks = copied_hooks(snapshot.watched) if now else None
        self.written = _NONE
        if now != snapshot.flags or snapshot.shards or snapshot.past_versions:
            self.written = snapshot.written_since(now)
        self._now = self._then = then = self._what_was()
        if now != snapshot.flags or snapshot.guarded or self._without_gradients or not then.are_here():
            return False
        return not (_shown and _is_shown_elsewhere(snapshot))

    def _what_was(self) -> WorldState:
        """Return what the forward saw, with the stand-ins that a recompute is shown for some tensors."""
        snapshot = self._snapshot
        if snapshot.backups is None and not snapshot.graphed:
            return snapshot.contents
        return snapshot.contents.with_others(self._shown())

    def _shown(self) -> dict[int, Any]:
        """Return the stand-ins that a recompute is shown, by the ids of the objects they replace."""
        snapshot = self._snapshot
        shown: dict[int, Any] = {}
        if snapshot.backups is not None:
            shown.update(snapshot.backups.shown(self.written))
            for key in shown.keys() & self.written.keys():
                del self.written[key]
        for key, one in snapshot.graphed.items():
            if key in shown:  # a copy exists, and the forward still runs
                shown[id(one)] = shown.pop(key)
                self.written.pop(id(one.alias), None)
                continue
            shown[id(one)] = tensor = one.shown()
            if id(one.alias) in self.written:
                self.written[id(tensor)] = self.written[id(one.alias)]
        return shown

    def _show(self, stack: ExitStack) -> None:
        snapshot = self._snapshot
        stack.enter_context(EXCHANGING)
        changed: set[int] = set()
        stack.enter_context(_showing(changed))
        changed |= self._then.write()
        for tensor, (_, flag), (_, had) in zip(snapshot.watched, snapshot.flags, self._flags, strict=True):
            if flag is not had and tensor.is_leaf:
                tensor.requires_grad_(flag)
        if self._without_gradients:
            self._aside = [(one, one.grad) for one in snapshot.watched if one.is_leaf and one.requires_grad]
            for tensor, _ in self._aside:
                tensor.grad = None
        for own, before in snapshot.guarded:
            stack.callback(own.restore, own.snapshot())
            own.restore(before)

    def close(self) -> None:
        """Put everything back as it was before."""
        with ExitStack() as stack:
            if self._stack is not None:
                stack.push(self._stack.pop_all().__exit__)
            elif self._snapshot.is_inert or not self._has_changed():
                return
            else:
                # Only if the change is not another thread's.
                stack.enter_context(EXCHANGING)
            flags = zip(self._snapshot.watched, map(flags_of, self._snapshot.watched), self._flags, strict=True)
            self.wrote = [one for one, (version, _), (had, _) in flags if version != had]
            for tensor, grad in self._aside:
                stack.callback(setattr, tensor, "grad", grad)
            stack.callback(self._put_back)

    def _has_changed(self) -> bool:
        """Return whether a recompute that was shown no stand-ins has changed anything."""
        tensors = self._snapshot.watched
        return (
            not self._now.are_here()
            or self._hooks is not None
            or [*map(flags_of, tensors)] != self._flags
            or copied_hooks(tensors) is not None
        )

    def _put_back(self) -> None:
        tensors = self._snapshot.watched
        for tensor, (_, had), (_, flag) in zip(tensors, self._flags, map(flags_of, tensors), strict=True):
            if flag is not had and tensor.is_leaf:
                tensor.requires_grad_(had)
        put_hooks_back(tensors, self._hooks)
        self._now.write()


# By thread, the ids of the objects that its exchanges have changed for now.
_shown: dict[int, list[set[int]]] = {}


@contextmanager
def _showing(changed: set[int]) -> Generator[None]:
    mine = _shown.setdefault(get_ident(), [])
    mine.append(changed)
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            del _shown[get_ident()]


def _is_shown_elsewhere(snapshot: Snapshot) -> bool:
    """Return whether another thread shows its recompute stand-ins for objects of a snapshot."""
    others = [changed for thread, each in list(_shown.items()) if thread != get_ident() for changed in each]
    return any(others) and any(not changed.isdisjoint(snapshot.containers) for changed in others)


# Always empty.
_NONE = WrittenTensors()
