"""State that comes in ahead of its part of the step, and goes out after it.

The parts of a step come in the same order in each step: that of backward, or that of the optimizer's groups. For the
parts a, b, c:

    a steps    take a │ step │ put a            │ begin b
    b steps    take b │ step │ put b │ a is out │ begin c
    c steps    take c │ step │ put c │ b is out

A store may read a tensor, and fill the memory for one, in threads of its own. What it reads is held here until it is
out, and what it fills is allocated here; so bytes come and go at fixed places of the program, and at most two parts'
state is in memory, however fast the store is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.optimizing.entries import StateEntries
from torchremat.stores.base import land, settle
from torchremat.tensors.handles import Handle, Store

State = Mapping[Any, Any]


class StateMover:
    """Moves the state of an optimizer to a store and back.

    Args:
        min_bytes: Smaller tensors stay in memory.
    """

    def __init__(self, store: Store, min_bytes: int) -> None:
        self.store = store
        self.min_bytes = min_bytes
        self._leaving: list[tuple[Handle, Tensor]] = []
        self._parts: list[tuple[int, list[ReferenceType[StateEntries]]]] = []  # of the open step, in their order
        self._next: dict[int, list[ReferenceType[StateEntries]]] = {}  # by the first parameter of the part before

    def begin(self, state: State) -> None:
        """Put away what was read between two steps, or is new: all that is in memory."""
        for parameter in list(state):
            self.put_away(state, [parameter])

    @property
    def knows_order(self) -> bool:
        """Whether it knows what to bring ahead, from a step before."""
        return bool(self._next)

    def put_away(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Put the state of some parameters into the store, and wait until it is out."""
        self._leave(state, parameters)
        self._settle()

    def take(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Bring the state of some parameters back.

        Raises:
            StoreError: It cannot be brought back.
        """
        for one in parameters:
            entries = state.get(one)
            if isinstance(entries, StateEntries):
                entries.bring_back()

    def give(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Put the state of some parameters, which have stepped, into the store, and begin to bring the next.

        Raises:
            StoreError: The store is strict and has no room, or its medium failed. What it has not taken is in memory.
        """
        before, self._leaving = self._leaving, []
        entries = self._leave(state, parameters)
        for handle, _ in before:
            settle(handle)
        del before
        first = id(parameters[0])
        self._parts.append((first, entries))
        for one in self._next.get(first, ()):
            following = one()
            for handle in () if following is None else following.handles:
                handle.prefetch()

    def end(self) -> None:
        """Wait until all is out, and learn the order of the parts."""
        self._settle()
        parts, self._parts = self._parts, []
        self._next = {first: entries for (first, _), (_, entries) in pairwise(parts)}

    def give_back(self, state: State) -> None:
        """Bring all state back, into plain dicts."""
        self._settle()
        for parameter, entries in list(state.items()):
            if isinstance(entries, StateEntries):
                cast("dict[Any, Any]", state)[parameter] = entries.copy()

    def _leave(self, state: State, parameters: Sequence[Tensor]) -> list[ReferenceType[StateEntries]]:
        found: list[ReferenceType[StateEntries]] = []
        for one in parameters:
            entries = state.get(one)
            if type(entries) is dict:
                entries = StateEntries(cast("dict[object, object]", entries))
                cast("dict[Any, Any]", state)[one] = entries
            if isinstance(entries, StateEntries):
                found.append(ref(entries))
                self._leaving += entries.put_away(self.store, self.min_bytes)
        return found

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, []
        for handle, _ in leaving:
            settle(handle)
        if leaving:
            land(self.store, all_of_it=True)
