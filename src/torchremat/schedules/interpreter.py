"""The peak and the cost of a tree, on integers: what a tree means, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.schedules.chain import Chain, KeepNode, Node, RegionNode, Stage, Tree, check_tree

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
    """The peak and the cost of a tree.

    Attributes:
        peak_bytes: Highest live bytes.
        cost: Extra cost beyond forward and backward, in the unit of the chain.
    """

    peak_bytes: int
    cost: float


def interpret(chain: Chain, tree: Tree) -> Outcome:
    """Return the exact peak of a tree, and its cost. See NOTE [ What a tree means ].

    Raises:
        ScheduleError: The tree is not one of this chain.
    """
    check_tree(tree, chain)
    machine = _StackMachine(chain)
    machine.forward(tree)
    machine.backward(tree)
    return Outcome(peak_bytes=machine.peak, cost=machine.cost)


class _StackMachine:
    """The bytes of one step. Of what is held, the last to come is the first to go: regions nest."""

    def __init__(self, chain: Chain) -> None:
        self.stages = chain.stages
        self.tail_bytes = chain.tail_bytes
        self.held: list[int] = []  # by each node that has run, the outermost first
        self.total = self.peak = 0
        self.cost = 0.0

    def forward(self, tree: Tree) -> None:
        """Rules 1 to 4."""
        for node in tree:
            stage = self.stages[node.first]
            if isinstance(node, KeepNode):
                self.keep(node, stage.forward_base_bytes, stage.linked_bytes, stage.external_bytes, stops=False)
            else:
                inside = self.stages[node.first : node.last + 1]
                self.hold(stage.linked_bytes + sum(one.external_bytes for one in inside))
                self.drop(inside, [one.forward_base_bytes for one in inside])
        self.live(self.tail_bytes)

    def backward(self, tree: Tree) -> None:
        """Rule 5."""
        waiting: list[Node | None] = list(tree)  # None where a region that was recomputed ends
        while waiting:
            node = waiting.pop()
            if isinstance(node, RegionNode):
                self.recompute(node)
                waiting += [None, *node.children]
                continue
            if node is not None:
                stage = self.stages[node.stage]
                option = stage.options[node.option]
                self.live(stage.backward_base_bytes + option.backward_peak_bytes)
                self.cost += option.cost
            self.total -= self.held.pop()

    def recompute(self, region: RegionNode) -> None:
        """Rules 6 and 7."""
        base = self.stages[region.last].backward_base_bytes
        for child in region.children:
            stage, is_last = self.stages[child.first], child.last == region.last
            linked = 0 if child.first == region.first else stage.linked_bytes
            if isinstance(child, KeepNode):
                self.keep(child, base, linked, 0, stops=is_last)
                if not is_last:
                    self.cost += stage.forward
                elif not stage.options[child.option].is_region:
                    self.cost += stage.truncated
                continue
            self.hold(linked)
            if not is_last:
                inside = self.stages[child.first : child.last + 1]
                self.drop(inside, [base] * len(inside))
                self.cost += sum(one.forward for one in inside)

    def keep(self, node: KeepNode, base: int, linked: int, external: int, *, stops: bool) -> None:
        """Run a stage that is kept."""
        option = self.stages[node.stage].options[node.option]
        peak = option.truncated_peak_bytes if stops else option.forward_peak_bytes
        self.live(base + linked + external + peak)
        self.hold(option.saved_bytes + linked * option.saves_input + external * option.saves_external)

    def drop(self, inside: tuple[Stage, ...], bases: list[int]) -> None:
        """Run the stages of a region, which save nothing."""
        for place, (stage, base) in enumerate(zip(inside, bases, strict=True)):
            linked = stage.linked_bytes if place else 0
            self.live(base + max(linked + stage.drop_peak_bytes, stage.output_bytes))

    def hold(self, size: int) -> None:
        self.held.append(size)
        self.total += size

    def live(self, over_held: int) -> None:
        self.peak = max(self.peak, self.total + over_held)
