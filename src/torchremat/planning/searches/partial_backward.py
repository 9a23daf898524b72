"""The backward of a unit that holds some of what it saves, parted by the recompute of the rest.

Autograd asks for saved tensors in an order that does not depend on the plan, and the first that is not held recomputes
all of those. So of the watched backward, in which everything is recomputed first,

    until then   what is not held is not there: it does not go either. Nor goes what is held for the recompute as well
    recompute    begins with what is live by then: gradients on their way, and without what is gone
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
    """Highest live bytes of a backward, in its parts.

    Attributes:
        early_bytes: Until the recompute, over what is live at the beginning.
        recompute_bytes: During the recompute, over the same.
        late_bytes: From then on, over what would be live at the beginning if all that is saved were there.
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
        backward: As it was watched.
        saves: The values of `flow` that autograd saves, in the order of the saves; None if nobody knows.
        flow: The operators of the unit.
        selection: Which of them are held.
        replay: The same with bytes.
    """
    whole = backward.live_bytes()
    if not selection.ends:
        return PartialBackward(early_bytes=0, recompute_bytes=0, late_bytes=int(whole.max()))
    there = held_values(flow, selection.held)
    asked = [] if saves is None else [at for save, at in backward.asked_at.items() if saves[save] not in there]
    if saves is None or not asked:
        # It may be asked for at any time, with everything there that ever is.
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
