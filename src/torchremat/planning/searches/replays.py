"""Counts the bytes of a region that holds some operators' outputs, from the events of a step that holds none.

forward      the events, without the frees of storages that are held until the forward ends
recompute    those up to the last operator that is passed, without those of operators that do not run,
             without the frees of saved tensors; tensors held for the recompute alone are freed where they were

Autograd asks for saved tensors in an order that does not depend on the plan, and the first one not held recomputes all
that are not held. So the watched backward, in which everything is recomputed first, divides into

    until then   tensors not held are not there, so they are not freed. Nor are tensors held for the recompute as well
    recompute    begins with the live bytes by then: gradients in flight, and without freed tensors
    from then    as it was watched
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchremat.measuring.step_record import Run, StepRecord
from torchremat.measuring.traces import AllocationTrace, live_bytes_of
from torchremat.planning.profiles.backwards import UnitBackward
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.operator_selection import OperatorSelection, held_values


@dataclass(frozen=True, slots=True)
class _MadeStorage:
    """A storage that an operator of the unit makes, and the events that allocate and free it."""

    maker: int
    allocated: int
    freed: int


class SelectionReplay:
    """One selection of one unit.

    Args:
        log: The operators of the forward.
        runs: The operators of the unit.
        flow: The same as a dataflow.
        storages: By value of `flow`, the number of its storage in the log.
        selection: The operators whose outputs are held.
        allocations: The allocator's events in the forward.
        window: The marks at which the unit begins and ends.
        state_bytes: Bytes of a generator state, which is held with the outputs of an operator that has drawn.

    Attributes:
        spared: The operators that the recompute passes and does not run.
        taken: The values that the spared operators make.
        held: The storages that are held from the end of the forward to the recompute.
    """

    def __init__(
        self,
        log: StepRecord,
        runs: list[Run],
        flow: Dataflow,
        storages: list[int],
        selection: OperatorSelection,
        allocations: AllocationTrace,
        window: tuple[int, int],
        state_bytes: int,
    ) -> None:
        self._runs = runs
        self._flow = flow
        self._storages = storages
        self._selection = selection
        self._state_bytes = state_bytes
        self._deltas = allocations.delta_bytes
        self._position = [allocations.marks[mark].position for run in runs for mark in (run.begins, run.ends)]
        self._begin, self._end = (allocations.marks[mark].position for mark in window)
        self._intervals = allocations.intervals
        self._pointers = allocations.ptr
        operators = flow.operators
        self.spared = {one for one in selection.held if one < selection.ends and operators[one].replaceable}
        self.taken = {value for one in self.spared for value in operators[one].outputs}
        self._made = self._find_made(log)
        self.held = {
            storages[value]
            for index in selection.held
            for value in operators[index].outputs
            if (flow.values[value].needed or index in self.spared) and storages[value] in self._made
        }

    def _find_made(self, log: StepRecord) -> dict[int, _MadeStorage]:
        found: dict[int, _MadeStorage] = {}
        for index, run in enumerate(self._runs):
            first, last = self._span(index)
            for value in run.makes:
                seen = log.values[value]
                if seen.storage in found:
                    continue
                for allocated, freed in self._intervals.get(seen.pointer, ()):
                    if first <= allocated < last:
                        found[seen.storage] = _MadeStorage(index, allocated, freed)
        return found

    def _span(self, index: int) -> tuple[int, int]:
        return self._position[2 * index], self._position[2 * index + 1]

    def size(self, storage: int) -> int:
        """Return the bytes of a storage that an operator of the unit makes, as the allocator counts."""
        return int(self._deltas[self._made[storage].allocated])

    @property
    def held_bytes(self) -> int:
        """Bytes held from the end of the forward to the recompute."""
        return self._state_bytes * len(self._drawn(self.spared)) + sum(map(self.size, self.held))

    def _drawn(self, operators: Iterable[int]) -> list[int]:
        return sorted(index for index in operators if self._runs[index].op_info.is_random)

    def forward_peak(self) -> int:
        """Return the peak of the forward over the live bytes at its beginning."""
        held = set(self.held)
        # Even tensors that no recompute reaches are held until the forward has ended.
        replaceable = [index for index in self._selection.held if self._flow.operators[index].replaceable]
        for index in replaceable:
            held.update(self._storages[value] for value in self._flow.operators[index].outputs)
        live = live_bytes_of(self._without_frees(self._end, held))
        for index in self._drawn(replaceable):
            live[self._span(index)[1] - self._begin :] += self._state_bytes
        return int(live.max())

    def recompute_peak(self, gone: Container[int] = ()) -> int:
        """Return the peak of the recompute over the live bytes at its beginning, with the held storages live.

        Args:
            gone: Needed values that backward has finished with when the recompute begins.
        """
        ends = self._selection.ends
        if not ends:
            return 0
        saved = {
            self._storages[value]
            for index, operator in enumerate(self._flow.operators)
            if index not in self._selection.held
            for value in operator.outputs
            if self._flow.values[value].needed
        }
        end = self._span(ends - 1)[1]
        delta = self._without_frees(end, saved)
        for index in self.spared:
            first, last = self._span(index)
            alone = {
                self._made[self._storages[value]].allocated
                for value in self._flow.operators[index].outputs
                if self._storages[value] in self._made and (not self._flow.values[value].needed or value in gone)
            }
            for event in range(first, min(last, end)):
                if self._deltas[event] <= 0:
                    continue
                delta[event - self._begin] = 0
                freed = self._freed(event)
                if freed < end and event not in alone:
                    delta[freed - self._begin] = 0
        live = live_bytes_of(delta)
        for index, size_bytes in self._copied(gone):
            live[self._span(index)[1] - self._begin :] -= size_bytes
        first, *others = self._drawn(self.spared) or [ends]
        for index in others:
            live[self._span(index)[0] - self._begin :] -= self._state_bytes
        # The current state is copied before the held one is freed.
        copied = int(live[self._span(first)[0] - self._begin]) + self._state_bytes if first < ends else 0
        return max(copied, int(live.max()))

    def _copied(self, gone: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield the collectives that do not run, with held bytes that are freed once the recompute has a copy."""
        for index in self.spared:
            for value in self._flow.operators[index].outputs:
                made = self._made.get(self._storages[value])
                if made is not None and made.maker != index and (not self._flow.values[value].needed or value in gone):
                    yield index, self.size(self._storages[value])

    def _freed(self, allocated: int) -> int:
        intervals = self._intervals.get(int(self._pointers[allocated]), ())
        return next((freed for begin, freed in intervals if begin == allocated), self._end)

    def _without_frees(self, end: int, storages: set[int]) -> NDArray[np.int64]:
        delta = self._deltas[self._begin : end].copy()
        for storage in storages:
            made = self._made.get(storage)
            if made is not None and self._begin <= made.freed < end:
                delta[made.freed - self._begin] = 0
        return delta


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialBackward:
    """Peaks of a backward before, in and after the recompute in its middle.

    Attributes:
        early_bytes: Peak until the recompute, over the live bytes at the beginning.
        recompute_bytes: Peak of the recompute, over the same.
        late_bytes: Peak from then on, over the bytes that would be live at the beginning if all saved tensors were
            there.
    """

    early_bytes: int
    recompute_bytes: int
    late_bytes: int


