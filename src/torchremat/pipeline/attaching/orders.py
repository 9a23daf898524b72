"""The order of a schedule's actions, and how many microbatches a stage holds.

The order of a stage is a text like `F0 F1 B0 F2 B1 B2`: forward, backward (B), or its input pass (I) and weight passes
(W), each with its microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchremat._compat.pipelining import SINGLE, TorchAction, microbatches_of, name_of, orders_of, stages_of
from torchremat.errors import BudgetError
from torchremat.schedules.pipelines import Action, Kind, Order, most_held
from torchremat.tensors.sizes import format_bytes, parse_bytes

_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def in_flight(schedule: object) -> dict[int, int]:
    """Return how many microbatches each stage holds at most, from the forward to the end of the backward.

    `torchremat.plan` plans one microbatch; `microbatch_budget` says how much budget is left for each.

    Args:
        schedule: One of torch.distributed.pipelining; see `attach`.

    Raises:
        UnsupportedError: Its class is unknown.
    """
    return dict(sorted(item for actions in order_of(schedule) for item in most_held(actions).items()))


def microbatch_budget(budget: int | str, *, before_bytes: int, in_flight: int) -> int:
    """Return the budget to plan one microbatch with, such that a stage that holds several stays within its own.

    Each microbatch may add at most the same share to the bytes from before the step, so that all fit together:

    >>> microbatch_budget(1000, before_bytes=400, in_flight=3)
    600

    Args:
        budget: Peak bytes of the stage in a step: an int, or like `"6GiB"`.
        before_bytes: The live bytes before the step: parameters, gradients, the optimizer's state.
        in_flight: How many microbatches the stage holds at most, see the function of that name.

    Raises:
        BudgetError: The budget is not a size, or not above `before_bytes`.
    """
    size = parse_bytes(budget)
    if size <= before_bytes:
        raise BudgetError(
            f"a budget of {format_bytes(size)} for a stage with {format_bytes(before_bytes)} before the step leaves "
            "nothing for its microbatches. Give more, or cut the model into more stages."
        )
    return before_bytes + (size - before_bytes) // in_flight


def order_of(schedule: object) -> Order:
    """Return the actions of each process, without recomputes."""
    return tuple(
        tuple(Action(kind=_KINDS[piece], stage=stage, microbatch=microbatch) for piece, stage, microbatch in order)
        for order in _orders(schedule)
    )


def followed_at_once(schedule: object) -> set[tuple[int, int]]:
    """Return the stages and microbatches whose backward is the process's next action after the forward.

    A recompute would save nothing there: nothing else runs while the saved tensors wait.
    """
    found: set[tuple[int, int]] = set()
    for order in _orders(schedule):
        for (piece, *first), (next_piece, *second) in pairwise(order):
            if piece == "F" and next_piece in "BI" and first == second:
                found.add((first[0], first[1]))
    return found


Step = tuple[str, int, int]


def _orders(schedule: object) -> Iterator[list[Step]]:
    """Yield the pieces that each process runs, with stage and microbatch."""
    name = name_of(schedule)
    if name in SINGLE:
        stages, microbatches = stages_of(schedule)[0].num_stages, microbatches_of(schedule)
        for stage in range(stages):
            # Torch has these orders as data too, but nothing runs by them, and one is wrong: the order of 1F1B's last
            # stage has no forward of microbatch 0.
            ahead = microbatches if name == "ScheduleGPipe" else min(microbatches, stages - stage)
            yield list(_single(stage, microbatches, ahead))
        return
    for actions in orders_of(schedule).values():
        yield list(_pieces(actions))


def _single(stage: int, microbatches: int, ahead: int) -> Iterator[Step]:
    """Yield `ahead` forwards, then a backward and a forward in turn, then the remaining backwards."""
    for microbatch in range(ahead):
        yield "F", stage, microbatch
    for microbatch in range(microbatches):
        yield "B", stage, microbatch
        if ahead + microbatch < microbatches:
            yield "F", stage, ahead + microbatch


def _pieces(actions: Sequence[TorchAction]) -> Iterator[Step]:
    for action in actions:
        if action.sub_actions is not None:
            yield from _pieces(action.sub_actions)
        elif action.computation_type.value in _KINDS and action.microbatch_index is not None:
            yield action.computation_type.value, action.stage_index, action.microbatch_index
