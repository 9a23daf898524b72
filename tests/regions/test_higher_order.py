"""Operators that take functions, `torch.cond` and the like, run eagerly in regions.

Each of these traces the functions that it is given, with tensors that have no data, and dynamo compiles them. That was
taken for the region's own: fakes had slots and fingerprints, operators of traces were logged, and torch skips its
compilation under a mode of ours, after which the backward of `cond` raises.
"""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

from probes.regions import EagerMode, save_ordinals
from regions.comparing import Counted, equal, leaf, result, same
from torchremat import checkpoint, checkpointed, measure, plan, saved, verify
from torchremat.policies import save_attention, save_matmuls

# Torch's own: dynamo asks each input for its gradient, and imports what is deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    # What other tests compiled counts for dynamo's limits, and beyond these `cond` runs as it is, without a backward.
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def branching(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).exp()


def scanning(x):
    return scan(lambda carry, row: (carry + row.sin(), carry * row), torch.zeros(4), x.exp())[1].sin()


def looping(x):
    body = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x.exp()))
    return body[1] @ x.t()


OPERATORS = {"cond": branching, "scan": scanning, "while_loop": looping}
WAYS = {
    "plain": {},
    "policy": {"policy": save_matmuls},
    "values": {"check": "values"},
    "debug": {"debug": True},
    "early_stop": {"early_stop": False},
    "all": {"policy": save_attention, "check": "values", "debug": True, "early_stop": False},
}
FIRST_AND_LAST = {name: WAYS[name] for name in ("plain", "all")}


@pytest.fixture(params=OPERATORS.values(), ids=OPERATORS)
def function(request):
    return request.param


def test_gradients_are_the_plain_ones(function):
    x = leaf(5, 4)
    plain = result(lambda: function(x), [x])

    for name, way in WAYS.items():
        counted = Counted(function)
        region = checkpointed(counted, **way)
        assert equal(result(lambda region=region: region(x), [x]), plain), name
        assert counted.calls == 2, name


def test_nested(function):
    x = leaf(5, 4)
    plain = result(lambda: function(x.sin()).tanh(), [x])

    for name, way in FIRST_AND_LAST.items():
        counted = Counted(function)
        region = checkpointed(lambda x, counted=counted: checkpoint(counted, x.sin()).tanh(), **way)
        assert equal(result(lambda region=region: region(x), [x]), plain), name
        assert counted.calls > 1, name


def test_negative_branch_and_two_in_a_row():
    # The second call finds compiled what the first has traced: the region would have saved less in its recompute.
    x = (-leaf(5, 4).detach().abs()).requires_grad_()

    plain = result(lambda: branching(branching(x)), [x])

    for name, way in FIRST_AND_LAST.items():
        region = checkpointed(lambda x: branching(branching(x)), **way)
        assert equal(result(lambda region=region: region(x), [x]), plain), name


def test_after_a_policy_has_seen_all():
    # The policy's mode is off the stack for the rest of its block then, and torch still takes it for on.
    x = leaf(5, 4)
    policy = save_ordinals(("aten.sin.default",), frozenset({0}))
    region = checkpointed(lambda x: branching(x.sin().cos()), policy=policy)

    assert same(lambda: region(x), lambda: branching(x.sin().cos()), [x])


class Noting(EagerMode):
    """Notes what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Also(Noting):
    """Enters a mode around it once more for each operator, as the counter of flops does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self:
            pass
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_modes_of_ours_are_off_and_on_again(function):
    # A mode that was entered twice was taken for the one that had ended.
    x = leaf(5, 4)
    noting = Noting()

    def watched():
        with Also(), noting:
            output = function(x)
            noting.seen.clear()
            x.detach().tan()
        return output

    assert same(watched, lambda: function(x), [x])
    assert noting.seen == ["aten.detach.default", "aten.tan.default"]


def test_what_raises_in_a_branch_leaves_the_modes_on():
    def fails(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.sum(), (x,))

    with Noting() as noting:
        with pytest.raises(Exception, match="output"):
            fails(leaf(5, 4))
        noting.seen.clear()
        torch.ones(2).tan()

    assert noting.seen[-1] == "aten.tan.default"


# ------------------------------------------------------------------------------------------------------ whole models


class Block(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.wide, self.narrow, self.middle = nn.Linear(4, 64), nn.Linear(64, 4), middle

    def forward(self, x):
        return self.narrow(self.middle(self.wide(x)))


def model_and_step(middle, blocks=2):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(middle) for _ in range(blocks))), torch.randn(256, 4)
    return model, lambda model: model(x).square().mean()


def either(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def repeated(x):
    return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))[1]


def running(x):
    return scan(lambda carry, row: (carry + row.sin(), carry * row), torch.zeros(64), x)[1]


MIDDLES = {"cond": either, "scan": running, "while_loop": repeated}


@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_measure_and_saved(middle):
    model, step = model_and_step(middle)

    measured, kept = measure(model, step), saved(model, step)

    assert measured.peak_bytes > 0
    assert "FakeTensor" not in str(kept)


@pytest.mark.parametrize("middle", [either, repeated], ids=["cond", "while_loop"])
def test_plan(middle):
    # The forwards that a planner tries refused to be gone backward through, which a trace does of itself.
    model, step = model_and_step(middle, blocks=3)
    step(model).backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()

    made = plan(model, step, budget="min", accumulates=True)  # else the peak is where all gradients have been made
    made.apply(model)
    report = verify(model, step)
    model.zero_grad()
    step(model).backward()

    assert made.recomputed_calls > 0
    assert all(map(torch.equal, [one.grad for one in model.parameters()], expected))
    assert report.predicted_bytes == report.peak_bytes
