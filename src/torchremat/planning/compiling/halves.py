"""Makes the two graphs of a split, counts their peak, and searches for a split that fits.

A limit applies to the compiler's programs of the two graphs, not to their operators. `Saver` knows operators. It knows
only the plainest kernels, and no copies to other layouts, so its peak is off, either way. The programs of a split give
the live bytes while each operator runs; with these, `Saver` is exact for this split and better for splits near it. A
few such rounds come close to the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from torchremat._compat.inductor import partition_saving
from torchremat.errors import CompileWarning, warn
from torchremat.planning.compiling.graphs import JointReading
from torchremat.planning.compiling.programs import needs_of_programs
from torchremat.planning.compiling.trials import Trials
from torchremat.schedules.joint import NO_ADJUSTMENTS, Adjustments, Split, adjustments_of, split
from torchremat.schedules.saved_values import Saver


@dataclass(frozen=True, kw_only=True)
class Halves:
    """The two graphs made from a joint one.

    Attributes:
        split: The saved values, and the operators that run again.
        forward: The graph of the forward.
        backward: The graph of the backward.
        peak_bytes: The peak of both as they will run.
        beside: Bytes live in addition to the values of the joint list, where known.
    """

    split: Split
    forward: GraphModule
    backward: GraphModule
    peak_bytes: int
    beside: Adjustments = NO_ADJUSTMENTS


class Halver:
    """Makes the two graphs of any split of one joint graph.

    `joint` is cleaned up, and `reading` is the same as data.
    """

    def __init__(self, joint: GraphModule, reading: JointReading, num_fwd_outputs: int) -> None:
        self.reading = reading
        self._joint = joint
        self._num_fwd_outputs = num_fwd_outputs
        self._reads_programs = reading.fuses
        self._trials = Trials(reading.device)

    def of(self, found: Split) -> Halves:
        """Make the graphs of a split, with recomputes as late as possible."""
        nodes = [self.reading.nodes[value] for value in sorted(found.saved) if value in self.reading.nodes]
        return self._halves(found, *partition_saving(self._joint, nodes, self._num_fwd_outputs))

    def given(self, forward: GraphModule, backward: GraphModule) -> Halves:
        """Take graphs that other code made."""
        found = split(self.reading.joint, self.reading.saved(forward.graph, self._num_fwd_outputs))
        return self._halves(found, forward, backward)

    def _halves(self, found: Split, forward: GraphModule, backward: GraphModule) -> Halves:
        """The peak of graphs: by their operators, or by the programs that a compiler writes for them."""
        if self._reads_programs:
            try:
                needs = needs_of_programs(self.reading, forward, backward, self._num_fwd_outputs, self._trials)
            except Exception as error:  # noqa: BLE001  any internal of a compiler may change
                self._reads_programs = False
                reason = str(error).partition("\n")[0]
                warn(
                    f"Inductor's code for the graphs could not be read ({type(error).__name__}: {reason}), so bytes "
                    "are counted from their operators. The real peak may be above the predicted one: leave a margin.",
                    CompileWarning,
                )
            else:
                beside = adjustments_of(self.reading.joint, found, needs.forward, needs.backward)
                return Halves(
                    split=found, forward=forward, backward=backward, peak_bytes=needs.peak_bytes, beside=beside
                )
        return Halves(split=found, forward=forward, backward=backward, peak_bytes=found.peak_bytes)


# For each, a compiler writes two programs, which takes some seconds for a thousand operators.
_MOST_TRIES = 5
_MOST_LOWEST = 3
# No try starts after this.
_CAP_S = 60.0
# Share of the recompute cost: a smaller gain is not worth another try.
_WORTH = 0.02
# Share of a step's bytes without parameters and inputs: a split above the limit by less may still fit.
_NEAR = 0.03


def aimed(saver: Saver, limit_bytes: int, plain: Halves, make: Callable[[Split], Halves]) -> Halves:
    """Return the split found of least cost whose programs fit; if none fits, the lowest.

    `plain`, the split in which no operator runs twice, is known not to fit.
    """
    made = {plain.split.saved: plain}

    def tried(found: Split) -> Halves:
        if found.saved not in made:
            made[found.saved] = make(found)
        return made[found.saved]

    best: Halves | None = None
    last = plain
    until_s = time.monotonic() + _CAP_S
    while len(made) <= _MOST_TRIES and time.monotonic() < until_s:
        saver = saver.told(last.beside)
        # The part of the last peak that its operators do not explain.
        off = last.peak_bytes - split(saver.joint, last.split.saved).peak_bytes
        below = best.split.cost * (1 - _WORTH) if best else math.inf
        found = next((one for one in _candidates(saver, limit_bytes - off, made, below) if one.saved not in made), None)
        if found is None:
            break
        last = tried(found)
        if last.peak_bytes <= limit_bytes:
            best = last
    return best or _lowest(saver, limit_bytes, plain, tried)


def _candidates(
    saver: Saver, target_bytes: int, made: Mapping[frozenset[int], Halves], below: float
) -> Iterator[Split]:
    """Yield splits that cost less than `below` and may fit: first the one that should."""
    found = saver.solve(target_bytes)
    known = made.get(found.saved) if found is not None else None
    if known is not None and known.peak_bytes > target_bytes:
        found = saver.solve(2 * target_bytes - known.peak_bytes)
    if found is not None and found.cost < below:
        yield found
    near = target_bytes + _NEAR * (target_bytes - saver.joint.fixed_bytes)
    yield from (one for one in saver.nearly(target_bytes, below_cost=below) if one.peak_bytes < near)


def _lowest(saver: Saver, limit_bytes: int, plain: Halves, tried: Callable[[Split], Halves]) -> Halves:
    """Return the split found with the lowest peak of its programs, or the first one that fits.

    These splits do not depend on the limit, so the smallest budget that works also works when it is requested.
    """
    last = lowest = plain
    for _ in range(_MOST_LOWEST):
        last = tried(saver.told(last.beside).floor)
        if last.peak_bytes >= lowest.peak_bytes:
            break
        lowest = last
        if lowest.peak_bytes <= limit_bytes:
            break
    return lowest
