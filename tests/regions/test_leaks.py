"""A thousand steps with the cycle collector off: nothing is left behind, however a step ends."""

import gc
from collections import Counter
from contextvars import ContextVar
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from logs import Hidden, Log
from planning.steps import each
from probes.regions import Call, Region, RegionRecompute, Slot, open_sessions, thread, top_saved_tensor_hooks
from torchremat import (
    CheckpointError,
    Pipe,
    Session,
    checkpoint,
    checkpointed,
    frozen,
    measure,
    plan,
    saved,
    session,
    unwrap,
    verify,
    wrap,
)
from torchremat.interop.torch_checkpoint import checkpoint as drop_in
from torchremat.pipeline import plan_stages
from torchremat.pipeline.balance import balance_by_size

OURS = (Region, Slot, Session, Call, RegionRecompute)


class Failed(Exception):
    pass


class Machine:
    """A small model, and a switch for when it fails."""

    def __init__(self):
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.wrapped = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), "*", every=2)
        self.error = Failed
        self.storages = WeakSet()
        self._hidden = Hidden(fails_in=0)

    @property
    def fails_in(self):
        """The run of the body that fails, counted from 1; of forwards and recomputes."""
        return self._hidden["fails_in"]

    @fails_in.setter
    def fails_in(self, run):
        self._hidden["fails_in"] = run

    def body(self, x):
        y = self.layer(x).exp()
        self.storages.add(y.untyped_storage())
        self.fails_in -= 1
        if self.fails_in == 0:
            raise self.error
        return (y.sin() * frozen("sign", y.detach().sign())).tanh()

    def input(self):
        x = torch.ones(3, 4, requires_grad=True)
        self.storages.add(x.untyped_storage())
        return x


def fail(grad):
    raise Failed


def normal(machine):
    checkpoint(machine.body, machine.input()).sum().backward()


def forward_raises(machine, error=Failed):
    machine.fails_in, machine.error = 1, error
    checkpoint(lambda x: checkpoint(machine.body, x.sin()).sin(), machine.input())


def recompute_raises(machine, error=Failed):
    machine.fails_in, machine.error = 2, error
    checkpoint(lambda x: checkpoint(machine.body, x.sin()).sin(), machine.input()).sum().backward()


def inner_recompute_raises(machine):
    machine.fails_in = 3
    checkpoint(lambda x: checkpoint(machine.body, x.sin()).sin(), machine.input()).sum().backward()


def backward_raises(machine):
    y = checkpoint(machine.body, machine.input())
    z = checkpoint(torch.exp, y)
    y.register_hook(fail)
    z.sum().backward()


def interrupted_forward(machine):
    forward_raises(machine, KeyboardInterrupt)


def interrupted_recompute(machine):
    recompute_raises(machine, KeyboardInterrupt)


def dropped(machine):
    checkpoint(machine.body, machine.input())


def partly_used(machine):
    x = machine.input()
    outputs = checkpoint(lambda x: (machine.body(x), x.exp()), x)
    outputs[0].sum().backward(retain_graph=True)


def twice(machine):
    x = machine.input()
    (grad,) = torch.autograd.grad(checkpoint(machine.body, x).sum(), x, create_graph=True)
    grad.square().sum().backward()


