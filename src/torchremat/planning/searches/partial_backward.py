"""The backward of a unit that holds some of its saved tensors, split by the recompute of the rest.

Autograd asks for saved tensors in an order that does not depend on the plan, and the first one not held recomputes all
that are not held. So the watched backward, in which everything is recomputed first, divides into

    until then   tensors not held are not there, so they are not freed. Nor are tensors held for the recompute as well
    recompute    begins with the live bytes by then: gradients in flight, and without freed tensors
    from then    as it was watched
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchremat.planning.profiles.backwards import UnitBackward
from torchremat.planning.searches.replays import SelectionReplay
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.operator_selection import OperatorSelection, held_values


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialBackward:
    """Peaks of the parts of a backward.

    Attributes:
        early_bytes: Peak until the recompute, over the live bytes at the beginning.
        recompute_bytes: Peak of the recompute, over the same.
        late_bytes: Peak from then on, over the bytes that would be live at the beginning if all saved tensors were
            there.
    """

    early_bytes: int
    recompute_bytes: int
    late_bytes: int


def in_parts(
    backward: UnitBackward,
    saves: Sequence[int] | None,
    flow: Dataflow,
    selection: OperatorSelection,
    replay: SelectionReplay,
) -> PartialBackward:
    """Return the parts of a backward under a selection.

    Args:
        backward: The watched backward.
        saves: The values of `flow` that autograd saves, in the order of the saves; None if unknown.
        flow: The operators of the unit.
        selection: Which of them are held.
        replay: The selection with bytes.
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
