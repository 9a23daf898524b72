"""Namespaces for the names of skips, so that a module can occur several times in a model."""

from __future__ import annotations

import uuid
from functools import total_ordering


@total_ordering
class Namespace:
    """A namespace for names: skips of the same name in two namespaces are independent.

    Copies, also unpickled ones, are equal. `None` is the namespace of names without one, and comes first.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Namespace) else NotImplemented

    def __lt__(self, other: object) -> bool:
        if other is None:
            return False
        return self.id < other.id if isinstance(other, Namespace) else NotImplemented


# The key of a skip: the namespace, and the name in it.
Key = tuple[Namespace | None, str]


def order_of(key: Key) -> tuple[bool, str, str]:
    """Return the sort key of a key: the namespace, None first, then the name."""
    namespace, name = key
    return namespace is not None, "" if namespace is None else namespace.id.hex, name


def words_of(names: set[str] | frozenset[str]) -> str:
    """Return names for a message."""
    return ", ".join(repr(name) for name in sorted(names))