def retained(machine):
    loss = checkpoint(machine.body, machine.input()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def nested(machine):
    def middle(x):
        return checkpoint(machine.body, x.sin()).sin()

    checkpoint(lambda x: checkpoint(middle, x).sin(), machine.input()).sum().backward()


def backward_inside(machine):
    def body(x):
        y = machine.body(x)
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (y * grad).sin()

    checkpoint(body, machine.input()).sum().backward()


def options(machine):
    cache = []

    def body(x, kept):
        kept.append(x.detach())
        return machine.body(x)

    body = checkpointed(body, guard=[cache], early_stop=False, check="none")
    body(machine.input(), cache).sum().backward()


def values(machine):
    checkpointed(machine.body, check="values")(machine.input()).sum().backward()


def values_unused(machine):
    checkpointed(machine.body, check="values")(machine.input())


def in_session(machine):
    with session(passes=2) as one:
        loss = checkpoint(lambda x: checkpoint(machine.body, x.sin()).sin(), machine.input()).sum()
        one.recompute()
        loss.backward(retain_graph=True)
        loss.backward()


def session_abandoned(machine):
    with session() as one:
        loss = checkpoint(machine.body, machine.input()).sum()
        one.recompute()
        loss.backward(retain_graph=True)
        raise Failed


def session_with_failing_recompute(machine):
    machine.fails_in = 2
    with session() as one:
        loss = checkpoint(machine.body, machine.input()).sum()
        one.recompute()
        loss.backward()


def wrapped(machine):
    machine.wrapped(machine.input()).sum().backward()


def non_reentrant_drop_in(machine):
    drop_in(machine.body, machine.input(), use_reentrant=False).sum().backward()


def reentrant(machine):
    drop_in(machine.body, machine.input(), use_reentrant=True).sum().backward()


def reentrant_raises(machine):
    machine.fails_in = 2
    drop_in(machine.body, machine.input(), use_reentrant=True).sum().backward()


def autocast_and_hooks(machine):
    with torch.autograd.graph.save_on_cpu(), torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(machine.body, machine.input())
    y.float().sum().backward()


def mutated(machine):
    h = machine.input() * 1
    y = checkpoint(machine.body, h)
    h.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        raise Failed from error


def writes_to_input(machine):
    h = machine.input() * 1
    checkpoint(lambda h: h.mul_(h.detach().clone()).sin(), h)


STEPS = [
    normal, forward_raises, recompute_raises, inner_recompute_raises, backward_raises, interrupted_forward,
    interrupted_recompute, dropped, partly_used, twice, retained, nested, backward_inside, options, values,
    values_unused,
    in_session, session_abandoned, session_with_failing_recompute, wrapped, non_reentrant_drop_in, reentrant,
    reentrant_raises, autocast_and_hooks, mutated, writes_to_input,
]  # fmt: skip
RAISING = {
    forward_raises, recompute_raises, inner_recompute_raises, backward_raises, interrupted_forward,
    interrupted_recompute, session_abandoned, session_with_failing_recompute, reentrant_raises, mutated,
}  # fmt: skip


def alive():
    """How many of our objects and of tensors there are, by type."""
    kinds = Counter(type(one) for one in gc.get_objects())
    return {kind.__name__: kinds[kind] for kind in (*OURS, torch.Tensor, nn.Parameter)}


def state():
    """What a step could leave switched on."""
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "hooks": top_saved_tensor_hooks(True),
        "recomputing": thread.now.recomputing,
        "calls": len(thread.now.calls),
        "scopes": len(thread.now.scopes),
        "frozen": dict(thread.now.frozen),
        "shared": thread.now.is_shared,
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "sessions": len(open_sessions),
    }


def run(step, machine):
    try:
        step(machine)
    except (Failed, KeyboardInterrupt):
        return True
    return False


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_forty_steps_leave_nothing_behind(step, without_collector):
    machine = Machine()
    before = state()
    for _ in range(2):  # gradients, which a later step looks at, and what is made at the first use
        run(step, machine)
        machine.fails_in = 0
    objects = alive()

    ended = {run(step, machine) for _ in range(40)}

    assert ended == {step in RAISING}
    assert alive() == objects
    assert len(machine.storages) == 0
    assert state() == before


def test_a_thousand_steps_of_all_kinds_leave_nothing_behind(without_collector):
    machine = Machine()
    for step in [*STEPS, *STEPS]:  # see above
        run(step, machine)
        machine.fails_in = 0
    objects = alive()

    for number in range(1000):
        step = STEPS[number % len(STEPS)]
        assert run(step, machine) == (step in RAISING)
        machine.fails_in = 0

    assert alive() == objects
    assert len(machine.storages) == 0


def test_a_planned_model_leaves_nothing_behind(without_collector):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    x = torch.ones(512, 64)
    plan(model, lambda model: model(x).sum(), budget="80%").apply(model)
    for _ in range(3):  # when the second is measured, Python meets the gradients
        model.zero_grad()
        model(x).sum().backward()
    model.zero_grad()
    gc.collect()
    objects = alive()

    for number in range(100):
        loss = model(x).sum()
        if number == 0:
            assert alive()["Region"] > objects["Region"]
        if number % 3:
            loss.backward()
            model.zero_grad()
        del loss

    assert alive() == objects


