"""Random loops: whatever the body does and however the loop is scheduled, the gradients are those of the plain loop.

TORCHREMAT_FUZZ=500 pytest tests/loops/test_fuzz.py --hypothesis-seed=1 tries that many.
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from logs import Count
from torchremat import Host, checkpoint, loop

PROGRAMS = int(os.environ.get("TORCHREMAT_FUZZ", "40"))

# What a body may do with its state, in any order.
OPERATIONS = {
    "linear": lambda m, h, x: m.linear(h),
    "frozen": lambda m, h, x: m.frozen(h),
    "dropout": lambda m, h, x: m.dropout(h),
    "norm": lambda m, h, x: m.norm(h),
    "in place": lambda m, h, x: h.sin().mul_(0.7).add_(0.1),
    "input": lambda m, h, x: h if x is None else h + x,
    "tanh": lambda m, h, x: torch.tanh(h),
    "branch": lambda m, h, x: h * 2 if float(h.detach().sum()) > 0 else h.cos(),
    "region": lambda m, h, x: checkpoint(lambda z: m.linear(z).exp().clamp(max=2), h),
    "detach": lambda m, h, x: h + h.detach().cos(),
    "noise": lambda m, h, x: h + torch.rand_like(h),
    "backward": lambda m, h, x: (
        h - 0.1 * torch.autograd.grad(torch.cos(h).sum(), h, create_graph=True)[0] if h.requires_grad else h
    ),
}


class Body:
    def __init__(self, operations, carries, outputs):
        self.linear, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.dropout, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(3)
        self.operations, self.carries, self.outputs, self.runs = operations, carries, outputs, Count()

    def __call__(self, carry, x):
        self.runs.up()
        states = list(carry)
        for number, name in enumerate(self.operations):
            place = number % len(states)
            states[place] = OPERATIONS[name](self, states[place], x)
            if number % 3 == 2:
                states[0] = states[0] + states[-1] * 0.5
        out = {"none": None, "state": states[0], "many": {"a": states[0].sum(), "b": (states[-1] * 2,)}}[self.outputs]
        return tuple(states), out


@st.composite
def loops(draw):
    steps = draw(st.integers(1, 14))
    ways = st.sampled_from(["slots", "budget", "online", "store"])
    return {
        "operations": draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5)),
        "carries": draw(st.integers(1, 3)),
        "outputs": draw(st.sampled_from(["none", "state", "many"])),
        "steps": steps,
        "scans": draw(st.booleans()),
        "xs_grad": draw(st.booleans()),
        "h_grad": draw(st.booleans()),
        "way": draw(ways),
        "slots": draw(st.integers(1, 6)),
        "budget": draw(st.integers(3_000, 20_000)),
        "backward": draw(st.sampled_from(["once", "twice", "double"])),
        "seed": draw(st.integers(0, 99)),
    }


def results(case, run):
    torch.manual_seed(case["seed"])
    body = Body(case["operations"], case["carries"], case["outputs"])
    starts = tuple(torch.randn(2, 3, requires_grad=case["h_grad"]) for _ in range(case["carries"]))
    scans = case["scans"] and case["way"] != "online"
    xs = torch.randn(case["steps"], 2, 3, requires_grad=case["xs_grad"]) if scans else None
    carry, outputs = run(body, starts, xs, case["steps"])
    found = [one for one in carry if one.requires_grad]
    if outputs is not None:
        parts = [outputs] if isinstance(outputs, torch.Tensor) else [outputs["a"], outputs["b"][0][1:]]
        found += [one for one in parts if one.requires_grad]
    loss = sum((one.cos().sum() for one in found), torch.zeros(()))
    leaves = [*starts, *body.linear.parameters(), *body.norm.parameters(), *(() if xs is None else (xs,))]
    leaves = [one for one in leaves if one.requires_grad]
    values = [loss.detach(), *(one.detach() for one in carry), body.norm.running_mean.clone()]
    if not loss.requires_grad:
        return values, body.runs.value
    how = {"create_graph": case["backward"] == "double", "retain_graph": case["backward"] != "once"}
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, **how)
    if case["backward"] == "twice":
        gradients += torch.autograd.grad(loss, leaves, allow_unused=True)
    if case["backward"] == "double":
        again = [one for one in gradients if one is not None and one.requires_grad]
        if again:
            gradients += torch.autograd.grad(sum(one.square().sum() for one in again), leaves, allow_unused=True)
    return [*values, *gradients, torch.rand(1)], body.runs.value


def plainly(body, carry, xs, steps):
    outputs = []
    # One `unbind`: with `xs[index]` second derivatives are summed in another order.
    slices = [None] * steps if xs is None else xs.unbind()
    for x in slices:
        carry, output = body(carry, x)
        outputs.append(output)
    if body.outputs == "none":
        return carry, None
    if body.outputs == "state":
        return carry, torch.stack(outputs)
    a, b = ([one["a"] for one in outputs], [one["b"][0] for one in outputs])
    return carry, {"a": torch.stack(a), "b": (torch.stack(b),)}


def scheduled(case):
    def run(body, carry, xs, steps):
        # Each step that draws keeps the state of its generator.
        states = 5056 * steps if {"dropout", "noise"} & {*case["operations"]} else 0
        options = {"budget": case["budget"] + states} if case["way"] == "budget" else {"slots": case["slots"]}
        if case["way"] == "store":
            options |= {"stores": (Host(200 * case["seed"] + 1),), "transfer_steps": case["seed"] % 3}
        if case["way"] != "online":
            return loop(body, carry, xs, length=steps, **options)
        left = iter(range(steps + 1))
        return loop(body, carry, condition=lambda _: next(left) < steps, **options)

    return run


@settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck))
@given(loops())
def test_random_loops(case):
    plain, once = results(case, plainly)
    found, _ = results(case, scheduled(case))

    assert once == case["steps"]
    assert len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.nan_to_num(7), other.nan_to_num(7))  # a random body may overflow
