"""The seconds of ways of stepping: what it adds to step on one parameter after the other, and to move the state.

All of it is measured on the real optimizer, whose steps are undone, and on the real store, with tensors like the
state's and the parameters. In the backward transfers run beside it, and only what they take from it counts, and what
is left when it is over. The seconds are for comparisons; bytes are those of a profile of each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.measuring.exhaustion import IfItFits
from torchremat.measuring.optimizers import parameters_of
from torchremat.measuring.runs import Subject
from torchremat.measuring.storages import tensors_in
from torchremat.measuring.store_speeds import Payload, measured_speed
from torchremat.optimizing.groups import groups_by_parameter, step_on
from torchremat.optimizing.parameter_offload import LEAST_PARAMETER_BYTES
from torchremat.planning.profiles.optimizers import stepped_and_undone
from torchremat.planning.stepping import LEAST_STORED_BYTES, Stepping, StepStores
from torchremat.stores.base import limit_bytes_of
from torchremat.tensors.handles import Store
from torchremat.tensors.metadata import covers

_TIMES = 3

# A parameter comes in and leaves in the forward, in a recompute, and in the backward. Plans that need a store for
# parameters recompute most of the forward.
_USES_BESIDE = 3


@dataclass(frozen=True, kw_only=True)
class SteppingSeconds:
    """The seconds that ways of stepping add to a step.

    Attributes:
        parts_s: Of stepping on one parameter after the other instead of on all at once.
        moves_s: Of moving the state out and back, if the step waits for it.
        busy_s: The part of these that the step loses without waiting.
        state_bytes: The bytes of the state.
        parameters_s: Of moving the parameters out and back once, if the step waits for it.
        parameters_busy_s: The part of these that the step loses without waiting.
    """

    parts_s: float
    moves_s: float
    busy_s: float
    state_bytes: int
    parameters_s: float = 0.0
    parameters_busy_s: float = 0.0

    def added_s(self, stepping: Stepping, backward_s: float) -> float:
        """Return the seconds that a way adds to a step whose backward takes `backward_s`."""
        uses = _USES_BESIDE * stepping.stores_parameters
        moves_s, busy_s = uses * self.parameters_s, uses * self.parameters_busy_s
        alone_s = self.parts_s if stepping.releases else 0.0
        if stepping.releases and stepping.stores:
            moves_s, busy_s = moves_s + self.moves_s, busy_s + self.busy_s
        elif not stepping.releases:  # nothing runs beside the step
            alone_s += self.moves_s * stepping.stores + self.parameters_s * stepping.stores_parameters
        return alone_s + max(busy_s, moves_s - backward_s)


def stepping_seconds(
    subject: Subject, device: torch.device, stores: StepStores, *, in_parts: bool = True
) -> SteppingSeconds:
    """Measure the seconds of ways of stepping; nothing is added where a step does not fit into memory for that.

    Args:
        subject: The step, with its optimizer.
        device: The device.
        stores: The stores where state and parameters may wait.
        in_parts: Whether the optimizer steps in parts in some way, or has its state in a store. To measure that,
            parameters and state are copied in host memory.

    Raises:
        UnsupportedError: See `step_alone`.
    """
    parts_s, tensors = 0.0, list[tuple[int, torch.dtype]]()
    if in_parts:
        with IfItFits():
            parts_s, tensors = _parts(subject, device)
    moves_s, busy_s = _moves(stores.state, device, [one for one in tensors if one[0] >= LEAST_STORED_BYTES])
    every = {id(one): one for model in subject.models for one in model.parameters()}
    parameters = [(one.nbytes, one.dtype) for one in every.values() if covers(device, one.device)]
    parameters_s, parameters_busy_s = _moves(
        stores.parameters, device, [one for one in parameters if one[0] >= LEAST_PARAMETER_BYTES]
    )
    return SteppingSeconds(
        parts_s=parts_s,
        moves_s=moves_s,
        busy_s=busy_s,
        state_bytes=sum(size for size, _ in tensors),
        parameters_s=parameters_s,
        parameters_busy_s=parameters_busy_s,
    )


def _moves(
    store: Store | None, device: torch.device, tensors: Sequence[tuple[int, torch.dtype]]
) -> tuple[float, float]:
    """Return the seconds of moving tensors out and back: if the step waits for it, and if it does not."""
    if store is None or not tensors:
        return 0.0, 0.0
    payload = Payload(tensors=tuple(tensors))
    speed = measured_speed(store, device, payload, limit_bytes_of(store))
    both, count, size_bytes = (speed.out, speed.back), len(payload.tensors), payload.size_bytes
    return sum(one.seconds(count, size_bytes) for one in both), sum(one.busy_s(count, size_bytes) for one in both)


def _parts(subject: Subject, device: torch.device) -> tuple[float, list[tuple[int, torch.dtype]]]:
    """Return the seconds that parts add to a whole step, and the state's tensors, by size and type."""
    optimizer = subject.optimizer
    assert optimizer is not None
    seconds = accelerator_of(device).seconds

    def timed(work: Callable[[], object]) -> float:
        start_s = seconds(device)
        work()
        return seconds(device) - start_s

    with stepped_and_undone(subject, optimizer) as step:
        step()  # makes the state
        state = tensors_in(list(dict.values(optimizer.state)))
        tensors = [(one.nbytes, one.dtype) for one in state if covers(device, one.device)]
        group_of = groups_by_parameter(optimizer)
        every = [one for one in parameters_of([optimizer]) if one.grad is not None]

        def parts() -> None:
            for one in every:
                step_on(optimizer, [one], group_of)

        whole_s = min(timed(step) for _ in range(_TIMES))
        parts_s = min(timed(parts) for _ in range(_TIMES))
    return max(0.0, parts_s - whole_s), tensors
