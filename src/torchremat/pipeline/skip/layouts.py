"""Which skip goes from which stage to which, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchremat.pipeline.skip.namespaces import Key, Namespace, order_of


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
        """Yield what is copied to a stage, in order: the stage it comes from, and its key."""
        found = [(source, key) for key, (source, target) in self.routes.items() if source != target == stage]
        yield from sorted(found, key=lambda one: (one[0], order_of(one[1])))

    def copies_from(self, stage: int) -> Iterator[tuple[int, Key]]:
        """Yield what is copied from a stage, in order: the stage it goes to, and its key."""
        found = [(target, key) for key, (source, target) in self.routes.items() if stage == source != target]
        yield from sorted(found, key=lambda one: (one[0], order_of(one[1])))

    def requires_copy(self, namespace: Namespace | None, name: str) -> bool:
        """Return whether a skip goes to another stage; not if it is unknown."""
        source, target = self.routes.get((namespace, name), (0, 0))
        return source != target
