"""The source and target stage of each skip, as data."""

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
        """Yield the skips that are copied to a stage, in order: source stage and key."""
        found = [(source, key) for key, (source, target) in self.routes.items() if source != target == stage]
        yield from sorted(found, key=lambda one: (one[0], order_of(one[1])))

    def copies_from(self, stage: int) -> Iterator[tuple[int, Key]]:
        """Yield the skips that are copied from a stage, in order: target stage and key."""
        found = [(target, key) for key, (source, target) in self.routes.items() if stage == source != target]
        yield from sorted(found, key=lambda one: (one[0], order_of(one[1])))

    def requires_copy(self, namespace: Namespace | None, name: str) -> bool:
        """Return whether a skip goes to another stage; False if it is unknown."""
        source, target = self.routes.get((namespace, name), (0, 0))
        return source != target