@pytest.mark.parametrize("pattern", ["*", nn.Sequential], ids=["blocks", "blocks in a region"])
def test_outputs_that_a_hook_collects_leave_nothing_behind(pattern, without_collector):
    # transformers collects the logits of routers so: in a list that hooks find by a context variable. The recompute
    # adds its own, whose graph had the region behind it, and the region the context with the list: each step of
    # training kept all of its regions, for ever.
    collected = ContextVar("collected")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    for block in model:
        block[0].register_forward_hook(lambda module, args, output: collected.get().append(output))
    wrap(model, pattern)

    def step():
        token = collected.set([])
        try:
            loss = model(torch.ones(4, 8)).sum() + sum(one.sum() for one in collected.get())
        finally:
            collected.reset(token)
        loss.backward()

    step()
    gc.collect()
    objects = alive()

    for _ in range(5):
        step()

    assert alive() == objects


@pytest.fixture
def collecting():
    """A model whose hooks collect outputs in a list that they find by a context variable, and a step that reads it."""
    collected = ContextVar("collected", default=None)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def collect(module, args, output):
        if collected.get() is not None:
            collected.get().append(output)

    for block in model:
        block[0].register_forward_hook(collect)

    def step(model):
        token = collected.set([])
        try:
            return model(torch.ones(4, 8)).sum() + sum(one.sum() for one in collected.get())
        finally:
            collected.reset(token)

    return model, step


def test_what_is_measured_leaves_nothing_behind(collecting, without_collector):
    # The first run of `measure` was a forward without a backward. Where a hook collects outputs, that graph stayed for
    # ever: its regions have the context, the context the list, and the list outputs of the graph.
    model, step = collecting
    made = plan(model, step, budget="1MiB", cost="flops")
    wrap(model, "*")
    objects = alive()

    measure(model, step)
    verify(model, step)
    unwrap(model)
    replace(made, tree=each(4)).apply(model)
    measure(model, step)
    verify(model, step)

    assert alive() == objects


def test_a_report_leaves_nothing_behind(collecting, without_collector):
    # Its forward has no backward: each report kept the regions of one forward for ever.
    model, step = collecting
    wrap(model, "*")
    objects = alive()

    assert saved(model, step).regions == 4

    assert alive() == objects


def test_layers_that_are_weighed_leave_nothing_behind(collecting, without_collector):
    model, step = collecting
    wrap(model, "*.0")
    objects = alive()

    step(lambda x: x * balance_by_size(2, model, x)[0])  # within the context that has the list

    assert alive() == objects


def test_a_pipe_that_is_planned_leaves_nothing_behind(collecting, without_collector):
    # Its cells run in threads of their own, in the context of the caller.
    model, step = collecting
    pipe = Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=2, checkpoint="never")
    plan_stages(pipe, step, budget="1MiB", cost="flops")
    gc.collect()
    objects = alive()

    plan_stages(pipe, step, budget="1MiB", cost="flops")

    assert alive() == objects


def test_a_graph_that_a_report_has_left_cannot_go_backward(collecting):
    model, _ = collecting
    wrap(model, "*")
    kept = Log()

    def step(model):
        kept.append(model(torch.ones(4, 8)).sum())
        return kept[-1]

    saved(model, step)

    with pytest.raises(CheckpointError, match="or which planning or a report ran without a backward; run that"):
        kept[0].backward()
    step(model).backward()


def test_what_is_held_is_seen(without_collector):
    machine = Machine()
    objects = alive()

    x = machine.input()
    y = checkpoint(machine.body, x)

    found = alive()
    assert {name: found[name] - objects[name] for name in ("Region", "Call", "Session")} == {
        "Region": 1,
        "Call": 1,
        "Session": 0,
    }
    assert found["Slot"] > objects["Slot"] and found["Tensor"] >= objects["Tensor"] + 2
    assert len(machine.storages) == 1 and y.requires_grad
