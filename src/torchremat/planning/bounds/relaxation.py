"""Makes a chain of a profile that needs no more than the profile does: for lower bounds, as `chains` is for plans.

    what                                        chains              here
    a storage that several units hold           counts for each     for the first that could hold it
    an input of which a part is saved           counts as a whole   does not count
    bytes outside the plan, negative ones too   cut off at 0        the slack is added to the limit
    code between two units                      as in the profile   takes nothing
    a unit of which backward needs nothing      may cost            costs nothing

For nested regions it assumes the same as the solver's chain: they hold their input until their own backward is over. In
fact they free it a little earlier, so the lowest nested trees may need a little less than this chain.

The least overhead of the executor: in any schedule, an operator runs again in a region, of one call or of many, and

    saved    each tensor that is saved in a region takes a while to put away, in the forward and in the recompute
    begun    where an operator runs again and the one before it does not, a region begins, or a policy is active that
             saw the one before, in the forward and in the recompute, and the saves there take longer

The number of regions depends on the schedule, so their other overhead is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchremat.measuring.step_record import StepRecord
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost, chain_of
from torchremat.planning.simulator.points import ProgramPoint
from torchremat.schedules.bounds import Regions
from torchremat.schedules.chain import Chain, Stage
from torchremat.schedules.dataflow import Dataflow


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A chain, and by how many bytes it may exceed a limit for every tree that is within the limit."""

    chain: Chain
    slack_bytes: int


def underestimate(profile: Profile, cost: Cost) -> Relaxation | None:
    """Return the chain; None if backward visits the units in an order other than the reverse of forward's."""
    order = list(profile.order)
    if order != sorted(order, reverse=True):
        return None
    chain, counted = chain_of(profile, cost), set[int]()
    slack = max(0, -min(profile.extra_bytes.values(), default=0))
    stages = [_stage(profile, unit, cost, stage, counted, slack) for unit, stage in enumerate(chain.stages)]
    if any(
        not size.has_backward or not unit.inputs for unit, size in zip(profile.units.units, profile.sizes, strict=True)
    ):
        # A recompute may end before such units, and then with the last save of one before.
        stages = [replace(stage, forward=min(stage.forward, stage.truncated)) for stage in stages]
    return Relaxation(chain=replace(chain, stages=tuple(stages)), slack_bytes=slack)


def _stage(profile: Profile, unit: int, cost: Cost, stage: Stage, counted: set[int], slack: int) -> Stage:
    own, size, trace = profile.units.units[unit], profile.sizes[unit], profile.units.trace
    links, costs = dict(own.links), profile.costs[unit]

    def take(storages: set[int]) -> set[int]:
        """Count storages not counted yet; storages that live to the end under any plan never count."""
        found = {storage for storage in storages if storage in trace.died} - counted
        counted.update(found)
        return found

    inputs = take(set(own.inputs))
    linked = {storage for storage in inputs if links.get(storage) == unit - 1}
    external = inputs - linked
    saved = take({*size.saved, *size.left} - set(own.inputs))

    def bytes_of(storages: set[int]) -> int:
        return sum(trace.storage_bytes[storage] for storage in storages)

    def outside(point: ProgramPoint) -> int:
        return profile.extra_bytes.get((point, unit), -slack) + slack

    during = outside(ProgramPoint.BACKWARD)
    base = min(during, outside(ProgramPoint.RECOMPUTE))
    option = replace(
        stage.options[0],
        saved_bytes=size.inside_bytes + bytes_of(saved),
        saves_input=bool(linked) and linked <= size.saved,
        saves_external=bool(external) and external <= size.saved,
        backward_peak_bytes=during - base + max(0, profile.after_bytes.get((ProgramPoint.BACKWARD, unit), 0)),
    )
    full, truncated = (
        (costs.seconds, costs.seconds_truncated) if cost == "seconds" else (costs.flops, costs.flops_truncated)
    )
    return replace(
        stage,
        forward=full if size.has_backward else 0.0,
        truncated=truncated if size.has_backward else 0.0,
        linked_bytes=bytes_of(linked),
        external_bytes=bytes_of(external),
        output_bytes=0,
        options=(option,),
        forward_base_bytes=outside(ProgramPoint.FORWARD),
        backward_base_bytes=base,
    )


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


def saves_of(trace: StepRecord) -> list[int]:
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
