"""The contents of all that a world holds at one moment: what is compared, put in the place of others, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, count
from operator import is_not
from typing import Any

from torchremat.state.containers import Dict, Dicts, holds_same, with_others
from torchremat.state.holders import Holder


class WorldState:
    """What many holders hold at one moment.

    Attributes:
        dicts: The contents of dicts, of many in one piece.
        rest: The other holders, each with its contents.
    """

    __slots__ = ("_places", "dicts", "rest")

    def __init__(self, dicts: Sequence[Dicts], rest: list[tuple[Holder, Any]]) -> None:
        self.dicts = dicts
        self.rest = rest
        # By the id of each object that was put in the place of another: the lists of values, and where in them it is.
        self._places: dict[int, list[tuple[int, int]]] | None = None

    @property
    def all_dicts(self) -> list[Dict]:
        """The dicts, one by one."""
        return [own for each in self.dicts for own in each.dicts]

    def are_here(self) -> bool:
        """Return whether the same is held now, the very objects in the same places."""
        return all(own.are_here() for own in self.dicts) and all(one.is_same(before) for one, before in self.rest)

    def is_that_of(self, other: WorldState) -> bool:
        """Return whether another one, of the same holders, has the very same objects, and none that is copied."""
        dicts, pairs = zip(self.dicts, other.dicts, strict=True), zip(self.rest, other.rest, strict=True)
        return not any(any(map(is_not, now.values, before.values)) for now, before in dicts) and all(
            isinstance(now, list | dict) and holds_same(now, before) for (_, now), (_, before) in pairs
        )

    def now(self) -> WorldState:
        """Return what the same holders hold now."""
        return WorldState([own.now() for own in self.dicts], [(one, one.read()) for one, _ in self.rest])

    def write(self) -> set[int]:
        """Let the holders hold it again; return the ids of the objects that had changed."""
        changed: set[int] = set()
        changed.update(*(own.write() for own in self.dicts))
        for one, before in self.rest:
            if not one.is_same(before):
                one.write(before)
                changed.add(id(one.item))
        return changed

    def with_others(self, others: Mapping[int, object]) -> WorldState:
        """Return the same with some objects replaced, by id."""
        if not others:
            return self
        if self._places is not None and others.keys() <= self._places.keys():
            return self._with_stand_ins(self._places, others)
        rest = [(one, with_others(before, others)) for one, before in self.rest]
        found = WorldState([own.with_others(others) for own in self.dicts], rest)
        if all(now is before for (_, now), (_, before) in zip(rest, self.rest, strict=True)):
            found._places = _places_in(self.dicts, found.dicts)
        return found

    def _with_stand_ins(
        self, places: Mapping[int, Sequence[tuple[int, int]]], others: Mapping[int, object]
    ) -> WorldState:
        """Return the same with some of the objects replaced that were themselves put in the place of others."""
        values = [[*own.values] for own in self.dicts]
        for key, one in others.items():
            for piece, place in places[key]:
                values[piece][place] = one
        return WorldState([own.with_values(now) for own, now in zip(self.dicts, values, strict=True)], self.rest)


def _places_in(dicts: Sequence[Dicts], now: Sequence[Dicts]) -> dict[int, list[tuple[int, int]]] | None:
    """Return the places of the objects that were replaced in dicts, None if some of them are in tuples."""
    found: dict[int, list[tuple[int, int]]] = {}
    for piece, (own, new) in enumerate(zip(dicts, now, strict=True)):
        for place in compress(count(), map(is_not, own.values, new.values)):
            one = new.values[place]
            if type(one) is tuple:
                return None
            found.setdefault(id(one), []).append((piece, place))
    return found
