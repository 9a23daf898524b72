"""One attribute of one object, replaced until it is undone, and what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from weakref import ref

from torchremat.errors import UnsupportedError

_NOTHING = object()


class Patch:
    """A replaced attribute of an instance. The owner keeps the patch's value; the patch keeps the owner only weakly.

    Args:
        value: Its value until `undo`.
        undone: Is called by `undo`.
    """

    def __init__(self, owner: object, name: str, value: object, undone: Callable[[], None] | None = None) -> None:
        self._owner = ref(owner)
        self._name = name
        self._value = value
        self._undone = undone
        self._had = vars(owner).get(name, _NOTHING)
        setattr(owner, name, value)

    def problem(self) -> str | None:
        """Return why it cannot be undone, None if it can."""
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is self._value:
            return None
        return f"`{self._name}` of the {type(owner).__name__} was replaced since"

    def undo(self) -> None:
        """Restore the owner's earlier state: an attribute of its own or none."""
        owner = self._owner()
        if owner is None:
            return
        if self._had is _NOTHING:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, self._had)
        if self._undone is not None:
            self._undone()


class Original:
    """A method of an instance as it is now, for the code that replaces it; it keeps the instance only weakly."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner = ref(owner)
        self._name = name
        self._own = cast("Callable[..., object] | None", vars(owner).get(name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        owner = self._owner()
        call = self._own or cast("Callable[..., object]", getattr(type(owner), self._name).__get__(owner))
        return call(*args, **kwargs)


def undo_all(patches: list[Patch]) -> None:
    """Undo patches, the last one first.

    Raises:
        UnsupportedError: Other code has replaced an attribute since; nothing is undone then.
    """
    problems = [problem for patch in patches if (problem := patch.problem()) is not None]
    if problems:
        raise UnsupportedError(f"cannot detach: {'; '.join(problems)}. Undo that first.")
    while patches:
        patches.pop().undo()
