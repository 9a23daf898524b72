"""The bytes of parameters that wait in a store while their modules do not run.

A step is profiled while they wait, and its record leaves their moves out, see `Machine.record`. So its bytes are those
of the profile, and with those of the parameters that are in memory at a time. The latter depend on the order of the
backward and of recomputes. Their most is bounded, whatever the order is:

    a module runs       its parameters, those of the modules around it, and all that their own code reads; and what the
                        step reads outside of all modules
    another one ended   its parameters, which are leaving until the store has them
    a node ran          the parameters that it has read, until the next node reads others
    one comes ahead     one parameter

The bound takes the largest of each, and all of a call for the one that comes ahead. The rules are those of
`optimizing/parameter_offload.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.before import BytesBefore
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.training.checks import is_part_of
from torchremat.stores.stored_parameters import Keeper, keeper_of, put_away_all

_Use: TypeAlias = tuple[frozenset[int], frozenset[int]]
_OTHERS = 3  # which leave, were read, and come ahead


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """The bytes of parameters that wait in a store.

    Attributes:
        away_bytes: What has left the device with them.
        held_bytes: What the store takes on the same device.
        room_bytes: The most of them in memory at once in forward and backward. An upper bound.
        step_room_bytes: The most in `optimizer.step()`. An upper bound.
    """

    away_bytes: int = 0
    held_bytes: int = 0
    room_bytes: int = 0
    step_room_bytes: int = 0

    def added_to(self, before: BytesBefore) -> BytesBefore:
        """Return live bytes before a step, with the most that there is at any time."""
        most_bytes = self.held_bytes + max(self.room_bytes, self.step_room_bytes)
        return replace(before, parameter_bytes=before.parameter_bytes + most_bytes)


NONE_AWAY = ParameterBytes()


def parameter_bytes(model: nn.Module, traced: Trace, device: torch.device) -> ParameterBytes:
    """Bring each parameter of a model that waits in a store back and put it away again, and return their bytes.

    Args:
        model: The model.
        traced: A traced forward.
        device: The device whose bytes count.

    Raises:
        StoreError: One cannot be brought back.
    """
    put_away_all(model.parameters())
    waiting = [(one, keeper) for one in model.parameters() if (keeper := keeper_of(one)) is not None]
    here = sorted((pair for pair in waiting if pair[0].device.type == device.type), key=lambda pair: -pair[0].nbytes)
    if not here:
        return NONE_AWAY
    _move(*here[0], lambda _: 0)  # so that what comes ahead of the next one has come
    with record_allocations(device) as recorder:
        marks = [_move(*one, recorder.mark) for one in here]
    trace = recorder.trace
    sizes, largest = {id(one): one.nbytes for one, _ in here}, here[0][0].nbytes
    # What a transfer needs beyond the parameter itself.
    passing_bytes = max(0, trace.rise_bytes_between(marks[0].away, marks[0].gone) - largest)
    held_bytes = int(trace.delta_bytes[trace.made_in([(one.here, one.gone) for one in marks])].sum())
    return ParameterBytes(
        away_bytes=sum(sizes.values()) - held_bytes,
        held_bytes=held_bytes,
        room_bytes=room_bytes(sizes, set(_uses(model, traced, sizes))) + passing_bytes,
        # Slices of parameters step, none larger than the largest parameter: one steps, one leaves, and one comes.
        step_room_bytes=min(sum(sizes.values()), 3 * largest) + passing_bytes,
    )


class _MoveMarks(NamedTuple):
    """The marks before a move of a parameter, where it is in memory, and after it."""

    away: int
    here: int
    gone: int


def _move(parameter: Tensor, keeper: Keeper, mark: Callable[[str], int]) -> _MoveMarks:
    away = mark("away")
    with keeper.in_memory([parameter]):
        here = mark("here")
    keeper.end()
    return _MoveMarks(away, here, mark("gone"))


def room_bytes(sizes: Mapping[int, int], uses: Set[_Use]) -> int:
    """Return the most bytes of parameters that are in memory at once; see the table above.

    Args:
        sizes: Bytes of each parameter.
        uses: The parameters of each call: its own, and with those of the calls around it.
    """

    def bytes_of(parameters: Iterable[int]) -> int:
        return sum(map(sizes.__getitem__, parameters))

    owns = {own for own, _ in uses}
    return max(
        bytes_of(around) + sum(nlargest(_OTHERS, (bytes_of(own - around) for own in owns)))
        for around in {around for _, around in uses}
    )


def _uses(model: nn.Module, trace: Trace, sizes: Container[int]) -> Iterator[_Use]:
    named = {name: id(one) for name, one in model.named_parameters()}
    own = {
        name: frozenset(id(one) for one in module.parameters(recurse=False) if id(one) in sizes)
        for name, module in model.named_modules(remove_duplicate=False)
    }
    calls = [set(own[call.name]) for call in trace.calls]
    by_step = set[int]()  # no hook of a module sees what the step's own code saves, so that it stays
    for run in trace.operators.runs:
        names = (trace.parameters.get(trace.operators.values[value].storage) for value in run.reads)
        read = {named[name] for name in names if name is not None}
        (by_step if run.call < 0 else calls[run.call]).update(one for one in read if one in sizes)
    yield frozenset(), frozenset(by_step)
    around: list[frozenset[int]] = []  # of each call, with the calls around it, which come before it
    for call, read in zip(trace.calls, calls, strict=True):
        around.append(frozenset(read | (by_step if call.parent is None else around[call.parent])))
        yield frozenset(read), around[-1]
    for name in trace.untraced:
        yield own[name], frozenset(by_step.union(*(own[one] for one in own if is_part_of(name, one))))
