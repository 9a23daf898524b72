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
from torchremat.errors import MutationError
from torchremat.regions.decisions import SAVE, Decision, Policy
from torchremat.regions.draws import move
from torchremat.regions.traits import Traits
from torchremat.stores.held import InCatalog
from torchremat.stores.weak import Counter
from torchremat.tensors.copies import apart

Operator = Callable[..., object]


class Watched:
    """What is kept of some memory, and has to know whether that was written.

    Attributes:
        others: What counts the writes to aliases of the memory that count apart. See NOTE [ Selective recompute ], 4
    """

    __slots__ = ("others",)

    def __init__(self, others: list[Counter] | None = None) -> None:
        self.others = others

    def watch(self, counter: Counter) -> None:
        """Look at one more alias."""
        self.others = [counter] if self.others is None else [*self.others, counter]

    @property
    def has_moved(self) -> bool:
        """Whether any of the aliases was written."""
        return self.others is not None and any(one.has_moved for one in self.others)


class Value(Watched):
    """A tensor that is kept as an alias, at a version: an operator's output, or what a slot has."""

    __slots__ = ("is_plain", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.others = None
        self.tensor = tensor
        self.version = tensor._version
        self.is_plain = type(tensor) is Tensor and tensor.layout is torch.strided

    def get(self) -> Tensor | None:
        """Return the tensor, None if it was written in place since."""
        if self.tensor._version != self.version or (self.others is not None and self.has_moved):
            return None
        return self.tensor

    def alias(self) -> Tensor | None:
        """Return an alias of the tensor for a recompute, None if it was written in place since."""
        if self.tensor._version != self.version or (self.others is not None and self.has_moved):
            return None
        if self.is_plain:
            return self.tensor.detach()
        # Its memory is not known, so nobody copies it before the recompute writes to a view of it.
        return alias_that_counts(self.tensor)

    def copy_for_write(self) -> None:
        """Keep a copy instead, since the memory is about to be written."""
        self.tensor = apart(self.tensor)
        self.version = self.tensor._version
        self.others = None


class Stored(Watched):
    """A tensor that waits in a store.

    Attributes:
        packed: What the catalog has of it.
        decision: That to put it there. While it lives, the store has this one catalog.
    """

    __slots__ = ("decision", "packed")

    def __init__(self, packed: InCatalog, decision: Decision, others: list[Counter] | None = None) -> None:
        super().__init__(others)
        self.packed = packed
        self.decision = decision

    def get(self) -> Tensor | None:
        """Return the tensor, None if it was written in place since and the store has not had it before."""
        if self.has_moved:
            return None
        try:
            return self.packed.get()
        except MutationError:
            return None


class Offloaded:
    """What is kept in stores of some memory.

    Attributes:
        decisions: Those to put it there; the last one is for what autograd saves of it.
        outputs: What operators have returned of it.
        others: See `Watched`.
    """

    __slots__ = ("decisions", "others", "outputs")

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.outputs: list[Stored] = []
        self.others: list[Counter] = []


class Kept:
    """The outputs of one operator.

    Attributes:
        values: In the place of each tensor a `Value` or `Stored`; the structure is the operator's.
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
        if type(values) is Value:
            output: object = values.alias()
        else:
            try:
                output = _mapped(values, partial(_again, selection))
            except _GoneError:
                output = None
        if output is None:
            return None
        if self.draws is not None:
            move(*self.draws)  # See NOTE [ Selective recompute ], 6
        return output


class _GoneError(Exception):
    """A kept tensor was written in place."""


def _again(selection: Selection, value: object) -> object:
    if not isinstance(value, Value | Stored):
        return value
    tensor = value.alias() if isinstance(value, Value) else value.get()
    if tensor is None:
        raise _GoneError
    if isinstance(value, Stored):
        selection.hands_out(tensor, value.decision)
        tensor = tensor.detach()
    return tensor


def _mapped(value: object, function: Callable[[object], object]) -> object:
    if type(value) is tuple:
        return tuple([_mapped(one, function) for one in cast("tuple[object, ...]", value)])
    if type(value) is list:
        return [_mapped(one, function) for one in cast("list[object]", value)]
    return function(value)


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
        self.operators: list[Traits] = []
        self.kept: dict[int, Kept] = {}
        self.inner: list[ReferenceType[Selection]] = []
        self.end = 0
        self.is_cut = False
        self.looks_on = True
        # What is kept as aliases, by its memory; None after the forward, until something is written.
        self._memories: dict[UntypedStorage, list[Value]] | None = {}
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
            values = _mapped(output, partial(self._value, decision))
        kept = self.kept[index] = Kept(values)
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
                kept = Stored(stored, decision)
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

    def _saved(self, tensor: Tensor) -> Value:
        value = Value(alias_that_counts(tensor))
        memory = memory_of(tensor)
        if memory is not None:
            self._known_memories().setdefault(memory, []).append(value)
        return value

    def _known_memories(self) -> dict[UntypedStorage, list[Value]]:
        if self._memories is None:
            self._memories = {}
            for kept in self.kept.values():
                _mapped(kept.values, self._know)
        return self._memories

    def _know(self, value: object) -> None:
        memory = memory_of(value.tensor) if isinstance(value, Value) else None
        if memory is not None:
            assert self._memories is not None
            self._memories.setdefault(memory, []).append(cast("Value", value))

    def has(self, memory: UntypedStorage) -> bool:
        """Return whether some memory is kept."""
        return memory in self._known_memories() or (self._offloaded is not None and memory in self._offloaded)

    def value_of(self, tensor: Tensor) -> Value | Stored | None:
        """Return what the slot of a tensor that autograd saves may have, if its memory is kept; else None."""
        memory = memory_of(tensor)
        if memory is None:
            return None
        if memory in self._known_memories():
            return Value(tensor.detach())
        found = None if self._offloaded is None else self._offloaded.get(memory)
        if found is None:
            return None
        # Its own writes may count apart from those that the store knows of.
        others = [Counter(tensor), *found.others] if found.others else None
        decision = found.decisions[-1]
        assert decision.catalog is not None
        return Stored(decision.catalog.put(tensor), decision, others)

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
            _mapped(kept.values, self._release)

    def _release(self, value: object) -> None:
        memory = memory_of(value.tensor) if isinstance(value, Value) else None
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


def has_tensors(output: object) -> bool:
    """Return whether there are tensors in what an operator has returned."""
    if isinstance(output, tuple | list):
        return any(map(has_tensors, cast("list[object]", output)))
    return isinstance(output, Tensor)


def tensors_in(output: object) -> list[Tensor]:
    """Return the tensors that an operator has returned, or was given as one argument."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, list | tuple):
        return [one for one in cast("list[object]", output) if isinstance(one, Tensor)]
    return []


def memory_of(tensor: Tensor) -> UntypedStorage | None:
    """Return the memory of a tensor; None if it is of a kind that has none to show."""
    if tensor._is_zerotensor():  # the tangents of forward mode that are zero: a storage with a size and no memory
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


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
