"""What a stage needs if it is recomputed before its gradient comes, under every tree: the bytes measured."""

from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional

from probes.memory import record_allocations
from probes.pipelines import SumsPrediction, receive, shares
from probes.planning import KeepNode, RegionNode, plan_of
from torchremat import Planner, Session

WIDTH = 16
X, GRAD = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(0))
ALL = 1000  # regions, more than there are


class Gate(nn.Module):
    """Has a part without weights, whose operators are a choice of their own, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        left, right = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + functional.dropout(self.down(functional.silu(left) * right))


def layers():
    return nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()


STAGES = {
    "operators": lambda: nn.Sequential(*(Gate() for _ in range(3))),
    "nested": lambda: nn.Sequential(*chain.from_iterable(layers() for _ in range(4))),
}


def forward(module):
    return receive(module(X.detach().requires_grad_()), held=True, grads=[GRAD])


def measured(module, count):
    """Highest bytes while `count` regions are recomputed ahead, and in the backward after that."""
    session = Session(serves_all=True)
    with record_allocations(torch.device("cpu")) as recorder:
        with session.active():
            loss = forward(module)
        marks = [recorder.mark("ahead")]
        session.recompute(count)
        marks.append(recorder.mark("backward"))
        session.passes = 1
        with session.active():
            loss.backward()
        session.close()
        marks.append(recorder.mark("end"))
    live = recorder.trace.live.tolist()
    first, second, third = (recorder.trace.marks[mark].position for mark in marks)
    return max(live[first : second + 1]), max(live[second : third + 1])


def depth(nodes):
    return max((1 + depth(node.children) for node in nodes if isinstance(node, RegionNode)), default=0)


def plainly(candidate):
    """Leaves in the choice what needs little where nothing is recomputed ahead: deep trees, which are tried as well."""
    return SumsPrediction(first_bytes=candidate.prediction.backward_bytes)


@pytest.mark.parametrize("name", STAGES)
def test_every_tree(name):
    torch.manual_seed(0)
    module = STAGES[name]()
    planner = Planner(module, forward, cost="flops", accumulates=True)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    plain, *found = shares(planner.solver, sums=plainly, ahead=True)
    differences, is_within = set(), True
    for share in found:
        plan = plan_of(planner.profiled, share.candidate, 0, "0")
        plan.apply(module)
        ahead, backward = measured(module, ALL)
        # The gradient may come at any time, and what was not reached by then is recomputed in the backward.
        some = [measured(module, count) for count in range(3)]
        plan.remove(module)
        recomputed = share.ahead_bytes > share.kept_bytes
        differences.add(
            (share.ahead_bytes - ahead if recomputed else 0, share.backward_bytes - max(backward, some[0][1]))
        )
        is_within &= all(one <= max(ahead, share.kept_bytes) for one, _ in some)
        is_within &= all(one <= share.backward_bytes for _, one in some)

    assert plain.ahead_bytes == 0
    assert differences == {(0, 0)}
    assert is_within
    trees = [share.candidate.tree for share in found]
    assert len(trees) > 20
    assert any(isinstance(node, KeepNode) and node.option for tree in trees for node in tree) == (name == "operators")
    assert (max(map(depth, trees)) > 2) == (name == "nested")
