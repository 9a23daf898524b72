"""The bytes of parameters that wait in a store while their modules do not run.

A step is profiled with all parameters in memory, and the same operators run under the same trees if some are away. So
its bytes are those of the profile, without the parameters that are away, and with those that are in memory at a time.
The latter depend on the order of the backward and of recomputes. Their most is bounded, whatever the order is:

    a module runs       its parameters, those of the modules around it, and all that their own code reads; and what the
                        step reads outside of all modules
    another one ended   its parameters, which are leaving until the store has them
    a node ran          the parameters that it has read, until the next node reads others
    one comes ahead     one parameter

The bound takes the largest of each, and all of a call for the one that comes ahead. The rules are those of
`optimizing/parameter_offload.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from heapq import nlargest
from typing import TypeAlias

from torch import nn

from torchremat.measuring.optimizers import Optimizer
from torchremat.optimizing.parameter_offload import offload_parameters
from torchremat.planning.checks import is_part_of
from torchremat.planning.devices.machines import Machine
from torchremat.planning.profiles.traces import Trace
from torchremat.stores.stored_parameters import StoredParameter, stand_in
from torchremat.tensors.handles import Store

_Use: TypeAlias = tuple[frozenset[int], frozenset[int]]
_OTHERS = 3  # which leave, were read, and come ahead


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """The bytes of parameters that wait in a store.

    Attributes:
        away_bytes: What leaves the device with them. A store on the same device takes its own bytes from that.
        room_bytes: The most of them in memory at once in forward and backward. An upper bound.
        step_room_bytes: The most in `optimizer.step()`. An upper bound.
    """

    away_bytes: int = 0
    room_bytes: int = 0
    step_room_bytes: int = 0


NONE_AWAY = ParameterBytes()


def parameter_bytes(
    model: nn.Module, optimizer: Optimizer, store: Store, trace: Trace, machine: Machine
) -> ParameterBytes:
    """Put the parameters of a model into a store and bring them back, and return their bytes.

    Args:
        model: The model.
        optimizer: Steps on them.
        store: The store.
        trace: A traced forward.
        machine: Where the step runs.

    Raises:
        UnsupportedError: See `offload_parameters`.
        StoreError: See `offload_parameters`.
    """
    for one in model.parameters():
        stand_in(one.dtype, one.device)  # made once, and then it stays
    with machine.record() as recorder:
        with offload_parameters(model, optimizer, store) as offload:
            away = recorder.mark("away")
            stored = [one for one in model.parameters() if type(one) is StoredParameter]
            here = sorted((one for one in stored if one.device.type == machine.device.type), key=lambda one: one.nbytes)
            with offload.in_memory(here[-1:]):
                pass
            offload.end()
            moved = recorder.mark("moved")
        recorder.mark("back")
    if not here:
        return NONE_AWAY
    sizes, largest = {id(one): one.nbytes for one in here}, here[-1].nbytes
    unseen_bytes = sum(sizes.values()) if machine.device.type == "cpu" else 0  # frees of memory from before the record
    # What a transfer needs beyond the parameter itself.
    passing_bytes = max(0, recorder.trace.rise_bytes_between(away, moved) - largest)
    return ParameterBytes(
        away_bytes=unseen_bytes - recorder.trace.live_bytes_at(away),
        room_bytes=room_bytes(sizes, set(_uses(model, trace, sizes))) + passing_bytes,
        # Slices of parameters step, none larger than the largest parameter: one steps, one leaves, and one comes.
        step_room_bytes=min(sum(sizes.values()), 3 * largest) + passing_bytes,
    )


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
    for index, call in enumerate(calls):
        yield frozenset(call), frozenset(by_step.union(*(calls[one] for one in _outward(trace, index))))
    for name in trace.looped:  # the calls that a loop makes are not traced
        yield own[name], frozenset(by_step.union(*(own[one] for one in own if is_part_of(name, one))))


def _outward(trace: Trace, index: int | None) -> Iterator[int]:
    while index is not None:
        yield index
        index = trace.calls[index].parent
