"""The contents of dicts: attributes, tables of modules and dicts themselves, by far the most of what a call can reach.

One comparison covers all of them. Everything else is a `Holder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from itertools import accumulate, chain, compress, count, filterfalse
from operator import is_not
from typing import Any

from torchremat.state.containers import (
    Dict,
    is_same,
    keys_of,
    refill_dict,
    size_of,
    values_of,
)
from torchremat.state.watching import only_looks_on


class Dicts:
    """The current contents of some dicts, in one piece.

    Unchanged dicts cost one comparison, however many they are.

    Attributes:
        values: All of their values, one dict after the other.
    """

    __slots__ = ("_dicts", "_empty", "_keys", "_keys_of", "_sizes", "_values_of", "values")

    def __init__(self, dicts: list[Dict]) -> None:
        # Most tables of modules, hooks above all, are empty, which is the cheapest property to check. It is asked
        # through the method of `dict`: a subclass may create entries when it is asked.
        self._empty = [*filterfalse(size_of, dicts)]
        self._dicts = dicts = [*filter(size_of, dicts)]
        self._sizes = [*map(size_of, dicts)]
        # C functions, as this runs for each call of each region; for subclasses that keep an order the functions are
        # ours.
        is_plain = _PLAIN.issuperset(map(type, dicts))
        self._keys_of: Callable[[Dict], Iterable[Any]] = dict.__iter__ if is_plain else keys_of
        self._values_of: Callable[[Dict], Iterable[Any]] = dict.values if is_plain else values_of
        self._keys: list[Any] = [*chain.from_iterable(map(self._keys_of, dicts))]
        self.values: list[Any] = [*chain.from_iterable(map(self._values_of, dicts))]

    def with_values(self, values: list[Any]) -> Dicts:
        """Return the same dicts with other values in place of these."""
        new = copy(self)
        new.values = values
        return new

    def are_here(self) -> bool:
        """Return whether the dicts hold the very same objects now."""
        return (
            not any(map(size_of, self._empty))
            and [*map(size_of, self._dicts)] == self._sizes
            and not any(map(is_not, chain.from_iterable(map(self._values_of, self._dicts)), self.values))
            and self._has_keys()
        )

    def _has_keys(self) -> bool:
        try:
            # A list compares by identity first, and only where that differs by equality, as a dict does.
            return [*chain.from_iterable(map(self._keys_of, self._dicts))] == self._keys
        except Exception:  # noqa: BLE001 - of keys that compare their values, as tensors do
            return False

    def write(self) -> set[int]:
        """Restore the contents of the dicts; return the ids of the dicts that had changed."""
        dicts = self._dicts
        written = {id(own) for own in self._empty if size_of(own) and _write_dict(own, {})}
        starts = [0, *accumulate(self._sizes)]
        if [*map(size_of, dicts)] == self._sizes and self._has_keys():
            changed = [
                *compress(count(), map(is_not, chain.from_iterable(map(self._values_of, self._dicts)), self.values))
            ]
            place = 0
            for index in changed:
                while starts[place + 1] <= index:
                    place += 1
                own, key, value = dicts[place], self._keys[index], self.values[index]
                if not (only_looks_on(value) or only_looks_on(dict.__getitem__(own, key))):
                    dict.__setitem__(own, key, value)
                    written.add(id(own))
            return written
        for own, start, size in zip(dicts, starts, self._sizes, strict=False):
            end = start + size
            if _write_dict(own, dict(zip(self._keys[start:end], self.values[start:end], strict=True))):
                written.add(id(own))
        return written


_PLAIN = frozenset({dict})


def _write_dict(own: Dict, before: Dict) -> bool:
    """Restore the contents of a dict, except for observers; return whether it had changed."""
    if is_same(own, before):
        return False
    lookers = {key: value for key, value in dict.items(own) if only_looks_on(value)}
    refill_dict(own, {**{key: value for key, value in before.items() if not only_looks_on(value)}, **lookers})
    return True