def partial_backward(
    backward: UnitBackward,
    saves: Sequence[int] | None,
    flow: Dataflow,
    selection: OperatorSelection,
    replay: SelectionReplay,
) -> PartialBackward:
    """Return the peaks of a backward in whose middle the unit recomputes what a selection does not hold.

    `saves` are the values of `flow` that autograd saves, in the order of the saves; None if unknown.
    """
    whole = backward.live_bytes()
    if not selection.ends:
        return PartialBackward(early_bytes=0, recompute_bytes=0, late_bytes=int(whole.max()))
    there = held_values(flow, selection.held)
    asked = [] if saves is None else [at for save, at in backward.asked_at.items() if saves[save] not in there]
    if saves is None or not asked:
        # The recompute may be triggered at any time, with every tensor live that ever is.
        highest = int(backward.live_bytes(without=backward.remade).max())
        recompute_bytes = highest + replay.recompute_peak()
        return PartialBackward(early_bytes=highest, recompute_bytes=recompute_bytes, late_bytes=int(whole.max()))
    first = min(asked)
    freed = {saves[save]: event for save, event in backward.freed_at.items() if saves[save] in there}
    goes = {event for value, event in freed.items() if value not in replay.taken}
    early = backward.live_bytes(without=backward.remade - goes)[: first + 1]
    gone = {value for value, event in freed.items() if event < first}
    return PartialBackward(
        early_bytes=int(early.max()),
        recompute_bytes=int(early[-1]) + replay.recompute_peak(gone),
        late_bytes=int(whole[first:].max()),
    )
