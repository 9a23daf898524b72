"""A profile as a chain of scalars, for the solvers.

Scalars lose the facts that depend on storages (shared inputs, skips, live ranges), so the exact interpreter judges each
tree that a solver returns, never the chain.
"""

from __future__ import annotations

from typing import Literal, get_args

from torchremat.errors import UnsupportedError
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.points import OptionBytes, ProgramPoint
from torchremat.planning.simulator.prediction import extra_at
from torchremat.schedules.chain import Chain, Option, Stage

Cost = Literal["seconds", "flops"]


# A search for flops breaks ties by the seconds that plans would take on a generic device, so the plan is the same
# everywhere: the seconds of a forward weigh as much as this share of its flops.
_SECONDS_SHARE = 1e-3


def check_cost(cost: object) -> None:
    """Raise an UnsupportedError if a cost is not valid."""
    if cost not in get_args(Cost):
        raise UnsupportedError(f"cost={cost!r}: allowed are 'seconds' and 'flops'.")


def amount(profile: Profile, cost: Cost, *, seconds: float, nominal_s: float, flops: float) -> float:
    """Return the quantity to minimise: seconds, or flops with a small weight of the nominal seconds."""
    if cost == "seconds":
        return seconds
    return flops + nominal_s * _SECONDS_SHARE * profile.units.trace.flops / max(profile.nominal_forward_s, 1e-9)


def chain_of(profile: Profile, cost: Cost) -> Chain:
    """Return the chain of a profile; its bytes are relative to the start of the step."""
    seen: set[int] = set()
    stages = tuple(_stage(profile, unit, cost, seen) for unit in range(len(profile.units.units)))
    tails = [
        profile.extra_bytes[key] + profile.after_bytes[key]
        for key in ((ProgramPoint.LEFT, len(stages) - 1), (ProgramPoint.END, 0))
    ]
    return Chain(stages=stages, tail_bytes=max(0, *tails))


def _stage(profile: Profile, unit: int, cost: Cost, seen: set[int]) -> Stage:
    own, size, costs = profile.units.units[unit], profile.sizes[unit], profile.costs[unit]
    trace = profile.units.trace
    links = dict(own.links)
    nominal_s, nominal_truncated_s = profile.nominal_s[unit]
    options = profile.options[unit] if profile.options else ()
    # A storage that lives to the end whatever the plan is costs nothing to hold.
    counting = [storage for storage in own.inputs if storage in trace.died]
    linked = {storage for storage in counting if links.get(storage) == unit - 1}
    external = set(counting) - linked - seen
    # A storage that several units take is charged to the first that may hold it.
    seen |= external
    own_saves = size.saved - set(own.inputs)
    default = Option(
        saved_bytes=size.inside_bytes
        + sum(trace.storage_bytes[s] for s in (*own_saves, *size.left) if s in trace.died),
        saves_input=bool(linked & size.saved),
        saves_external=bool(external & size.saved),
        cost=0.0,
        forward_peak_bytes=size.full_peak_bytes,
        truncated_peak_bytes=size.truncated_peak_bytes,
        backward_peak_bytes=max(
            0, profile.after_bytes.get((ProgramPoint.BACKWARD, unit), 0), _released_peak(profile, unit)
        ),
    )
    return Stage(
        forward=amount(profile, cost, seconds=costs.seconds, nominal_s=nominal_s, flops=costs.flops),
        truncated=amount(
            profile, cost, seconds=costs.seconds_truncated, nominal_s=nominal_truncated_s, flops=costs.flops_truncated
        ),
        linked_bytes=sum(trace.storage_bytes[storage] for storage in linked),
        external_bytes=sum(trace.storage_bytes[storage] for storage in external),
        output_bytes=sum(trace.storage_bytes[storage] for storage in own.outputs),
        drop_peak_bytes=size.drop_peak_bytes,
        options=(default, *(_option(profile, unit, one, default, cost) for one in options)),
        forward_base_bytes=extra_at(profile, (ProgramPoint.FORWARD, unit)),
        backward_base_bytes=extra_at(profile, (ProgramPoint.BACKWARD, unit)),
    )


def _option(profile: Profile, unit: int, one: OptionBytes, default: Option, cost: Cost) -> Option:
    """Return an option as scalars: a region of one unit that holds its inputs and some tensors that the unit makes."""
    trace, size = profile.units.trace, profile.sizes[unit]
    saved_bytes = one.kept_bytes + sum(trace.storage_bytes[s] for s in one.kept if s in trace.died)
    recomputed_bytes = max(0, default.saved_bytes - saved_bytes)
    return Option(
        saved_bytes=saved_bytes,
        saves_input=True,
        saves_external=True,
        cost=amount(profile, cost, seconds=one.seconds, nominal_s=one.nominal_s, flops=one.flops),
        forward_peak_bytes=size.dropping_bytes(1, one),
        truncated_peak_bytes=max(0, one.recompute_peak_bytes),
        backward_peak_bytes=max(
            one.early_peak_bytes,
            one.recompute_peak_bytes,
            recomputed_bytes + max(0, one.late_peak_bytes, _released_peak(profile, unit)),
        ),
        nests=False,
    )


def _released_peak(profile: Profile, unit: int) -> int:
    """Return the peak of the code between a unit and the previous one, when the unit's own tensors are freed."""
    during, after = (ProgramPoint.BACKWARD, unit), (ProgramPoint.RELEASED, unit)
    if during not in profile.after_bytes:
        return 0
    released = profile.extra_bytes[after] + profile.after_bytes[after] - profile.extra_bytes[during]
    return released - profile.sizes[unit].inside_bytes
