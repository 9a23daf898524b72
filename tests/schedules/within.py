"""The cheapest tree of the tables within a limit of bytes, by its exact peak and not by slots."""

import math
from itertools import chain

from torchremat.schedules.chain import KeepNode
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.persistent import Persistent


class Within(Persistent):
    """Tables whose trees are asked for by bytes."""

    def solve(self, limit):
        # Sizes are rounded up, so a tree for more slots than the limit has may fit.
        spare = len(self.chain.stages) if self.slot_bytes > 1 else 0
        most = min(limit // self.slot_bytes + spare, self.most_slots)
        trees = chain([self._plain()], map(self.tree_at, range(most, self.lowest_slots - 1, -1)))
        return next((tree for tree in trees if interpret(self.chain, tree).peak_bytes <= limit), None)

    def cost(self, limit):
        tree = self.solve(limit)
        return math.inf if tree is None else interpret(self.chain, tree).cost

    def floor(self):
        """The smallest limit with a tree."""
        lowest = [self.tree_at(self.lowest_slots)] if self.lowest_slots <= self.most_slots else []
        return min(interpret(self.chain, tree).peak_bytes for tree in (self._plain(), *lowest))

    def _plain(self):
        costs = [[option.cost for option in stage.options] for stage in self.chain.stages]
        return tuple(KeepNode(number, own.index(min(own))) for number, own in enumerate(costs))
