"""What people write by hand: regions around one or several whole units, without nesting; and models to try it on."""

import random

import torch
from torch import nn

from probes.planning import KeepNode, RegionNode


class Block(nn.Module):
    def __init__(self, width, inside, kind):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, inside), (nn.GELU, nn.ReLU, nn.SiLU)[kind](), nn.Linear(inside, width)
        )

    def forward(self, x):
        return x + self.body(x)


def chain(seed):
    """A chain of blocks of random sizes, with a head that may be large."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    width = chance.choice([16, 32, 64])
    blocks = [Block(width, chance.choice([16, 64, 256]), chance.randrange(3)) for _ in range(chance.randrange(5, 7))]
    model = nn.Sequential(*blocks, nn.Linear(width, chance.choice([4, 500])))
    x = torch.randn(chance.choice([32, 128, 400]), width)
    return model, lambda model: model(x).square().mean()


def placements(units, first=0):
    """All sequences of kept units, and of regions of one or several."""
    if first == units:
        yield ()
        return
    for rest in placements(units, first + 1):
        yield (KeepNode(first), *rest)
    for end in range(first + 1, units + 1):
        for rest in placements(units, end):
            yield (RegionNode(tuple(map(KeepNode, range(first, end)))), *rest)


def against_by_hand(planner, budgets=20):
    """The lowest peak by hand, and at how many budgets of how many a placement by hand is cheaper than the plan."""
    solver = planner.solver.blocks
    by_hand = [solver.judged(tree) for tree in placements(len(solver.profile.units.units))]
    peaks = sorted({one.prediction.peak_bytes for one in by_hand})
    tried = peaks[:: max(1, len(peaks) // budgets)]
    beaten = sum(
        planner.solver.solve(peak).cost
        > min(one.cost for one in by_hand if one.prediction.peak_bytes <= peak) * (1 + 1e-9)
        for peak in tried
    )
    return peaks[0], beaten, len(tried)
