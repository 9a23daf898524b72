"""Namespaces for the names of skips, and the source and target stage of each skip, as data."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class SkipLayout:
    """The routes of the skips between stages.

    Attributes:
        stages: The number of stages.
        routes: The stage that stashes and the stage that pops, by namespace and name of the skip.
    """

    stages: int
    routes: Mapping[Key, tuple[int, int]]

    def copies_to(self, stage: int) -> Iterator[tuple[int, Key]]:
        """Yield the skips that are copied to a stage, in order: source stage and key."""
        found = [(source, key) for key, (source, target) in self.routes.items() if source != target == stage]
        yield from sorted(found, key=lambda one: (one[0], order_of(one[1])))
