"""The operator outputs that one call of a region keeps, by a policy.

NOTE [ Selective recompute ]

1. In the forward a policy is asked about the output of each operator. An output that it wants kept is kept as an alias
   with its version, or in a store.
2. A recompute runs the same operators in the same order. For an operator whose output is kept it gets a new alias of
   the output, and the operator does not run. Another order is an error: the wrong output would be worse.
3. A tensor that autograd saves, and whose memory is kept anyway, is not recomputed for autograd: its slot holds it. A
   recompute ends at the last save with an empty slot, and a region without empty slots does not run again at all. No
   recompute reaches operators after that end, so their kept outputs are dropped at the end of the forward, unless a
   slot holds them.
4. A kept output that is about to be written in place, by the region itself or by a recompute that was given it, is
   copied first, or its store is told (see NOTE [ Who may write to what was put ]). A later write by other code shows in
   the version: the operator runs again. An operator may return the memory of an argument without declaring it, like
   `unsafe_chunk`: the result is a view, and never kept, and since writes to it have their own version counter, its
   version is checked too.
5. A recompute for a graph that is not retained removes the kept outputs that it gets: no second recompute follows. Nor
   does one follow after the only pass of a session, or after its input pass, which also drops the contents of slots
   that no weight pass needs. If a recompute does follow, for another part of the graph, the operator runs again.
6. A kept operator that draws random numbers leaves the generator in the state that a run of it would leave, for the
   draws after it in the same recompute. Afterwards the generator has its earlier state, even if nothing else restores
   it.
7. An operator in a nested region belongs only to the innermost region, like a saved tensor. A region without a policy
   uses the policy of the region around it. A recompute of the outer region meets the inner one again, as a new region,
   which takes over the kept outputs of the first one.
8. What other processes have sent is kept as NOTE [ What other processes have sent ] says. No process exchanges it again
   alone: a write by other code (4) is an error, and a recompute after one that has removed outputs (5) runs all
   exchanges again.
9. Dispatching an operator through the mode takes several times as long as an operator on few elements. So where a
   policy says which operators it must be asked about, every in-place write among them, the mode is on only around
   these, in the forward as in the recompute; all others run as in a region without a policy. The mode is switched in
   the hook that packs a saved tensor, the only code of ours that runs there, in the middle of an operator. What the
   operator's kernel then calls is seen as well, and is no operator of the region: so nothing is looked at before
   another operator has saved something, by when the kernel is done. A write that is not seen moves a version (4).

       operators    0 mm      1 gelu      2 mm          3 gelu
       saves        s0 s1     s2          s3 s4         s5           2 is kept: on at s2, seen from s3, off at s5
       the mode               ███████████████████████
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, cast
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.modes import Operation, alias_that_counts, counting_versions
from torchremat.ambient.generators import get_generator
from torchremat.regions.decisions import SAVE, AskedPolicy, Decision
from torchremat.regions.selective.kept import (
    KeptValue,
    Offloaded,
    StoredOutput,
    are_apart,
    has_tensors,
    mapped,
    memory_of,
    tensors_in,
)
from torchremat.regions.selective.op_info import OpInfo
from torchremat.stores.weak_bytes import Counter
from torchremat.tensors.parts import is_wrapper, parts_of


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


@dataclass(slots=True)
class SeenWindow:
    """Operators that a watcher has seen one after the other.

    Attributes:
        on: See `Window`.
        sees: See `Window`.
        start: The first of them, in `Selection.operators`.
        end: The one after the last of them; None if the policy has to be asked about more, if more run.
    """

    on: int
    sees: int
    start: int
    end: int | None = None


class Selection:
    """The outputs that one call keeps.

    Attributes:
        asked: The policy that makes the choices; None if only inner regions have one.
        operators: The op infos of the operators that ran and were seen, in order.
        windows: Which of them were seen one after the other.
        kept: The outputs that are kept for recomputes, by number of the operator.
        inner: The selections of inner regions, in the order in which they ran.
        end: How many operators had run at the last save with an empty slot.
        is_taken: Whether a recompute has removed kept outputs.
    """

    __slots__ = (
        "__weakref__", "_memories", "_offloaded", "_received", "asked", "end", "inner", "is_taken", "kept",
        "operators", "windows",
    )  # fmt: skip

    def __init__(self, asked: AskedPolicy | None) -> None:
        self.asked = asked
        self.operators: list[OpInfo] = []
        self.windows: list[SeenWindow] = []
        self.kept: dict[int, KeptOutputs] = {}
        self.inner: list[ReferenceType[Selection]] = []
        self.end = 0
        self.is_taken = False
        # Outputs kept as aliases, by their memory; None after the forward, until a write.
        self._memories: dict[UntypedStorage, list[KeptValue]] | None = {}
        # Outputs in a store, by their memory in the forward, and in a recompute by their current memory; mostly empty.
        self._offloaded: WeakKeyDictionary[UntypedStorage, Offloaded] | None = None
        self._received: tuple[KeptValue, ...] = ()  # during the forward: of collectives, in memory of their arguments

    # --------------------------------------------------------------------------------------------------- forward

    def keep(
        self, index: int, output: object, decision: Decision, draws: torch.Generator | torch.device | None
    ) -> None:
        """Keep the output of the operator that ran as number `index`, as decided.

        Args:
            index: The number.
            output: The operator's output.
            decision: Whether to save it or to store it.
            draws: The generator that the operator drew from.
        """
        if type(output) is Tensor and decision is SAVE:
            values: object = self._saved(output)
        else:
            if not has_tensors(output):
                return  # a number, read from a tensor: reading it again is exact
            values = mapped(output, partial(self._value, decision))
        self.kept[index] = KeptOutputs(values, None if draws is None else (draws, get_generator(draws)))

    def keep_received(self, index: int, received: list[Tensor]) -> None:
        """Keep what the collective that ran as number `index` receives into its arguments, now or later."""
        # See NOTE [ What other processes have sent ]
        values = [self._saved(one) for one in received]
        self._received += tuple(values)
        self.kept[index] = KeptOutputs(values, None)

    def keep_memory(self, tensor: Tensor, decision: Decision) -> None:
        """Let slots hold tensors that share the memory of `tensor`, as decided."""
        memory = memory_of(tensor)
        if memory is None:
            return
        if decision.catalog is not None:
            self._offloaded_in(memory, decision)
        else:
            self.memories().setdefault(memory, [])

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
        """Record that a recompute gets a tensor of a store, and may write to it."""
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
            self.memories().setdefault(memory, []).append(value)
        return value

    def memories(self) -> dict[UntypedStorage, list[KeptValue]]:
        """Return the outputs that are kept as aliases, by their memory."""
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

    def stores(self, memory: UntypedStorage) -> bool:
        """Return whether this memory waits in a store."""
        return self._offloaded is not None and memory in self._offloaded

    def stored(self, tensor: Tensor, memory: UntypedStorage) -> StoredOutput:
        """Return the value that the slot of a saved tensor may hold, whose memory waits in a store."""
        assert self._offloaded is not None
        found = self._offloaded[memory]
        # Its own writes may have another version counter than the one that the store watches.
        others = [Counter(tensor), *found.others] if found.others else None
        decision = found.decisions[-1]
        assert decision.catalog is not None
        return StoredOutput(decision.catalog.put(tensor), decision, others)

    def watch(self, output: object) -> None:
        """Watch an operator's output for kept memory, although the operator declares that it returns no aliases."""
        memories, all_offloaded = self._memories, self._offloaded
        if not memories and all_offloaded is None:
            return
        for tensor in (output,) if type(output) is Tensor else tensors_in(output):
            memory = memory_of(tensor)
            if memory is None:
                continue
            values = memories.get(memory) if memories else None
            offloaded = None if all_offloaded is None else all_offloaded.get(memory)
            if not values and offloaded is None:
                continue
            with counting_versions():
                counter = Counter(tensor)
            for value in values or ():
                value.watch(counter)
            if offloaded is not None:
                offloaded.others.append(counter)
                for stored in offloaded.outputs:
                    stored.watch(counter)

    def protect(self, written: list[Tensor]) -> None:
        """Copy the kept outputs whose memory is about to be written, or let their store do so."""
        for tensor in written if all(type(one) is Tensor for one in written) else _with_parts(written):
            memory = memory_of(tensor)
            if memory is None:
                continue
            memories = self.memories()
            for value in memories.pop(memory, ()):
                if value in self._received:
                    if are_apart(value.tensor, tensor):
                        memories.setdefault(memory, []).append(value)
                        continue
                    value.renew()
                if value.get() is not None:
                    value.copy_for_write()
                    memories[value.tensor.untyped_storage()] = [value]
            offloaded = None if self._offloaded is None else self._offloaded.pop(memory, None)
            if offloaded is not None:
                for stored in offloaded.outputs:
                    if not stored.has_moved:
                        stored.others = None  # it is about to get its own memory
                for decision in offloaded.decisions:
                    assert decision.catalog is not None
                    decision.catalog.before_write(memory)

    def settle(self, *, everything: bool) -> None:
        """Drop the outputs that no recompute reaches; with `everything`, a recompute may run to the end."""
        self._offloaded = None
        for value in self._received:
            value.renew()
        self._received = ()
        if not everything:
            for index in [one for one in self.kept if one >= self.end]:
                del self.kept[index]
        self._memories = None

    # -------------------------------------------------------------------------------------------------- recompute

    def begin(self, *, takes: bool) -> None:
        """Begin a recompute; with `takes`, it removes kept outputs."""
        if self.is_taken:
            # The sends and receives that the earlier one has not reached. See NOTE [ What other processes have sent ]
            for index in [one for one in self.kept if self.operators[one].communicates]:
                self.drop(index)
        self.is_taken |= takes

    def drop(self, index: int) -> None:
        """Drop the kept outputs of an operator, if any."""
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

    def difference(self, index: int, operator: Operation) -> str:
        """Return the words for an operator other than the one that ran at this index in the forward."""
        then = self.operators[index].operator if index < len(self.operators) else "none any more"
        return f"operator {index} of the recompute is {operator}, and in the forward it was {then}"


def _with_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors, and those that wrappers among them hold, like the result of a functional collective."""
    return [found for one in tensors for found in ((one, *parts_of(one)) if is_wrapper(one) else (one,))]


def written_by(
    writes: tuple[tuple[int, str], ...], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[Tensor]:
    """Return the tensors that an operator writes, by the places and names of its arguments."""
    values = (args[place] if place < len(args) else kwargs.get(name) for place, name in writes)
    return [*chain.from_iterable(map(tensors_in, values))]


class KeptOutputs(NamedTuple):
    """The outputs of one operator.

    Attributes:
        values: The operator's output structure, with a `KeptValue` or `StoredOutput` in place of each tensor.
        draws: The generator that the operator drew from, and its state afterwards.
    """

    values: object
    draws: tuple[torch.Generator | torch.device, Tensor] | None

    def again(self, selection: Selection) -> object | None:
        """Return the outputs for a recompute, None if they are no longer available.

        Args:
            selection: The owner of the outputs; it is told of tensors handed out of a store.
        """
        values = self.values
        if type(values) is KeptValue:
            return values.alias()
        try:
            return mapped(values, partial(_again, selection))
        except _GoneError:
            return None


class _GoneError(Exception):
    """A kept tensor was written in place."""
