"""The predicted cost and peak of a tree: the exact interpreter with the numbers of a profile."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import cast

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.step_runs import StepRuns, what_at
from torchremat.planning.simulator.offload_choices import NO_OFFLOADS, Offloads
from torchremat.planning.simulator.points import Key, Live, ProgramPoint
from torchremat.planning.simulator.simulator import MemorySimulator
from torchremat.schedules.chain import RegionNode, Tree, kept

_BEFORE_BACKWARD = (ProgramPoint.FORWARD, ProgramPoint.LEFT, ProgramPoint.END)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted bytes and time of a step under a tree.

    Attributes:
        peak_bytes: The peak, relative to the start of the step.
        where: What runs at the peak.
        kept_bytes: Live bytes at the end of the forward, relative to the start of the step.
        forward_bytes: Highest live bytes before backward begins; the larger of this and `backward_bytes` is the peak.
        backward_bytes: Highest live bytes from there on.
        seconds: Seconds spent in recomputes.
        nominal_s: The same on a generic device, see `traces.nominal_seconds`.
        flops: Flops spent in recomputes.
        calls: Number of unit forwards that recomputes run; of units recomputed, if runs of the step tell what it needs.
        moving_s: Seconds that copies into stores and back add: compute time that they displace, and waiting.
    """

    peak_bytes: int
    where: str
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    nominal_s: float
    flops: int
    calls: int
    moving_s: float = 0.0


def walk_of(profile: Profile, tree: Tree, offloads: Offloads = NO_OFFLOADS) -> MemorySimulator:
    """Return the simulator of a step under `tree`, with some of the kept units in stores."""
    return MemorySimulator(
        profile.units, profile.sizes, profile.order, profile.lifetimes, tree, profile.options, offloads
    )


def predict(profile: Profile, tree: Tree, offloads: Offloads = NO_OFFLOADS) -> Prediction:
    """Return the prediction for a step under `tree`, with some of the kept units in stores; omits `moving_s`."""
    return cast("Prediction", predict_within(profile, tree, sys.maxsize, offloads))


def predict_within(
    profile: Profile, tree: Tree, limit_bytes: int, offloads: Offloads = NO_OFFLOADS
) -> Prediction | None:
    """Return the prediction if its peak is at most a limit; above it, the step is followed no further."""
    if profile.runs is not None:
        return _by_run(profile, profile.runs, tree, limit_bytes)
    peak, where, kept = profile.start_bytes, "code before the first module", 0
    highest = {True: peak, False: 0}  # by whether backward has not begun
    seconds, nominal_s, flops, calls = 0.0, 0.0, 0, 0
    for unit, option in chosen_options(tree):
        seconds += profile.options[unit][option - 1].seconds
        nominal_s += profile.options[unit][option - 1].nominal_s
        flops += profile.options[unit][option - 1].flops
    for state in walk_of(profile, tree, offloads):
        if isinstance(state, Live):
            live = live_bytes(profile, state)
            over = over_bytes(profile, state)
            if state.key[0] is ProgramPoint.END:
                kept = live
            before = state.key[0] in _BEFORE_BACKWARD
            highest[before] = max(highest[before], live + over)
            if live + over > peak:
                peak, where = live + over, state.what
            if peak > limit_bytes:
                return None
        else:
            calls += 1
            if not state.option:
                cost = profile.costs[state.unit]
                seconds += cost.seconds_truncated if state.truncated else cost.seconds_inside
                nominal_s += profile.nominal_s[state.unit][state.truncated]
                flops += cost.flops_truncated if state.truncated else cost.flops
    return Prediction(
        peak_bytes=peak,
        where=where,
        kept_bytes=kept,
        forward_bytes=highest[True],
        backward_bytes=highest[False],
        seconds=seconds,
        nominal_s=nominal_s,
        flops=flops,
        calls=calls,
    )


def _by_run(profile: Profile, runs: StepRuns, tree: Tree, limit_bytes: int) -> Prediction | None:
    run, plain = runs.under(tree), runs.plain_tree
    peak_bytes = run.peak_beyond(run.before)
    if peak_bytes > limit_bytes:
        return None
    again = [keep.stage for node in tree if isinstance(node, RegionNode) for keep in kept((node,))]
    return Prediction(
        peak_bytes=peak_bytes,
        where=what_at(run, run.peak_at) if len(run) else "the step",
        kept_bytes=run.kept_bytes,
        forward_bytes=run.forward_peak_bytes,
        backward_bytes=run.backward_peak_bytes,
        seconds=max(0.0, runs.seconds(tree)[1] - runs.seconds(plain)[1]) if again else 0.0,
        nominal_s=sum(profile.nominal_s[unit][0] for unit in again),
        flops=runs.flops(tree) - runs.flops(plain),
        calls=len(again),
    )


def chosen_options(tree: Tree) -> list[tuple[int, int]]:
    """Return the units of a tree that are kept by one of their options, with the option."""
    return [(node.stage, node.option) for node in kept(tree) if node.option]


def live_bytes(profile: Profile, state: Live) -> int:
    """Return the live bytes at a program point, relative to the start of the step."""
    extra = profile.extra_bytes[state.key]
    if state.key[0] is ProgramPoint.BACKWARD:
        # A storage that was freed in the watched recompute, and that no unit is known to replace, may be live in other
        # trees: a block that is called twice sets an attribute that it has set before.
        extra = max(extra, profile.extra_bytes.get((ProgramPoint.RECOMPUTE, state.key[1]), extra))
    return extra + state.held_bytes


def over_bytes(profile: Profile, state: Live) -> int:
    """Return the peak from a program point until the next one, over the live bytes at the first."""
    unit = state.key[1]
    backward = profile.backwards.get(unit)
    if state.over_bytes is not None and (backward is None or not state.since):
        return state.over_bytes
    after_bytes = profile.after_bytes[state.key]
    if state.stays is None:
        if backward is None or not (state.inputs or state.since):
            return after_bytes
        return backward.without_inputs(state.inputs, state.since)
    if backward is None:
        staying = sum(profile.units.trace.storage_bytes[storage] for storage in state.stays)
        return after_bytes + staying + profile.sizes[unit].copied_bytes
    highest = backward.highest_bytes(state.stays)
    less = highest - backward.highest_bytes(state.stays, state.lets_go) if state.lets_go else 0
    return max(after_bytes, highest) - less


def extra_at(profile: Profile, key: Key) -> int:
    """Return the bytes that are live at a program point whatever the plan is; 0 if it does not exist."""
    return max(0, profile.extra_bytes.get(key, 0))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tree over the units of a profile, with its prediction; `cost` is in the unit of the planner's cost.

    `offloads` are the kept units whose saved tensors go to a store.
    """

    profile: Profile
    tree: Tree
    prediction: Prediction
    cost: float
    offloads: Offloads = field(default_factory=lambda: NO_OFFLOADS, hash=False)

    @property
    def recomputes_once(self) -> bool:
        """Whether no more units run again than there are: a recompute in parts is never cheaper than that."""
        return self.prediction.calls <= len(self.profile.units.units)

    @property
    def slowdown(self) -> float:
        """Predicted seconds of a step over a plain step's."""
        added_s = self.prediction.seconds + self.prediction.moving_s
        return 1 + added_s / self.profile.seconds if self.profile.seconds else 1.0


def rank_of_bytes(one: Candidate) -> tuple[int, float]:
    """Return what orders candidates where the lowest peak is sought."""
    return one.prediction.peak_bytes, one.cost
