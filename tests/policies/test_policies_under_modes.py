"""Policies and plans where the user's own modes are on: around both passes, one of them, or an earlier step.

`FlopCounterMode` sets hooks on all modules while it is on. They ask the inputs for their nodes, for which torch makes a
view of a leaf: an operator that recomputes, whose inputs are leaves, ran and forwards did not. A step under it failed
with "operator 0 of the recompute is aten.view.default, and in the forward it was aten.native_layer_norm.default".
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchremat import CheckpointError, checkpointed, plan
from torchremat.extend import only_watches
from torchremat.policies import everything_saved, nothing_saved, save_matmuls, save_operators

aten = torch.ops.aten
POLICIES = [nothing_saved, save_matmuls, save_operators("aten.gelu"), everything_saved]
# Flops of a matrix product of a block, of which it has two; a backward has two for each.
PRODUCT = 2 * 12 * 8 * 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OtherGelu(TorchDispatchMode):
    """Runs two operators in place of one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.gelu.default:
            return aten.mul.Tensor(args[0], aten.sigmoid.default(args[0]))
        return func(*args, **(kwargs or {}))


class OtherGeluAbove(TorchFunctionMode):
    """The same above autograd."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.gelu:
            return args[0] * args[0].sigmoid()
        return func(*args, **(kwargs or {}))


@only_watches
class InParts(TorchDispatchMode):
    """Changes no result, but runs two operators in place of one; a recompute has not to have it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.addmm.default:
            return aten.add.Tensor(args[0], aten.mm.default(*args[1:]))
        return func(*args, **(kwargs or {}))


def counter():
    return FlopCounterMode(display=False)


