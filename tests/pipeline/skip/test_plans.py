"""Plans for models with skips: the planner sees skippable modules, and keeps its promises."""

from weakref import WeakSet

import pytest
import torch
from torch import nn

from logs import Count
from pipeline.skip.modules import PopValue, StashValue
from probes.memory import visible_modules
from probes.planning import Calls, KeepNode, PlannedCall, RegionNode, install
from probes.regions import Settings
from torchremat import plan, verify
from torchremat.pipeline.skip import Namespace, pop, skippable, stash


def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = block(width)

    def forward(self, x):
        h = self.body(x)
        yield stash("skip", h)
        return h.sin()


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = block(width)

    def forward(self, x):
        h = yield pop("skip")
        return self.body(x * h).cos()


def unet(levels, width):
    rooms = [Namespace() for _ in range(levels)]
    downs = [Down(width).isolate(room) for room in rooms]
    ups = [Up(width).isolate(room) for room in reversed(rooms)]
    return nn.Sequential(*downs, nn.Linear(width, width), *ups)


def test_what_runs_later_is_not_seen_as_a_call():
    names = [name for name, _ in visible_modules(unet(1, 2))]

    assert names == [
        *["", "0", "0.module.body", *(f"0.module.body.{number}" for number in range(4)), "1"],
        *["2", "2.module.body", *(f"2.module.body.{number}" for number in range(4))],
    ]


@pytest.mark.parametrize("budget", ["45%", "75%"])
def test_a_plan_is_exact_and_within_its_budget(budget):
    model, x = unet(3, 32), torch.randn(1024, 32)

    def step(model):
        return model(x).square().mean()

    step(model).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    found = plan(model, step, budget=budget)
    found.apply(model)
    step(model).backward()

    assert all(torch.equal(one.grad, two) for one, two in zip(model.parameters(), plain, strict=True))
    model.zero_grad()
    report = verify(model, step)
    assert report.peak_bytes <= found.budget_bytes
    assert report.recomputed_flops > 0


def test_a_run_of_calls_around_both_ends_does_not_hold_the_skip():
    made, counts = WeakSet(), [Count(), Count()]

    def makes(x):
        counts[0].up()
        value = x.exp()
        made.add(value.untyped_storage())
        return value

    def uses(x, value):
        counts[1].up()
        return (x * value).sin()

    model = nn.Sequential(StashValue(makes), nn.Tanh(), PopValue(uses), nn.Tanh())
    x = torch.randn(64, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    calls = Calls(
        roots=("",),
        others=(),
        units=tuple((PlannedCall(name=str(number), number=0),) for number in range(4)),
    )
    counts[:] = [Count(), Count()]
    install(model, calls, (RegionNode(tuple(KeepNode(number) for number in range(3))), KeepNode(3)), Settings())
    y = model(x).sum()

    assert len(made) == 0
    assert torch.equal(torch.autograd.grad(y, x)[0], plain)
    assert [one.value for one in counts] == [2, 2]
