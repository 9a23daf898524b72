"""The two graphs of a split, and their peak."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from torchremat._compat.inductor import partition_saving
from torchremat.errors import CompileWarning, warn
from torchremat.planning.compiling.graphs import JointReading
from torchremat.planning.compiling.running import needs_of_programs
from torchremat.planning.compiling.trials import Trials
from torchremat.schedules.joint import NO_ADJUSTMENTS, Adjustments, Split, adjustments_of, split


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

    Args:
        joint: The joint graph, cleaned up.
        reading: The joint graph, read as data.
        num_fwd_outputs: How many of its outputs are the forward's.
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
        peak = self.reading.peak_bytes(forward.graph, backward.graph)
        return Halves(split=found, forward=forward, backward=backward, peak_bytes=peak)
