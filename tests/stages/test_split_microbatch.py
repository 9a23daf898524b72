"""What a stage needs in both passes of a split backward, under every tree that a plan may have: the bytes measured."""

from dataclasses import astuple
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional

from probes.planning import plan_of
from regions.comparing import Tied
from torchremat import Planner, Session, UnsupportedError
from torchremat._compat.pipelining import run_input_pass, run_weight_pass
from torchremat.measuring.allocator import record_allocations
from torchremat.planning.searches.microbatches import shares
from torchremat.stages.samples import Ends, receive
from torchremat.stages.split_microbatch import SplitBackward
from versions import IS_OLD

WIDTH = 16
X, GRAD = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(0))
ALL = 1000  # regions, more than there are
import_module("torch.distributed.pipelining")


class Block(nn.Module):
    """Has a part without weights, whose operators are a choice of their own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        left, right = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(left) * right)


STAGES = {
    "blocks": lambda: nn.Sequential(*(Block() for _ in range(3))),
    # In regions over several of them, nested ones too; nothing is left of the last one, behind which is no weight.
    "layers": lambda: nn.Sequential(
        *(
            one
            for _ in range(3)
            for one in (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
        )
    ),
    "tied": lambda: nn.Sequential(*(Tied(WIDTH) for _ in range(2))),
}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return Scaled.apply(x.sin(), self.weight)


def forward(module):
    x = X.detach().requires_grad_()
    output = module(x)
    return Ends(roots=[output], grads=[GRAD], inputs=[x], outputs=[output])


def measured(module, *, drops, ahead=False):
    """Highest live bytes of the input pass, those between both, and the highest of the weight pass."""
    session = Session(serves_all=ahead)
    with record_allocations(torch.device("cpu")) as recorder:
        with session.active():
            ends = forward(module)
        session.recompute(ALL if ahead else 0)
        marks = [recorder.mark("input")]
        with session.active():
            session.drops = drops
            groups = run_input_pass(ends.roots, ends.grads, ends.inputs, ends.outputs, module)
            session.drops = False
            marks.append(recorder.mark("between"))
            run_weight_pass(groups, module)
        marks.append(recorder.mark("end"))
        del ends, groups
        session.close()
    live = recorder.trace.live.tolist()
    first, second, third = (recorder.trace.marks[mark].position for mark in marks)
    return max(live[first : second + 1]), live[second], max(live[second : third + 1])


def worth_choosing(name, *, ahead=False):
    """A stage, its planner, and what is worth choosing for it."""
    torch.manual_seed(0)
    module = STAGES[name]()

    def step(module):
        return receive(forward(module).outputs[0], held=True, grads=[GRAD])

    planner = Planner(module, step, cost="flops", accumulates=True)
    split = SplitBackward(module, forward, planner.solver.pair)
    return module, planner, shares(planner.solver, split.predict, ahead=ahead)


@pytest.mark.parametrize("name", STAGES)
def test_every_tree(name):
    module, planner, found = worth_choosing(name)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    differences = set()
    for share in found[:: max(1, len(found) // 16)]:
        plan = plan_of(planner.profiled, share.candidate, 0, "0")
        plan.apply(module)
        figures = measured(module, drops=name != "tied")
        plan.remove(module)
        predicted = astuple(share.split)
        differences.add(tuple(ours - theirs for ours, theirs in zip(predicted, figures, strict=True)))

    assert len(found) > 5
    assert differences == {(0, 0, 0)}


@pytest.mark.parametrize("name", STAGES)
def test_every_tree_ahead(name):
    module, planner, found = worth_choosing(name, ahead=True)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    differences, is_within = set(), True
    for share in found[:: max(1, len(found) // 16)]:
        plan = plan_of(planner.profiled, share.candidate, 0, "0")
        plan.apply(module)
        figures = [measured(module, drops=name != "tied", ahead=ahead) for ahead in (False, True)]
        plan.remove(module)
        highest, between, weight = (max(found) for found in zip(*figures, strict=True))
        differences.add(share.split.input_bytes - highest)
        is_within &= between <= share.split.between_bytes and weight <= share.split.weight_bytes

    assert differences == {0}
    assert is_within


def test_a_stage_with_regions_holds_less_between_the_passes():
    _, _, (plain, *others) = worth_choosing("blocks")

    # Of a block, weights need: the inputs of three layers, two numbers a row of the norm. What the gate needs is gone.
    assert plain.split.between_bytes - min(one.split.between_bytes for one in others) == 3 * (
        3 * 2 * WIDTH * X.shape[0] * 4
    )


def test_a_custom_function_is_split_or_an_error_of_this_torch_says_that_it_cannot_be():
    module = Scale()
    ends = forward(module)
    groups = run_input_pass(ends.roots, ends.grads, ends.inputs, ends.outputs, module)

    if IS_OLD:
        with pytest.raises(UnsupportedError, match=r"cannot split the backward of a custom autograd Function .* 2\.13"):
            run_weight_pass(groups, module)
    else:
        run_weight_pass(groups, module)
        assert torch.equal(module.weight.grad, (GRAD * X.sin()).sum(0))
