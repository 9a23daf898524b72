"""Several calls as one region have a derivative as well: the code between them is outside of it."""

import random

import pytest
import torch
from torch import nn

from probes.planning import Calls, KeepNode, PlannedCall, RegionNode, installed
from probes.regions import Settings
from torchremat import measure

WIDTH = 4


def swapped(h):
    a, b = h.split(2, -1)
    return torch.cat([b.sin(), a * b], -1)


OPERATIONS = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "gauss": lambda h: torch.exp(-h * h),
    "softmax": lambda h: h.softmax(-1),
    "square": lambda h: h * h * 0.5,
    "swap": swapped,
    "dropout": lambda h: nn.functional.dropout(h, 0.3),
    "in place": lambda h: (h * 1.1).add_(h.sin()).mul_(0.5),
}


class Unit(nn.Module):
    """Returns one tensor, or two of which the second is built on the first."""

    def __init__(self, names, *, has_weight, returns):
        super().__init__()
        self.names, self.returns = names, returns
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) if has_weight else None

    def forward(self, h, side):
        first = h = h @ self.weight if self.weight is not None else h
        for name in self.names:
            h = OPERATIONS[name](h)
        if self.returns == 2:
            return h, (first * side).sin()
        return h * side.cos()


class Chain(nn.Module):
    """Units, and code between them: sums, products, a tensor that stays for later, and one that is left outside."""

    def __init__(self, rng):
        super().__init__()
        count = rng.randint(2, 6)
        self.units = nn.ModuleList(
            Unit(
                [rng.choice([*OPERATIONS]) for _ in range(rng.randint(1, 3))],
                has_weight=rng.random() < 0.5,
                returns=rng.randint(1, 2),
            )
            for _ in range(count)
        )
        self.glue = [rng.choice(["none", "none", "sum", "product", "skip", "twice", "left"]) for _ in range(count)]
        self.shares = rng.random() < 0.2  # one unit is called twice

    def forward(self, x):
        h, side, first, left = x, x * 0.5 + 1.0, x.sin(), []
        for number, (unit, glue) in enumerate(zip(self.units, self.glue, strict=True)):
            found = unit(h, side)
            if isinstance(found, tuple):
                found, side = found
            before, h = h, found
            if glue == "sum":
                h = h + before
            elif glue == "product":
                h = h * before.cos()
            elif glue == "skip":
                h = h + first * 0.3
            elif glue == "twice":
                side = side + h
            elif glue == "left":
                left.append(h)
            if number == 1 and self.shares:
                h = self.units[0](h, side)
                h = h[0] if isinstance(h, tuple) else h
        return h, side, sum((one.square().sum() for one in left), h.new_zeros(()))


def rows_of(chain, rng):
    """Return the calls of a chain, and a tree in which stretches of them are regions, some inside of others."""
    names = [f"units.{number}" for number in range(len(chain.units))]
    order = [(name, 0) for name in names[:2]] + [(names[0], 1)] * chain.shares + [(name, 0) for name in names[2:]]
    units = [(PlannedCall(name=name, number=number, inside=frozenset([name])),) for name, number in order]
    calls = Calls(units=tuple(units), others=(), roots=("",))
    tree, place = [], 0
    while place < len(order):
        length = min(rng.randint(1, 4), len(order) - place)
        inner = tuple(map(KeepNode, range(place, place + length)))
        if length > 2 and rng.random() < 0.3:
            inner = (RegionNode(inner[:2]), *inner[2:])
        tree += [RegionNode(inner)] if rng.random() < 0.8 else inner
        place += length
    return calls, tuple(tree)


def gradients(chain, order, wrt):
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    h, side, left = chain(x)
    value = h.square().sum() + (side * 0.3).sin().sum() + left
    leaves = {"input": [x], "weights": [*chain.parameters()] or [x], "all": [x, *chain.parameters()]}[wrt]
    found = []
    for _ in range(order):
        grads = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        grads = [one for one in grads if one is not None and one.requires_grad]
        if not grads:
            break
        found += [one.detach() for one in grads]
        value = sum(one.square().sum() for one in grads) + value * 0.1
    last = torch.autograd.grad(value, [x, *chain.parameters()], allow_unused=True)
    return [*found, *(one for one in last if one is not None)]


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_chains(order, check):
    with torch.device("cpu"):
        for seed in range(15):
            rng = random.Random(f"{order} {check} {seed}")
            torch.manual_seed(seed)
            chain = Chain(rng)
            calls, tree = rows_of(chain, rng)
            wrt = rng.choice(["input", "weights", "all"])
            plain = gradients(chain, order, wrt)
            with installed(chain, calls, tree, Settings(check=check)):
                ours = gradients(chain, order, wrt)

            assert len(ours) == len(plain)
            assert all(map(torch.equal, ours, plain)), (seed, tree)


def test_a_region_around_several_calls_frees_what_both_graphs_save():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    calls = Calls(units=tuple((PlannedCall(name=str(one), number=0),) for one in range(8)), others=(), roots=("",))

    def step(model):
        x = torch.ones(256, 64).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    def peak_bytes(length):
        tree = tuple(RegionNode(tuple(map(KeepNode, range(at, at + length)))) for at in range(0, 8, length))
        with installed(model, calls, tree, Settings()):
            return measured()

    def measured():
        found = measure(model, step)
        return found.peak_bytes - found.before_bytes

    plain = measured()
    assert peak_bytes(2) < peak_bytes(1) < plain
    assert peak_bytes(2) < 0.8 * plain
