"""One forward of a pipe: the cells, clock by clock.

              clock 0    1    2    3    4        microbatches 0-2 on stages 0-2; the cells of a clock run at the same
    stage 0    0,0  1,0  2,0                     time. Before each: the edges that make backward go through the same
    stage 1         0,1  1,1  2,1                clocks the other way around, and copies onto the device of its stage.
    stage 2              0,2  1,2  2,2

Around each cell, in the order in which they are made (backward runs them in reverse):

    depend      on the microbatch before, which has just left the stage       see `ordering`
    copy        onto the device, on the copy streams of the microbatch
    depend      so that its gradient is copied back when it is needed         see `ordering`
    wait        the device computes when the copy is there
    (cell)
    wait        the next copy starts when the device has computed
    precede     see `cells`                                                   backward: before it waits for the copy
    depend      on copies of this clock, and on the cell before               see `ordering`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import nn

from torchremat._compat.accelerators import Stream, accelerator_of
from torchremat._compat.streams import current_stream, use_stream
from torchremat.pipeline.cells import precede, run_cell
from torchremat.pipeline.copying import copy_all, wait_all
from torchremat.pipeline.event_recorder import Passage, Recorder
from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.ordering import Ordering
from torchremat.pipeline.skip import PortalTracker, SkipLayout
from torchremat.pipeline.skip.layouts import Key
from torchremat.pipeline.workers import Worker, spawn_workers
from torchremat.regions.settings import Settings
from torchremat.schedules.pipelines import Action, Kind, Order, clock_cycles

# NOTE [ Recomputes one at a time ]
# Of the nodes that could run, autograd takes the one that the device's thread made last, with a separate count for each
# thread. So the worker that made a cell also makes the nodes that lead to its recompute, behind the cell: then the
# nodes of the cell before it in backward run first. Made elsewhere, they would run ahead of these nodes, and if no edge
# from the end of that cell holds them back, as in a stage whose input requires no grad, a device would hold all
# recomputes at once. See NOTE [ Backward in reverse ]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs the microbatches of one batch through the stages.

    Attributes:
        copy_streams: By stage and microbatch.
        settings: By stage and microbatch, how a cell is recomputed; None if it is not.
    """

    stages: Sequence[nn.Module]
    devices: Sequence[torch.device]
    layout: SkipLayout
    copy_streams: Sequence[Sequence[Stream]]
    settings: Sequence[Sequence[Settings | None]]
    recorder: Recorder
    _open_passages: defaultdict[torch.device, list[Passage]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )

    def run(self, microbatches: list[Microbatch]) -> None:
        """Run the stages; each output replaces its input."""
        portals = [PortalTracker(self.layout) for _ in microbatches]
        streams = [current_stream(device) for device in self.devices]
        ordering = Ordering(self.devices)
        with spawn_workers(self.devices) as workers:
            for places in clock_cycles(len(microbatches), len(self.stages)):
                ordering.next_clock()
                for number, stage in places:
                    self._lead(microbatches[number], portals[number], ordering, number, stage)
                self._compute(workers, streams, ordering, microbatches, portals, places)

    def order(self, *, has_backward: bool) -> Order:
        """Return the actions of each device in a step: the clocks, and then the same clocks in reverse order."""
        count = max((len(settings) for settings in self.settings), default=0)
        cells = [cell for clock in clock_cycles(count, len(self.stages)) for cell in clock]
        actions = [Action(kind="forward", stage=stage, microbatch=number) for number, stage in cells]
        for number, stage in reversed(cells) if has_backward else ():
            if self.settings[stage][number] is not None:
                actions.append(Action(kind="recompute", stage=stage, microbatch=number))
            actions.append(Action(kind="backward", stage=stage, microbatch=number))
        devices = dict.fromkeys(self.devices)
        return tuple(tuple(action for action in actions if self.devices[action.stage] == device) for device in devices)

    def _lead(self, given: Microbatch, portals: PortalTracker, ordering: Ordering, number: int, stage: int) -> None:
        """Lead a microbatch to a stage."""
        given.tensors = ordering.leaving(stage, given.tensors)
        if not stage:
            return
        source, target = self.copy_streams[stage - 1][number], self.copy_streams[stage][number]
        copy = self._passage(stage, number, "copy", "copy", target)
        with copy.runs():
            portals.copy_to(stage, lambda source: (self.copy_streams[source][number], target), ordering)
            given.tensors = copy.returned(copy_all(copy.given(given.tensors), source, target))
        given.tensors = ordering.arrived(stage - 1, given.tensors)

    def _compute(
        self,
        workers: Sequence[Worker],
        streams: Sequence[Stream],
        ordering: Ordering,
        microbatches: list[Microbatch],
        portals: Sequence[PortalTracker],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Run the cells of one clock."""
        running: list[Future[Microbatch]] = []
        try:
            for number, stage in places:
                device, stream = self.devices[stage], streams[stage]
                with accelerator_of(device).use(device), use_stream(stream):
                    if stage:
                        one = microbatches[number]
                        one.tensors = wait_all(one.tensors, self.copy_streams[stage][number], stream)
                    given = Microbatch.of((microbatches[number].value, portals[number].incoming(stage)))
                    microbatches[number] = Microbatch((), [])  # the cell has it now
                    passage = self._passage(stage, number, "forward", "backward", stream)
                    given.tensors = passage.given(given.tensors)
                running.append(
                    workers[stage].submit(partial(self._run, stage, number, given, passage, stream, ordering))
                )
                del given
            wait(running)
            for number, stage in places:
                ran = _result(running, stage, number)
                output, stashed = cast("tuple[object, dict[Key, object]]", ran.value)
                portals[number].stashed(stage, stashed)
                microbatches[number] = Microbatch.of(output)
        finally:
            running.clear()  # an error that is raised keeps this frame, and the frame kept the error

    def _run(
        self, stage: int, number: int, given: Microbatch, passage: Passage, stream: Stream, ordering: Ordering
    ) -> Microbatch:
        """Run a cell, and make the nodes behind it; the worker of its device calls it."""
        with use_stream(stream):
            with passage.runs():
                settings, label = self.settings[stage][number], _label(stage, number)
                ran, region = run_cell(self.stages[stage], self.layout, stage, given, settings, label)
            # See NOTE [ Recomputes one at a time ]
            ran.tensors = passage.returned(ran.tensors)
            if stage + 1 < len(self.stages):
                ran.tensors = wait_all(ran.tensors, stream, self.copy_streams[stage][number])
            if region is not None:
                ran.tensors = precede(region, ran.tensors, passage.recomputes)
            ran.tensors = ordering.ran(stage, ran.tensors)
        return ran

    def _passage(self, stage: int, number: int, forward: Kind, backward: Kind, stream: Stream) -> Passage:
        return Passage(
            self.recorder,
            stage,
            number,
            forward=forward,
            backward=backward,
            stream=stream,
            open_passages=self._open_passages[self.devices[stage]],
        )


def _label(stage: int, number: int) -> str:
    """Return the words for a cell in messages."""
    return f"of stage {stage}, microbatch {number}"


def _result(running: list[Future[Microbatch]], stage: int, number: int) -> Microbatch:
    """Return the result of the first one, and release it.

    An error refers to this frame, and a frame that refers to the future would refer to the error: only the cycle
    collector would free the tensors of all frames between.
    """
    try:
        return running.pop(0).result()
    except BaseException as error:
        error.add_note(f"This was raised in the forward {_label(stage, number)} of a pipe.")
        raise
