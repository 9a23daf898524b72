"""The interpreter: runs a schedule on integers, checks every action, and returns its cost and its peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from torchremat.errors import ScheduleError
from torchremat.schedules.actions import Action, BackwardAction, ForwardAction, HoldAction, RecomputeAction, schedule
from torchremat.schedules.chain import Chain, KeepNode, Option, RegionNode, Tree

# NOTE [ What a tree means ]
#
# The interpreter, the solvers and the brute force of the tests agree on these rules:
#
#   1. First forward. Stages run in order, at no cost. A kept stage holds from then on its saved bytes, its linked
#      input if its option saves that, and its external inputs if its option saves those. A region holds, from just
#      before its first stage, the linked input of its first stage and the external inputs of all its stages; its
#      stages run and save nothing, however the region looks inside.
#   2. Inputs. While a stage runs forward, its inputs are live no matter what holds them, and count once: the linked
#      input counts in addition to held bytes, except for the first stage of a region, whose region holds it; the
#      external inputs count in addition to held bytes for a kept stage of the top level, and inside a region its
#      outermost region holds them.
#   3. Peak of a forward. Base + held + inputs that count in addition + the peak of the run (full, stopped or dropped).
#      A dropped stage is also live at its exit: base + held + its output. Base is `forward_base_bytes` of the stage in
#      the first forward, and `backward_base_bytes` of the *last stage of the region* in a recompute.
#   4. Tail. Held + `tail_bytes`, after the last first forward.
#   5. Backward. Kept stages in reverse: `backward_base_bytes` + held + `backward_peak_bytes`, at the option's `cost`;
#      then the stage's held bytes are released. Before the backward of the last stage of a region, the region is
#      recomputed. The region's held bytes are released after the backward of its first stage.
#   6. Recompute. The children of the region run in order. A kept child holds its saved bytes, and its linked input if
#      its option saves that, but not of the region's first stage (the region holds it); it costs `forward`. A nested
#      region holds the linked input of its first stage (again not of the outer region's first stage), its stages save
#      nothing, and each costs `forward`. External inputs add nothing: the outermost region holds them.
#   7. Early stop. A recompute ends at its last save. If the last child is a kept stage, it costs `truncated`, or
#      nothing if its option is a region, and has the truncated peak; if it is a nested region, its stages do not run at
#      all, and only its linked input is held.
#
# The cost of a tree is the sum over rules 5 and 6, its peak the highest number of rules 3 to 5.
#
# Held bytes at the end of a forward need no rule: the next forward, the tail or the next backward counts them too.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The peak and the cost of a schedule.

    Attributes:
        peak_bytes: Highest live bytes.
        cost: Extra cost beyond forward and backward, in the unit of the chain.
        where: What is running at the (first) peak: an action such as `R3:0!`, or `tail`.
    """

    peak_bytes: int
    cost: float
    where: str


def interpret(chain: Chain, plan: Tree | Iterable[Action]) -> Outcome:
    """Run a tree or a schedule, and return its exact peak and its cost. See NOTE [ What a tree means ].

    Raises:
        ScheduleError: At the first action that cannot run, with its position, what was found and what was expected;
            or if the tree is not one of this chain.
    """
    steps = tuple(plan)
    nodes = tuple(step for step in steps if isinstance(step, KeepNode | RegionNode))
    actions = tuple(step for step in steps if not isinstance(step, KeepNode | RegionNode))
    if nodes and actions:
        raise ScheduleError(f"{len(nodes)} nodes of a tree and {len(actions)} actions are mixed; give one or the other")
    if nodes:
        actions = tuple(schedule(nodes, chain))
    machine = _StackMachine(chain)
    for action in actions:
        machine.run(action)
    return machine.outcome()


@dataclass(slots=True)
class _KeptFrame:
    stage: int
    option: Option
    held: int


@dataclass(slots=True)
class _RegionFrame:
    first: int
    last: int
    held: int
    ran: int  # stages up to here have run, in the first forward or in the recompute of the region around
    next: int  # the stage that its own recompute runs next; `first` before the recompute, `last + 1` after it
    begun: bool = False


