"""How a private name of torch is bound, and an attribute of code that is not ours replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import ref

import torch

from torchremat.errors import VersionError

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
"""The release of torch that is installed: `(2, 13)`."""
NEWEST = (2, 14)
"""The newest release of torch that all tests have been run with."""

# The request to users of another torch; docs/supported-versions.md says the same.
SUPPORTED = "torchremat supports torch 2.11 to 2.14; install one of these."


def private(*paths: str, needed_for: str, since: tuple[int, int] | None = None) -> Any:
    """Return the object at the first of `paths` below `torch` that exists; the caller declares its type.

    Args:
        paths: Attribute paths without the leading `torch.`, for example `"_C._current_graph_task_id"`. A name that
            differs between torch versions has several paths, the newest first.
        needed_for: The feature that fails without it, in a user's words.
        since: A release that has it, if not all supported releases do.

    Raises:
        VersionError: This torch has none of these names.
    """
    for path in paths:
        found: Any = torch
        for name in path.split("."):
            if not hasattr(found, name):
                break
            found = getattr(found, name)
        else:
            return found
    advice = SUPPORTED
    if since is not None and since > RELEASE:
        advice = f"Torch {since[0]}.{since[1]} has it; install that, or a newer one."
    raise VersionError(f"torch {torch.__version__} has no `torch.{paths[0]}`, which {needed_for} needs. {advice}")


def subclasses_of(kind: type) -> Iterator[type]:
    """Yield a class and all that are derived from it."""
    yield kind
    for one in kind.__subclasses__():
        yield from subclasses_of(one)


_ABSENT = object()


class Patch:
    """An attribute of an object that has another value until `undo`. The patch keeps the object only weakly.

    Args:
        owner: A module, a class or any other object with attributes of its own.
        name: The attribute.
        value: Its value until then.
        undone: Is called by `undo`.
    """

    def __init__(self, owner: object, name: str, value: object, undone: Callable[[], None] | None = None) -> None:
        self._owner = ref(owner)
        self._name = name
        self._value = value
        self._undone = undone
        self._had = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

    def problem(self) -> str | None:
        """Return why undoing it would lose the value of other code, None if it would not."""
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is self._value:
            return None
        return f"`{self._name}` of the {type(owner).__name__} was replaced since"

    def undo(self) -> None:
        """Give the object what it had: an attribute of its own, or none."""
        owner = self._owner()
        if owner is None:
            return
        if self._had is not _ABSENT:
            setattr(owner, self._name, self._had)
        elif self._name in vars(owner):
            delattr(owner, self._name)
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


@contextmanager
def overridden(owners: Iterable[object], /, **values: object) -> Generator[None]:
    """Give modules, classes or other objects some attributes of their own in a block, and what they had after it."""
    with ExitStack() as stack:
        for owner in owners:
            for name, value in values.items():
                stack.callback(Patch(owner, name, value).undo)
        yield