def blocks(count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def inputs(**options):
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(**options)


def trained(model, policy, mode, where, x):
    """Gradients of a step; `policy` is None for a plain one."""

    def forward():
        hidden = x
        for block in model:
            hidden = block(hidden) if policy is None else checkpointed(block, policy=policy)(hidden)
        return hidden.square().mean()

    if where == "an earlier step":
        with mode():
            forward().backward()
        model.zero_grad()
        x.grad = None
        forward().backward()
    elif where == "both":
        with mode():
            forward().backward()
    elif where == "forward":
        with mode():
            loss = forward()
        loss.backward()
    else:
        loss = forward()
        with mode():
            loss.backward()
    return [x.grad, *(one.grad for one in model.parameters())][not x.requires_grad :]


@pytest.mark.parametrize("where", ["an earlier step", "both", "forward", "backward"])
@pytest.mark.parametrize("mode", [counter, OtherGelu, OtherGeluAbove, InParts])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_are_those_of_the_plain_run(where, mode, is_leaf):
    expected = trained(blocks(), None, mode, where, inputs(requires_grad=is_leaf))

    for policy in POLICIES:
        found = trained(blocks(), policy, mode, where, inputs(requires_grad=is_leaf))
        assert all(map(torch.equal, expected, found)), policy


@pytest.mark.parametrize(("policy", "recomputed"), [(nothing_saved, 1), (save_matmuls, 0)])
def test_a_flop_counter_counts_what_a_policy_lets_run(policy, recomputed):
    block, x = blocks(1)[0], inputs(requires_grad=True)

    with counter() as forward:
        loss = checkpointed(block, policy=policy)(x).sum()
    with counter() as backward:
        loss.backward()

    # The second product comes after the last tensor that is saved, so no recompute gets to it.
    assert forward.get_total_flops() == 2 * PRODUCT
    assert backward.get_total_flops() == (4 + recomputed) * PRODUCT


class Around(nn.Module):
    """Enters a mode around the second of two blocks, which is a region of its own or is not."""

    def __init__(self, mode, inner):
        super().__init__()
        self.first, self.second = blocks()
        self.mode = mode
        self.call = self.second if inner is None else checkpointed(self.second, policy=inner)

    def forward(self, x):
        x = self.first(x)
        with self.mode():
            x = self.call(x)
        return self.first(x)


@pytest.mark.parametrize("mode", [counter, OtherGelu, InParts])
@pytest.mark.parametrize("inner", [None, *POLICIES[:3]], ids=repr)
def test_a_mode_between_a_region_and_one_inside(mode, inner):
    # The inner region once saw the operators that the mode ran in its forward, and those of the function in its
    # recompute: "operator 2 of the recompute is aten.gelu.default, and in the forward it was aten.mul.Tensor".
    def run(inner, outer):
        model = Around(mode, inner)
        function = model if outer is None else checkpointed(model, policy=outer)
        function(inputs() * 1).square().mean().backward()
        return [one.grad for one in model.parameters()]

    expected = run(None, None)

    for outer in POLICIES[:3]:
        assert all(map(torch.equal, expected, run(inner, outer))), outer


def test_only_the_inner_region_keeps_what_runs_in_it_under_a_mode():
    seen = []

    def noted(name):
        def policy(ctx, op, *args, **kwargs):
            seen.append(f"{name} {op}")
            return False

        return policy

    model = Around(OtherGelu, noted("inner"))
    checkpointed(model, policy=noted("outer"))(inputs())

    # Each operator once, as the function runs it.
    assert [one for one in seen if "gelu" in one or "sigmoid" in one] == [
        "outer aten.gelu.default",
        "inner aten.gelu.default",
        "outer aten.gelu.default",
    ]


@pytest.fixture(scope="module")
def planned():
    """A plan that holds an operator of a block."""

    def step(model):
        return model(X).square().mean()

    model = blocks(6)
    found = plan(model, step, budget="80%", operators=True, cost="flops")
    assert found.held
    return found, step


X = torch.randn(256, 4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("where", ["both", "forward", "backward"])
def test_a_plan_with_operators_under_a_flop_counter(planned, where):
    found, step = planned
    model, plain = blocks(6), blocks(6)
    found.apply(model)

    step(plain).backward()
    if where == "backward":
        loss = step(model)
        with counter():
            loss.backward()
    else:
        with counter():
            loss = step(model)
            if where == "both":
                loss.backward()
        if where == "forward":
            loss.backward()

    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_plan_is_the_same_whether_a_flop_counter_is_on(planned):
    found, step = planned

    with counter():
        other = plan(blocks(6), step, budget="80%", operators=True, cost="flops")

    assert other.held == found.held
    # Views are not among them: a hook may make some.
    assert found.held[0].operators == (
        "aten.native_layer_norm.default",
        "aten.addmm.default",
        "aten.gelu.default",
        "aten.addmm.default",
        "aten.add.Tensor",
    )


def test_the_numbers_of_a_plan_are_those_of_a_leaf_under_a_flop_counter(planned):
    # The hook's view of the input was number 0, and each operator had the number of the next: an OrderWarning, and
    # nothing was held.
    (held,) = planned[0].held
    assert held.held == (1,)

    function = checkpointed(blocks(1)[0], policy=held.policy)
    with counter():
        loss = function(inputs(requires_grad=True)).sum()
    with counter() as backward:
        loss.backward()

    assert backward.get_total_flops() == 4 * PRODUCT


def doubles(module, args, output):
    return output * 2


def test_hooks_that_are_registered_after_the_forward_are_not_the_recomputes():
    block, x = blocks(1)[0], inputs(requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])

    loss = checkpointed(block, policy=save_matmuls)(x).sum()
    hook = block.norm.register_forward_hook(doubles)
    found = torch.autograd.grad(loss, [x, *block.parameters()])

    assert all(map(torch.equal, found, expected))
    assert list(block.norm._forward_hooks.values()) == [doubles]
    hook.remove()


def test_hooks_that_run_operators_in_one_of_both_are_an_error_that_says_so():
    # What only looks on is not given back, so one that computes as well is not the forward's.
    block, x = blocks(1)[0], inputs()
    loss = checkpointed(block, policy=save_matmuls)(x).sum()
    hook = block.norm.register_forward_hook(only_watches(lambda module, args, output: output * 2))

    try:
        with pytest.raises(CheckpointError, match="a hook on modules that was not there in both"):
            loss.backward()
    finally:
        hook.remove()
