"""What one call of a region keeps of its operators' outputs, by a policy.

NOTE [ Selective recompute ]

1. In the forward a policy is asked for the output of each operator. What it wants kept is kept as an alias with its
   version, or in a store.
2. A recompute runs the same operators in the same order. For those whose output is kept it gets a new alias of that,
   and the operator does not run. If the order is another one, that is an error: the wrong output would be worse.
3. A tensor that autograd saves, and whose memory is kept anyway, is not recomputed for autograd: its slot has it. A
   recompute ends at the last save whose slot has nothing, and a region whose slots have all does not run again at all.
   Operators after that end are not reached by any recompute, so what was kept of them goes with the forward, unless
   its slot has it.
4. What is kept and about to be written in place, by the region itself or by a recompute that was given it, is copied
   first, or its store is told (see NOTE [ Who may write to what was put ]). What was written later, by somebody else,
   is known by its version: the operator runs again. An operator may return the memory of an argument and not say so,
   as `unsafe_chunk` does: that is a view, and never kept, and since writes to it count apart, its version is looked at
   too.
5. A recompute for a graph that is not retained takes what it gets: nobody comes a second time. Nor does anybody after
   the only pass of a session, or after its input pass, which also drops what slots have and no weight pass needs. If
   somebody does come, for another part of the graph, the operator runs again.
6. A kept operator that draws random numbers leaves the generator as it would have left it, for the draws after it in
   the same recompute. Afterwards the generator is where it was, even if nobody else looks after it.
7. An operator in a nested region belongs to the innermost region alone, as a saved tensor does. A region without a
   policy has that of the region around it. A recompute of the outer region meets the inner one again, as a new region,
   which takes over what the first one has kept.
8. An operator that is seen takes several times as long as one of few elements does. So where a policy says that it has
   been asked about all that it may keep, and about all that writes in place as well, nobody looks any more: from the
   next save on the mode is off, in the forward and in the recompute, and what runs then is as in a region without a
   policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.modes import alias_that_counts, counting_versions
from torchremat.ambient.generators import get_generator
from torchremat.regions.decisions import SAVE, Decision, Policy
from torchremat.regions.selective.draws import move
from torchremat.regions.selective.kept import (
    KeptValue,
    Offloaded,
    StoredOutput,
    has_tensors,
    mapped,
    memory_of,
    tensors_in,
)
from torchremat.regions.selective.op_info import OpInfo
from torchremat.stores.weak import Counter

Operator = Callable[..., object]


def _again(selection: Selection, value: object) -> object:
    if not isinstance(value, KeptValue | StoredOutput):
        return value
    tensor = value.alias() if isinstance(value, KeptValue) else value.get()
    if tensor is None:
        raise _GoneError
    if isinstance(value, StoredOutput):
        selection.hands_out(tensor, value.decision)
        tensor = tensor.detach()
    return tensor


class Selection:
    """What one call keeps.

    Attributes:
        policy: Chooses; None if there is none, and only regions inside have one.
        operators: The traits of those that ran, in order.
        kept: The outputs that are kept for recomputes, by number of the operator.
        inner: What regions inside keep, in the order in which they ran.
        end: How many operators had run at the last save whose slot has nothing.
        is_cut: Whether more operators ran than are in `operators`: the policy was not asked about them.
        looks_on: Whether these are watched all the same, since they may write to what is kept.
    """

    __slots__ = (
        "__weakref__",
        "_memories",
        "_offloaded",
        "end",
        "inner",
        "is_cut",
        "kept",
        "looks_on",
        "operators",
        "policy",
    )

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.operators: list[OpInfo] = []
        self.kept: dict[int, KeptOutputs] = {}
        self.inner: list[ReferenceType[Selection]] = []
        self.end = 0
        self.is_cut = False
        self.looks_on = True
        # What is kept as aliases, by its memory; None after the forward, until something is written.
        self._memories: dict[UntypedStorage, list[KeptValue]] | None = {}
        # What is in a store, by the memory that it was in, and in a recompute by that which it is in; mostly nothing.
        self._offloaded: WeakKeyDictionary[UntypedStorage, Offloaded] | None = None

    # --------------------------------------------------------------------------------------------------- forward

    def keep(
        self, index: int, output: object, decision: Decision, draws: torch.Generator | torch.device | None
    ) -> None:
        """Keep the output of the operator that ran as number `index`, as decided.

        Args:
            index: The number.
            output: What it returned.
            decision: To save it, or to store it.
            draws: The generator that it drew with.
        """
        if type(output) is Tensor and decision is SAVE:
            values: object = self._saved(output)
        else:
            if not has_tensors(output):
                return  # a number, read from a tensor: reading it again is exact
            values = mapped(output, partial(self._value, decision))
        kept = self.kept[index] = KeptOutputs(values)
        if draws is not None:
            kept.draws = draws, get_generator(draws)

    def keep_memory(self, tensor: Tensor, decision: Decision) -> None:
        """Let slots have what shares the memory of `tensor`, as decided."""
        memory = memory_of(tensor)
        if memory is None:
            return
        if decision.catalog is not None:
            self._offloaded_in(memory, decision)
        else:
            self._known_memories().setdefault(memory, [])

    def _value(self, decision: Decision, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if decision.catalog is not None:
            with counting_versions():
                stored = decision.catalog.put_complete(value)
            if stored is not None:
                kept = StoredOutput(stored, decision)
                memory = memory_of(value)
                if memory is not None:
                    self._offloaded_in(memory, decision).outputs.append(kept)
                return kept
        return self._saved(value)

    def hands_out(self, tensor: Tensor, decision: Decision) -> None:
        """Note that a recompute is given what a store has, and may write to it."""
        memory = memory_of(tensor)
        if memory is not None:
            self._offloaded_in(memory, decision)

    def _offloaded_in(self, memory: UntypedStorage, decision: Decision) -> Offloaded:
        if self._offloaded is None:
            self._offloaded = WeakKeyDictionary()
        found = self._offloaded.get(memory)
        if found is None:
            found = self._offloaded[memory] = Offloaded()
        if not found.decisions or found.decisions[-1] is not decision:
            found.decisions = [one for one in found.decisions if one is not decision] + [decision]
        return found

    def _saved(self, tensor: Tensor) -> KeptValue:
        value = KeptValue(alias_that_counts(tensor))
        memory = memory_of(tensor)
        if memory is not None:
            self._known_memories().setdefault(memory, []).append(value)
        return value

    def _known_memories(self) -> dict[UntypedStorage, list[KeptValue]]:
        if self._memories is None:
            self._memories = {}
            for kept in self.kept.values():
                mapped(kept.values, self._know)
        return self._memories

    def _know(self, value: object) -> None:
        memory = memory_of(value.tensor) if isinstance(value, KeptValue) else None
        if memory is not None:
            assert self._memories is not None
            self._memories.setdefault(memory, []).append(cast("KeptValue", value))

    def has(self, memory: UntypedStorage) -> bool:
        """Return whether some memory is kept."""
        return memory in self._known_memories() or (self._offloaded is not None and memory in self._offloaded)

    def value_of(self, tensor: Tensor) -> KeptValue | StoredOutput | None:
        """Return what the slot of a tensor that autograd saves may have, if its memory is kept; else None."""
        memory = memory_of(tensor)
        if memory is None:
            return None
        if memory in self._known_memories():
            return KeptValue(tensor.detach())
        found = None if self._offloaded is None else self._offloaded.get(memory)
        if found is None:
            return None
        # Its own writes may count apart from those that the store knows of.
        others = [Counter(tensor), *found.others] if found.others else None
        decision = found.decisions[-1]
        assert decision.catalog is not None
        return StoredOutput(decision.catalog.put(tensor), decision, others)

    def watch(self, output: object) -> None:
        """Look at what an operator has returned: memory that is kept, though it says that it returns none of others."""
        if not self._memories and self._offloaded is None:
            return
        for tensor in tensors_in(output):
            memory = memory_of(tensor)
            if memory is None:
                continue
            values = self._memories.get(memory, ()) if self._memories else ()
            offloaded = None if self._offloaded is None else self._offloaded.get(memory)
            if not values and offloaded is None:
                continue
            with counting_versions():
                counter = Counter(tensor)
            for value in values:
                value.watch(counter)
            if offloaded is not None:
                offloaded.others.append(counter)
                for stored in offloaded.outputs:
                    stored.watch(counter)

    def protect(self, written: list[Tensor]) -> None:
        """Copy what is kept of the memory that is about to be written, or have its store do so."""
        for tensor in written:
            memory = memory_of(tensor)
            if memory is None:
                continue
            memories = self._known_memories()
            for value in memories.pop(memory, ()):
                if value.get() is not None:
                    value.copy_for_write()
                    memories[value.tensor.untyped_storage()] = [value]
            offloaded = None if self._offloaded is None else self._offloaded.pop(memory, None)
            if offloaded is not None:
                for stored in offloaded.outputs:
                    if not stored.has_moved:
                        stored.others = None  # what it has is about to be its own
                for decision in offloaded.decisions:
                    assert decision.catalog is not None
                    decision.catalog.before_write(memory)

    def settle(self, *, everything: bool) -> None:
        """Drop what no recompute gets to; `everything` if one may run to the end."""
        self._offloaded = None
        if not everything:
            for index in [one for one in self.kept if one >= self.end]:
                del self.kept[index]
        self._memories = None

    # -------------------------------------------------------------------------------------------------- recompute

    def drop(self, index: int) -> None:
        """Drop what is kept of an operator, if anything is."""
        kept = self.kept.pop(index, None)
        if kept is not None and self._memories is not None:
            mapped(kept.values, self._release)

    def _release(self, value: object) -> None:
        memory = memory_of(value.tensor) if isinstance(value, KeptValue) else None
        if self._memories is None or memory is None or memory not in self._memories:
            return
        others = [one for one in self._memories[memory] if one is not value]
        if others:
            self._memories[memory] = others
        else:
            self._memories.pop(memory, None)

    def difference(self, index: int, operator: Operator) -> str:
        """Return the words for an operator that is not the one which ran there in the forward."""
        then = self.operators[index].operator if index < len(self.operators) else "none any more"
        return f"operator {index} of the recompute is {operator}, and in the forward it was {then}"


def written_by(
    writes: tuple[tuple[int, str], ...], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[Tensor]:
    """Return the tensors that an operator writes, by the places and names of its arguments."""
    found: list[Tensor] = []
    for place, name in writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in cast("list[object]", value) if isinstance(one, Tensor)]
    return found


class KeptOutputs:
    """The outputs of one operator.

    Attributes:
        values: In the place of each tensor a `KeptValue` or `StoredOutput`; the structure is the operator's.
        draws: With what generator the operator drew, and how it left it.
    """

    __slots__ = ("draws", "values")

    def __init__(self, values: object) -> None:
        self.values = values
        self.draws: tuple[torch.Generator | torch.device, Tensor] | None = None

    def again(self, selection: Selection) -> object | None:
        """Return the outputs for a recompute, None if they cannot be had any more.

        Args:
            selection: Whose they are; it is told what is handed out of a store.
        """
        values = self.values
        if type(values) is KeptValue:
            output: object = values.alias()
        else:
            try:
                output = mapped(values, partial(_again, selection))
            except _GoneError:
                output = None
        if output is None:
            return None
        if self.draws is not None:
            move(*self.draws)  # See NOTE [ Selective recompute ], 6
        return output


class _GoneError(Exception):
    """A kept tensor was written in place."""
