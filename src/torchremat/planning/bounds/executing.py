"""The least overhead of the executor where operators run again, for bounds in seconds.

In any schedule, an operator runs again in a region, of one call or of many, and

    saved    each tensor that is saved in a region takes a while to put away, in the forward and in the recompute
    begun    where an operator runs again and the one before it does not, a region begins, or a policy is active that
             saw the one before, in the forward and in the recompute, and the saves there take longer

The number of regions depends on the schedule, so their other overhead is left out.
"""

from __future__ import annotations

from torchremat.planning.profiles.operators import OperatorTrace
from torchremat.planning.profiles.reading import Profile
from torchremat.schedules.bounds import Regions
from torchremat.schedules.dataflow import Dataflow


def regions_of(profile: Profile, flow: Dataflow) -> Regions | None:
    """Return the overhead of regions in seconds; None if the operators of a plain step differ from the profile's."""
    trace, overheads = profile.units.trace.operators, profile.overheads
    if [run.name for run in trace.runs] != [operator.name for operator in flow.operators]:
        return None
    saves = saves_of(trace)
    passed_s = overheads.collected_s + overheads.replayed_s
    return Regions(
        saved_cost=tuple(count * overheads.saved_s for count in saves),
        begun_cost=tuple(min(overheads.region_s, passed_s + count * overheads.chosen_s) for count in saves),
    )


def saves_of(trace: OperatorTrace) -> list[int]:
    """Return, for each operator, how many tensors a recompute that runs it saves for certain.

    A recompute ends with a save. So of the tensors saved between two operators, the first one's results count there,
    and the rest where the second reads them.
    """
    found = [0] * len(trace.runs)
    for save in trace.saves:
        before = save.position - 1
        if before >= 0 and save.value in trace.runs[before].makes:
            found[before] += 1
        elif save.position < len(trace.runs) and save.value in trace.runs[save.position].reads:
            found[save.position] += 1
    return found
