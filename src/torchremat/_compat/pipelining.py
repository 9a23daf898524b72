"""Private state of the schedules and stages of torch.distributed.pipelining.

That package takes a while to import, so nothing here imports it: code that has a schedule has done so.

    private name                         on                              for
    `step`                               schedule                        the end of a step
    `_loss_fn`                           schedule                        the loss of a microbatch
    `forward_one_chunk` and its like     stage                           the pieces of each microbatch
    `get_bwd_recv_ops` and its like      stage, of GPipe and 1F1B        the gradient that the next wait is for
    `_wait_batch_p2p`                    the loop of GPipe and 1F1B      receive posted, not yet waited for
    `bwd_recv_ops`, `fwd_recv_ops`       the other schedules             the same
    `pipeline_order_with_comms`          the other schedules             the order of actions
    `dw_builder`                         stage                           the part that is a whole backward
    `stage_backward_input`, `..._weight` module of both passes           to run them for one microbatch
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from torchremat._compat.binding import SUPPORTED
from torchremat.errors import UnsupportedError, VersionError

_MODULE = "torch.distributed.pipelining.schedules"
_PARTS = "torch.distributed.pipelining._backward"

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
RUNTIME = (
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)

FORWARD, BACKWARD, WEIGHT = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
STEP, LOOP, LOSS = "step", "_step_microbatches", "_loss_fn"
RECEIVES_OF_STAGE = {"backward": "get_bwd_recv_ops", "forward": "get_fwd_recv_ops"}
RECEIVES_OF_SCHEDULE = {"backward": "bwd_recv_ops", "forward": "fwd_recv_ops"}
_WAIT = "_wait_batch_p2p"


class Work(Protocol):
    """A transfer that was started."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class TorchStage(Protocol):
    """The parts of a stage that are used as they are."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    group: object
    has_backward: bool


def name_of(schedule: object) -> str:
    """Return the name of the torch class to which a schedule belongs.

    Raises:
        UnsupportedError: It belongs to none of them.
    """
    module = sys.modules.get(_MODULE)
    for name in (*SINGLE, *RUNTIME):
        known = getattr(module, name, None)
        if isinstance(known, type) and isinstance(schedule, known):
            return name
    raise UnsupportedError(
        f"schedule: a {type(schedule).__name__} is not supported. Use a schedule of torch.distributed.pipelining: "
        f"{', '.join((*SINGLE, *RUNTIME))}."
    )


def check_hooks(schedule: object, *, waits: bool) -> None:
    """Verify that everything exists that attaching accesses.

    Args:
        schedule: Of a known class.
        waits: Whether the waits for transfers are needed as well.

    Raises:
        VersionError: Something is missing; the message names all of it.
    """
    single = name_of(schedule) in SINGLE
    missing = _missing(schedule, [STEP, "_n_microbatches", "_stage" if single else "_stages"])
    if not single:
        missing += _missing(schedule, ["pipeline_order_with_comms"])
        missing += _missing(schedule, RECEIVES_OF_SCHEDULE.values() if waits else ())
    elif waits and _WAIT not in _loop_of(schedule).__code__.co_names:
        missing.append(f"{type(schedule).__name__}.{LOOP} with a call of {_WAIT}")
    for kind in {} if missing else dict.fromkeys(map(type, stages_of(schedule))):
        missing += _missing(kind, [FORWARD, BACKWARD, WEIGHT, "has_backward"])
        missing += _missing(kind, RECEIVES_OF_STAGE.values() if single and waits else ())
    if missing:
        what = "its waits, for `lookahead` or `record`," if waits else "it"
        raise VersionError(
            f"torch {torch.__version__} has no {', '.join(missing)}: attaching to a {type(schedule).__name__} needs "
            f"{'them' if len(missing) > 1 else 'that'} to reach {what}. {SUPPORTED}"
        )


def _missing(owner: object, names: Iterable[str]) -> list[str]:
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    return [f"{kind}.{name}" for name in names if not hasattr(owner, name)]


def _loop_of(schedule: object) -> FunctionType:
    return cast("FunctionType", getattr(type(schedule), LOOP))


def stages_of(schedule: object) -> Sequence[TorchStage]:
    """Return the stages that this process runs."""
    if name_of(schedule) in SINGLE:
        return [cast("Any", schedule)._stage]
    return cast("Any", schedule)._stages


def group_of(schedule: object) -> object:
    """Return the process group of a schedule; None means all processes."""
    return stages_of(schedule)[0].group


def loss_function_of(schedule: object) -> Callable[..., object] | None:
    """Return the function from output and target to a microbatch's loss; None if the schedule has no backward."""
    return cast("Any", schedule)._loss_fn


