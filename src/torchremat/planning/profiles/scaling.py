"""Seconds of a profile: from those of a watched step to those of a step that runs alone.

NOTE [ Steps that the host limits ]
A device runs what the host launches, and the slower of the two sets the time of a step. The seconds that were watched
on a device are its kernels' own, whatever the host needed. If a step that recomputes each unit would keep the host
busy for longer than the device, all seconds are the host's instead: the same for each operator that is launched, and a
region's overhead on top, which a device that is busy would hide. A plan between the two is predicted as too slow or too
fast by at most the difference, and steps are mostly far on one side.

NOTE [ What a region takes ]
Each region does the same for itself and for each tensor that is saved in it, on which `overheads` has a figure of this
process. More than all that is the state that its call sees, in most models: modules, generators, flags, autocast. It is
captured before the call, looked at after it, restored for the recompute, and put back. How long depends on the module,
so the watched step has a clock there, which stops while calls run. Both are the host's seconds, whatever was watched.
"""

from __future__ import annotations

from dataclasses import replace

from torchremat.planning.devices.machines import ForwardSeconds
from torchremat.planning.profiles.reading import Profile, UnitCosts

# The host's seconds of a backward without recomputes, as a multiple of the forward's: it launches more operators, but
# runs no Python.
_BACKWARD_SHARE = 1.0


def scaled(profile: Profile, took: ForwardSeconds | None) -> Profile:
    """Return the profile with the seconds of a step that is not watched.

    Args:
        profile: The profile, with the seconds that were watched.
        took: The seconds of an unwatched forward. Without it, the watched seconds are those of kernels alone, and the
            overhead of regions is missing.
    """
    if took is None:
        pairs = zip(profile.costs, _overheads(profile), strict=True)
        return replace(profile, costs=tuple(_in_region(cost, over_s) for cost, over_s in pairs))
    allocations = profile.units.trace.allocations
    if allocations is not None and allocations.has_device_time:
        launched = _launched(profile, took.launched_s)
        return launched if _longest_s(launched) > _longest_s(profile) else profile
    factor = took.done_s / profile.forward_seconds
    alone = (
        replace(cost, seconds_truncated=cost.seconds_truncated - cost.region_s, region_s=0.0) for cost in profile.costs
    )
    own = zip(alone, _overheads(profile), profile.state_s, strict=True)
    costs = tuple(_in_region(cost.slower(factor), overhead_s, state_s) for cost, overhead_s, state_s in own)
    return replace(profile, costs=costs, seconds=profile.seconds * factor, forward_seconds=took.done_s)


def _launched(profile: Profile, forward_s: float) -> Profile:
    """Return the profile with the host's seconds. See NOTE [ Steps that the host limits ]."""
    operator_s = forward_s / max(1, len(profile.units.trace.operators.runs))
    launched = (
        replace(
            cost,
            seconds=operator_s * len(operators),
            seconds_truncated=operator_s * sum(index < ends for index in operators),
            seconds_backward=_BACKWARD_SHARE * operator_s * len(operators),
            region_s=0.0,
        )
        for cost, (operators, ends) in zip(profile.costs, profile.reached, strict=True)
    )
    own = zip(launched, _overheads(profile), profile.state_s, strict=True)
    costs = tuple(_in_region(cost, overhead_s, state_s) for cost, overhead_s, state_s in own)
    seconds = (1 + _BACKWARD_SHARE) * forward_s
    return replace(profile, costs=costs, seconds=seconds, forward_seconds=forward_s)


def _longest_s(profile: Profile) -> float:
    """The seconds of a step that recomputes each unit."""
    return profile.seconds + sum(cost.seconds_truncated for cost in profile.costs)


def _in_region(cost: UnitCosts, overhead_s: float, state_s: float = 0.0) -> UnitCosts:
    """Return costs with what a region takes. See NOTE [ What a region takes ]."""
    region_s = overhead_s + state_s
    return replace(
        cost,
        seconds_truncated=cost.seconds_truncated + region_s,
        state_s=state_s,
        region_s=cost.region_s + region_s,
    )


def _overheads(profile: Profile) -> list[float]:
    """The overhead of a region around each unit, without state."""
    return [profile.overheads.seconds(len(profile.units.saved(unit))) for unit in range(len(profile.costs))]