class _StackMachine:
    """The state between two actions.

    One stack has everything that is held: regions and kept stages are released in the reverse of the order in which
    they were taken, because a nested region is created only while the innermost region around it is recomputed.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.stack: list[_KeptFrame | _RegionFrame] = []
        self.running: _RegionFrame | None = None  # the region whose recompute has begun and not ended
        self.next = 0  # the stage whose first forward comes next
        self.position = 0
        self.held = 0
        self.cost = 0.0
        self.peak = 0
        self.where = "nothing"

    def run(self, action: Action) -> None:
        match action:
            case ForwardAction():
                self.forward(action)
            case HoldAction():
                self.hold(action)
            case RecomputeAction():
                self.recompute(action)
            case BackwardAction():
                self.backward(action)
        self.position += 1

    def outcome(self) -> Outcome:
        if self.next < len(self.chain.stages):
            raise ScheduleError(f"after {self.position} actions: the first forward of stage {self.next} is missing")
        if self.stack:
            top = self.stack[-1]
            stage = top.stage if isinstance(top, _KeptFrame) else top.last
            raise ScheduleError(f"after {self.position} actions: the backward of stage {stage} is missing")
        return Outcome(peak_bytes=self.peak, cost=self.cost, where=self.where)

    def forward(self, action: ForwardAction) -> None:
        if action.stage != self.next or self.next == len(self.chain.stages):
            self.refuse(action, f"{self.due()} comes next")
        stage, region = self.chain.stages[action.stage], self.dropping()
        if action.option is None:
            if region is None:
                self.refuse(action, "nothing is kept, but no region holds its inputs; keep an option, or hold first")
            self.live(stage.forward_base_bytes + self.dropped(region), action)
            region.ran = action.stage
        else:
            if region is not None:
                self.refuse(action, f"it keeps, but lies in the region H{region.first}-{region.last}")
            option = self.option(action, action.option)
            inputs = stage.linked_bytes + stage.external_bytes
            self.live(stage.forward_base_bytes + inputs + option.forward_peak_bytes, action)
            self.keep(action.stage, option, linked=stage.linked_bytes, external=stage.external_bytes)
        self.next += 1
        if self.next == len(self.chain.stages):
            self.live(self.chain.tail_bytes, "tail")

    def hold(self, action: HoldAction) -> None:
        stages = self.chain.stages
        if action.first > action.last:
            self.refuse(action, "it ends before it begins")
        if (region := self.dropping()) is not None:
            self.refuse(action, f"stage {region.ran + 1} of H{region.first}-{region.last} has to run first")
        if self.next < len(stages):
            if action.first != self.next:
                self.refuse(action, f"{self.due()} comes next")
            if action.last >= len(stages):
                self.refuse(action, f"the last stage is {len(stages) - 1}")
            inside = stages[action.first : action.last + 1]
            held = stages[action.first].linked_bytes + sum(stage.external_bytes for stage in inside)
            self.push(_RegionFrame(action.first, action.last, held, ran=action.first - 1, next=action.first))
            return
        outer = self.recomputing(action, action.first)
        if action.last > outer.last:
            self.refuse(action, f"the region around it ends with stage {outer.last}")
        held = 0 if action.first == outer.first else stages[action.first].linked_bytes
        trailing = action.last == outer.last
        ran = action.last if trailing else action.first - 1
        self.push(_RegionFrame(action.first, action.last, held, ran=ran, next=action.first))
        if trailing:
            self.end_recompute(outer)

    def recompute(self, action: RecomputeAction) -> None:
        region = self.dropping() if self.next == len(self.chain.stages) else None
        if region is not None and action.stage != region.ran + 1:
            self.refuse(action, f"stage {region.ran + 1} of H{region.first}-{region.last} has to run first")
        outer = self.recomputing(action, action.stage)
        stage, base = self.chain.stages[action.stage], self.chain.stages[outer.last].backward_base_bytes
        if action.option is None:
            if action.stops:
                self.refuse(action, "nothing is kept, so there is no last save to stop at")
            if region is None:
                self.refuse(
                    action, "nothing is kept, but no nested region holds its input; keep an option, or hold first"
                )
            self.live(base + self.dropped(region), action)
            region.ran = action.stage
        else:
            if region is not None:
                self.refuse(action, f"it keeps, but lies in the nested region H{region.first}-{region.last}")
            if action.stops and action.stage != outer.last:
                self.refuse(action, f"it stops at its last save, but stage {action.stage + 1} needs its output")
            option = self.option(action, action.option)
            linked = 0 if action.stage == outer.first else stage.linked_bytes
            peak = option.truncated_peak_bytes if action.stops else option.forward_peak_bytes
            self.live(base + linked + peak, action)
            self.keep(action.stage, option, linked=linked, external=0)
        if not action.stops:
            self.cost += stage.forward
        elif action.option is None or not stage.options[action.option].is_region:
            self.cost += stage.truncated
        outer.next = action.stage + 1
        if action.stage == outer.last:
            self.end_recompute(outer)

    def backward(self, action: BackwardAction) -> None:
        if self.next < len(self.chain.stages):
            self.refuse(action, f"the first forward of stage {self.next} comes first")
        if self.running is not None:
            region = self.running
            self.refuse(action, f"the recompute of H{region.first}-{region.last} comes to stage {region.next} first")
        top = self.stack[-1] if self.stack else None
        if top is None:
            self.refuse(action, "every backward has run")
        if isinstance(top, _RegionFrame):
            self.refuse(action, f"H{top.first}-{top.last} comes next and must be recomputed first")
        if top.stage != action.stage:
            self.refuse(action, f"the backward of stage {top.stage} comes next")
        self.live(self.chain.stages[action.stage].backward_base_bytes + top.option.backward_peak_bytes, action)
        self.cost += top.option.cost
        self.pop()
        while (
            self.stack
            and isinstance(over := self.stack[-1], _RegionFrame)
            and over.begun
            and over.first == action.stage
        ):
            self.pop()

    def recomputing(self, action: HoldAction | RecomputeAction, stage: int) -> _RegionFrame:
        """Return the region whose recompute this action belongs to; it may be the first action of that recompute."""
        if self.next < len(self.chain.stages):
            self.refuse(action, f"the first forward of stage {self.next} comes first")
        region = self.running
        if region is None:
            top = self.stack[-1] if self.stack else None
            if top is None:
                self.refuse(action, "every backward has run")
            if isinstance(top, _KeptFrame):
                self.refuse(action, f"stage {top.stage} is kept, and its backward comes next")
            region = top
        if stage != region.next:
            self.refuse(action, f"the recompute of H{region.first}-{region.last} comes to stage {region.next} next")
        region.begun = True
        self.running = region
        return region

    def end_recompute(self, region: _RegionFrame) -> None:
        region.next = region.last + 1
        self.running = None

    def dropping(self) -> _RegionFrame | None:
        """Return the region whose stages must run once without saving before any other action can."""
        top = self.stack[-1] if self.stack else None
        return top if isinstance(top, _RegionFrame) and top.ran < top.last else None

    def dropped(self, region: _RegionFrame) -> int:
        """Return the peak of the region's next stage without saving, above base and held."""
        stage = self.chain.stages[region.ran + 1]
        linked = 0 if region.ran + 1 == region.first else stage.linked_bytes
        return max(linked + stage.drop_peak_bytes, stage.output_bytes)

    def keep(self, stage: int, option: Option, *, linked: int, external: int) -> None:
        held = option.saved_bytes + linked * option.saves_input + external * option.saves_external
        self.push(_KeptFrame(stage, option, held))

    def push(self, entry: _KeptFrame | _RegionFrame) -> None:
        self.stack.append(entry)
        self.held += entry.held

    def pop(self) -> None:
        self.held -= self.stack.pop().held

    def live(self, over_held: int, what: Action | str) -> None:
        if self.held + over_held > self.peak:
            self.peak, self.where = self.held + over_held, str(what)

    def option(self, action: ForwardAction | RecomputeAction, number: int) -> Option:
        options = self.chain.stages[action.stage].options
        if not 0 <= number < len(options):
            self.refuse(action, f"option {number} of {len(options)} does not exist")
        return options[number]

    def due(self) -> str:
        left = self.next < len(self.chain.stages)
        return f"the first forward of stage {self.next}" if left else "a recompute or a backward"

    def refuse(self, action: Action, why: str) -> NoReturn:
        raise ScheduleError(f"action {self.position}, {action}: {why}")