def microbatches_of(schedule: object) -> int:
    """Return how many microbatches a step has."""
    return cast("Any", schedule)._n_microbatches


class TorchAction(Protocol):
    """One action of torch's own order."""

    stage_index: int
    microbatch_index: int | None
    sub_actions: Sequence[TorchAction] | None

    @property
    def computation_type(self) -> Any: ...


def orders_of(schedule: object) -> Mapping[int, Sequence[TorchAction]]:
    """Return the actions of each process, for a schedule that has them as data."""
    return cast("Any", schedule).pipeline_order_with_comms


def whole_pass_of(stage: TorchStage) -> Literal["input", "weight"] | None:
    """Return the one of two passes in which all of autograd's backward runs; None if it is split between both.

    With a `dw_builder` it is the input pass, and the other one is the user's. For the first stage it is the weight
    part: the gradients of its inputs are never waited for.
    """
    if getattr(stage, "dw_builder", None):
        return "input"
    return "weight" if stage.stage_index == 0 else None


def run_input_pass(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    inputs: Sequence[object],
    outputs: Sequence[Tensor],
    module: nn.Module,
) -> object:
    """Run the input pass of a backward, and return the starting point of the weight pass.

    Args:
        roots: The outputs of the module, or the loss.
        grads: Their gradients; None for a loss.
        inputs: The module's inputs; those that require grad get their gradients.
        outputs: The module's outputs. Afterwards they are in no graph.
        module: The module whose parameters get their gradients in the weight pass.

    Raises:
        VersionError: This torch lacks this part.
    """
    _, groups = _part("stage_backward_input")(list(roots), grads, list(inputs), module.parameters())
    for output in outputs:
        if not output._is_view():
            output.detach_()
    return groups


def run_weight_pass(groups: object, module: nn.Module) -> None:
    """Run the weight pass of a backward.

    Raises:
        UnsupportedError: It begins at a node of a custom Function, which this torch does not support.
        VersionError: This torch lacks this part.
    """
    part = _part("stage_backward_weight")
    try:
        part(module.parameters(), groups)
    except RuntimeError as error:
        # Torch 2.11 reads attributes from such a node that only its own nodes have; torch 2.13 does not.
        if "_input_metadata" not in str(error):
            raise
        raise UnsupportedError(
            f"torch {torch.__version__} cannot split the backward of a custom autograd Function that has a weight "
            "among its inputs, with or without torchremat. Install torch 2.13 or newer, or use a schedule that does "
            "not split the backward."
        ) from error


def _part(name: str) -> Callable[..., Any]:
    found = getattr(sys.modules.get(_PARTS), name, None)
    if found is None:
        raise VersionError(
            f"torch {torch.__version__} has no {_PARTS}.{name}: plans for schedules that split the backward need it. "
            f"{SUPPORTED}"
        )
    return found


def looping(schedule: object, wait: Callable[[list[Work], Callable[[list[Work]], None]], None]) -> FunctionType:
    """Return the loop of a single-stage schedule, with `wait` in place of its waiting function.

    That function is a global of torch's module, looked up by the loop of every schedule. So this schedule gets a copy
    of the loop with its own globals: no other schedule sees a difference.

    Args:
        schedule: A `ScheduleGPipe` or `Schedule1F1B`.
        wait: Gets the transfers, and the function that waits for them.
    """
    loop = _loop_of(schedule)
    names = dict(loop.__globals__)
    own = cast("Callable[[list[Work]], None]", names[_WAIT])

    def waits(works: list[Work]) -> None:
        wait(works, own)

    names[_WAIT] = waits
    copy = FunctionType(loop.__code__, names, loop.__name__, loop.__defaults__, loop.__closure__)
    copy.__kwdefaults__ = loop.__kwdefaults__
    return copy
