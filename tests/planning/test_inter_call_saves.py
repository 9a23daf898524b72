"""What blocks compute in their own code, before, between and after the modules that they call."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import torchremat
from stages.blocks import Pop, Stash

WIDTH = 16
X = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 4 * WIDTH)
        self.b = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor):
        return self.b(torch.relu(self.a(x)).sin())


class Before(Block):
    def forward(self, x):
        return super().forward(x.sigmoid().tanh().sigmoid())


class After(Block):
    def forward(self, x):
        return super().forward(x).sigmoid().tanh().sigmoid()


class Scaled(Block):
    """The residual is a variable of its own, alive while the modules run, and saved by nobody."""

    def forward(self, x):
        residual = x * 2
        return super().forward(x) + residual


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Before()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        residual = x.sigmoid() * 3
        return self.norm(self.inner(residual.tanh())) + residual


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (self.a(torch.relu(x)) + self.b(torch.relu(x) * x)).exp()


KINDS = [
    (Before, Block, Before, Block),
    (Block, Before, Block, Before),
    (After, Before, After, Before),
    (Block, Scaled, Before, Scaled),
    (Nested, Scaled, Before, Nested),
    (Branches, Nested, Block, Branches),
    (Block, partial(Stash, WIDTH), Block, Block, partial(Pop, WIDTH), Block),
]


def step(model: nn.Module):
    return model(X).square().mean()


@pytest.mark.parametrize(
    "kinds", KINDS, ids=lambda kinds: "-".join(getattr(kind, "func", kind).__name__ for kind in kinds)
)
def test_what_own_code_saves_and_holds_counts_where_it_does(kinds):
    # Of two neighbours the second was split, and what it saves before its first call was taken for the first one's.
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for kind in kinds))
    planner = torchremat.Planner(model, step, cost="flops")
    plain, floor = planner.plain_peak()[0], planner.floor_bytes

    off: list[int] = []
    for share in SHARES:
        plan = planner.plan(int(floor + share * (plain - floor)))
        plan.apply(model)
        try:
            off.append(torchremat.measure(model, step).peak_bytes - plan.peak_bytes)
        finally:
            plan.remove(model)

    assert off == [0] * len(SHARES)
