"""Modules whose graph serves more than one backward: plans keep them, and are exact to the byte."""

import pytest
import torch
from torch import nn

import torchremat
from planning.kinds import block, inputs, square
from planning.steps import differences, each, keep_all, outcome, profile, traced_peak, under
from probes.planning import predict
from torchremat import RepeatWarning


class Equilibrium(nn.Module):
    """A fixed point of a cell, and a hook that solves for its gradient with `turns` backwards of the cell.

    With `apart` these go through the graph of another call of the cell, and through that of the output itself else.
    """

    def __init__(self, turns, *, apart):
        super().__init__()
        self.cell, self.turns, self.apart = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), turns, apart

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(3):
                z = self.cell(z + x)
        start = z.requires_grad_()
        z = again = self.cell(start + x)
        if self.apart:
            z = self.cell(start.detach() + x)
        if z.requires_grad:
            hook = z.register_hook(lambda grad: self.solved(again, start, grad, hook))
        return z

    def solved(self, again, start, grad, hook):
        if not self.apart:
            hook.remove()  # its output is gone through again
        found = grad
        for _ in range(self.turns):
            (found,) = torch.autograd.grad(again, start, found, retain_graph=True)
            found = found + grad
        return found


def model_of(turns, *, apart):
    torch.manual_seed(0)
    parts = [block(), Equilibrium(turns, apart=apart), block(), Equilibrium(turns, apart=apart), block()]
    return nn.Sequential(*parts), inputs()


@pytest.mark.parametrize(("turns", "apart"), [(3, True), (1, True), (3, False)])
def test_modules_whose_graph_is_retained_are_kept(turns, apart):
    # Their recomputes, one for each backward, were counted once, and what they keep was taken to go with the first: up
    # to 41% too low.
    model, x = model_of(turns, apart=apart)

    def step(model):
        return square(model(x))

    plain = outcome(model, step)
    with pytest.warns(RepeatWarning, match="would be recomputed several times"):
        pair = profile(model, step)

    for own in pair.all:
        units = len(own.units.units)
        assert {unit.name[0] for unit in own.units.units} == {"0", "2", "4"}, [unit.name for unit in own.units.units]
        for tree in (keep_all(units), each(units)):
            with under(model, own, tree):
                assert differences(outcome(model, step), plain) == []
                assert traced_peak(model, step) == predict(own, tree).peak_bytes


def test_a_plan_says_why_it_keeps_them():
    model, x = model_of(2, apart=True)

    with pytest.warns(RepeatWarning) as warned:
        plan = torchremat.plan(model, lambda model: square(model(x)), budget="min")

    assert len(warned) == 1
    assert {name.partition(".")[0] for name in plan.unlike} == {"1", "3"}
    assert "retained for more than one backward" in plan.unlike["1"]
