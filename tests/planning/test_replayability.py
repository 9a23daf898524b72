"""Modules that would not do in a recompute what they do in their forward: plans leave them alone, and say so."""

import gc
import itertools
import random
import warnings
from contextvars import ContextVar
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from logs import Hidden, Log
from planning.kinds import block, inputs, linear, square
from planning.steps import blocks, differences, outcome, profile, recomputed_flops
from probes.planning import Here, calls_of, every_unit, find_units, installed, profiling, told
from probes.regions import Region, Settings
from torchremat import Adaptive, BudgetError, Plan, Planner, RepeatWarning, StepError, extend


class Part(nn.Module):
    """Two layers, and between them something that no argument tells."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x) * self.factor(x)))

    def factor(self, x):
        raise NotImplementedError


class Hides(Part):
    """Has its state where no recompute looks."""

    def __init__(self):
        super().__init__()
        self.hidden = Hidden(calls=0, told=None, scale=torch.ones(64))


class Counts(Hides):
    def factor(self, x):
        self.hidden["calls"] += 1
        return 1 + 0.1 * self.hidden["calls"]


class IsTold(Hides):
    def factor(self, x):
        return self.hidden["told"]


class Draws(Part):
    def factor(self, x):
        return import_module("random").uniform(0.8, 1.2)


class DrawsOfNumpy(Part):
    def factor(self, x):
        return torch.from_numpy(import_module("numpy.random").rand(*x.shape).astype(np.float32))


class Averages(Hides):
    """Writes to a tensor that is no buffer."""

    def factor(self, x):
        scale = self.hidden["scale"]
        before = scale.clone()
        scale.mul_(0.9).add_(x.detach().std(0), alpha=0.1)
        return before


class Noise(nn.Module):
    """Saves nothing, so that only what it returns shows that a recompute is another."""

    def forward(self, x):
        return x + torch.from_numpy(import_module("numpy.random").rand(*x.shape).astype(np.float32))


class Between(nn.Module):
    """Plain blocks with parts of a kind between them; `before` and `after` are called with each part."""

    def __init__(self, kind, before=None, after=None):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.parts = nn.ModuleList(kind() for _ in range(3))
        self.before, self.after = before, after

    def forward(self, x):
        for number, (one, part) in enumerate(zip(self.blocks, self.parts, strict=True)):
            x = one(x)
            if self.before is not None:
                self.before(part, number)
            x = part(x)
        if self.after is not None:
            for part in self.parts:
                self.after(part)
        return x


class Shared(nn.Module):
    """One part, called several times with another attribute each time."""

    def __init__(self):
        super().__init__()
        self.blocks, self.part = nn.ModuleList(block() for _ in range(3)), IsTold()

    def forward(self, x):
        for number, one in enumerate(self.blocks):
            tell(self.part, number)
            x = self.part(one(x))
        return x


def tell(part, number):
    part.hidden["told"] = 1.0 + number


def forget(part):
    part.hidden["told"] = None


def begins(model):
    """What a step does before it calls the model: all is as it was before every other step."""
    random.seed(0)
    np.random.seed(0)
    for part in model.modules():
        if isinstance(part, Hides):
            part.hidden.update(calls=0, scale=torch.ones(64))


def step(model):
    begins(model)
    return square(model(inputs()))


MODELS = {
    "an attribute that is taken back": lambda: Between(IsTold, tell, forget),
    "an attribute of a shared module": Shared,
    "a count of calls": lambda: Between(Counts),
    "draws of `random`": lambda: Between(Draws),
    "draws of NumPy": lambda: Between(DrawsOfNumpy),
    "a running average that is no buffer": lambda: Between(Averages),
    "noise that is added": lambda: Between(Noise),
}
NAMES = {"an attribute of a shared module": {"part"}}


@pytest.mark.parametrize("kind", MODELS)
def test_what_no_recompute_would_repeat_is_left_alone_and_told(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = outcome(model, step)

    with pytest.warns(RepeatWarning) as caught:
        planner = Planner(model, step, cost="flops")
    plan = planner.plan(planner.floor_bytes)
    plan.apply(model)

    assert [one.filename for one in caught] == [__file__]
    assert plan.unlike.keys() == NAMES.get(kind, {"parts.0", "parts.1", "parts.2"})
    assert all(f"`{name}`" in str(caught[0].message) for name in plan.unlike)
    assert not any(name in plan.unlike for unit in plan.units for name in unit.name.split(" + "))
    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) == plan.recomputed_flops > 0


@pytest.mark.parametrize("kind", [one for one in MODELS if one not in ("an attribute that is taken back",)])
def test_without_a_trial_gradients_would_be_wrong_and_nobody_would_say_so(kind):
    # This is what `verify` found, in RecurrentGemma of transformers among others: the loss is right, and the gradients
    # are not.
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = outcome(model, step)
    with pytest.warns(RepeatWarning):
        traced = blocks(model, step).units.trace
    units = find_units(traced)

    tree = every_unit(units) if kind != "noise that is added" else every_unit(units, 1)
    with installed(model, calls_of(units), tree, Settings()):
        found = outcome(model, step)

    assert torch.equal(found["loss"], plain["loss"])
    assert differences(found, plain)


class Outer(nn.Module):
    """Tells the part inside of it what to do, and takes it back: it can be recomputed, and the part alone cannot."""

    def __init__(self):
        super().__init__()
        self.first, self.part = block(), IsTold()

    def forward(self, x):
        self.part.hidden["told"] = 1.5
        x = self.part(self.first(x))
        self.part.hidden["told"] = None
        return x


def test_a_block_may_be_recomputed_of_which_a_part_may_not():
    torch.manual_seed(0)
    model = nn.Sequential(*(Outer() for _ in range(4)))
    plain = outcome(model, step)

    with pytest.warns(RepeatWarning, match="TypeError"):
        pair = profile(model, step)
    planner_names = [unit.name for unit in pair.blocks.units.units]
    assert planner_names == ["0", "1", "2", "3"]
    assert "0.first" in [unit.name for unit in pair.leaves.units.units]
    assert not any(unit.name.endswith("part") for unit in pair.leaves.units.units)

    with pytest.warns(RepeatWarning):
        planner = Planner(model, step, cost="flops")
    for budget in (planner.floor_bytes, (planner.floor_bytes + planner.plain_peak()[0]) // 2):
        plan = planner.plan(budget)
        plan.apply(model)
        assert differences(outcome(model, step), plain) == []
        assert recomputed_flops(model, step) > 0
        plan.remove(model)


class Conditioned(nn.Module):
    """Tells all that it calls what to do, and takes it back."""

    def __init__(self):
        super().__init__()
        self.one, self.two = IsTold(), IsTold()

    def forward(self, x):
        self.one.hidden["told"], self.two.hidden["told"] = 1.5, 0.5
        x = self.two(self.one(x))
        self.one.hidden["told"] = self.two.hidden["told"] = None
        return x


def test_a_block_is_not_taken_apart_of_which_no_part_may_be_recomputed():
    torch.manual_seed(0)
    model = nn.Sequential(*(Conditioned() for _ in range(4)))
    plain = outcome(model, step)

    with pytest.warns(RepeatWarning, match="TypeError"):
        planner = Planner(model, step, cost="flops")
    plan = planner.plan(planner.floor_bytes)
    plan.apply(model)

    assert planner.solver.pair.leaves is None
    assert [unit.name for unit in plan.units] == ["0", "1", "2", "3"]
    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) > 0


def test_a_generator_that_is_registered_is_put_back_and_nothing_is_left_alone():
    torch.manual_seed(0)
    model = Between(DrawsOfNumpy)
    plain = outcome(model, step)
    extend.register(extend.numpy_random)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RepeatWarning)
            planner = Planner(model, step, cost="flops")
        plan = planner.plan(planner.floor_bytes)
        plan.apply(model)

        assert plan.unlike == {}
        assert "parts.0" in [unit.name for unit in plan.units]
        assert differences(outcome(model, step), plain) == []
    finally:
        extend.unregister(extend.numpy_random)


class Seen(Part):
    """Is told, counts and averages where a recompute looks."""

    def __init__(self):
        super().__init__()
        self.told, self.calls, self.scale = None, 0, torch.ones(64)

    def factor(self, x):
        self.calls += 1
        before = self.scale.clone()
        self.scale.mul_(0.9).add_(x.detach().std(0), alpha=0.1)
        return before * self.told * (1 + 0.1 * self.calls)


def tell_seen(part, number):
    part.told = 1.0 + number


def forget_seen(part):
    part.told = None


def test_attributes_that_change_are_put_back_and_nothing_is_left_alone():
    # An attribute that is taken back, a count of calls, a running average that is no buffer: all of them were told.
    torch.manual_seed(0)
    model = Between(Seen, tell_seen, forget_seen)

    def step(model):
        for part in model.parts:
            part.calls, part.scale = 0, torch.ones(64)
        return square(model(inputs()))

    plain = outcome(model, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatWarning)
        planner = Planner(model, step, cost="flops")
    plan = planner.plan(planner.floor_bytes)
    plan.apply(model)

    assert plan.unlike == {}
    assert "parts.0" in [unit.name for unit in plan.units]
    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) == plan.recomputed_flops > 0
    assert [(part.told, part.calls) for part in model.parts] == [(None, 1)] * 3


def test_dropout_and_batch_norm_are_repeated():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(linear(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.RReLU()) for _ in range(3)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatWarning)
        pair = profile(model, lambda m: square(m(inputs())))

    assert pair.blocks.units.unlike == {}


def test_a_model_of_which_nothing_can_be_recomputed_is_told_with_the_reason():
    torch.manual_seed(0)

    with pytest.raises(StepError, match=r"nothing to plan: .* the model itself: .*`random`"):
        Planner(Alone(), step)


class Puts(nn.Module):
    """Writes by a kernel of which torch says that it is not deterministic, and so differs from run to run here."""

    def __init__(self, noise):
        super().__init__()
        self.linear = linear()
        self.noise = noise

    def forward(self, x):
        written = torch.zeros(64).put_(torch.tensor([0]), torch.tensor([next(self.noise)]))
        return torch.tanh(self.linear(x) + written)


def test_a_kernel_that_differs_from_run_to_run_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(*(Puts(itertools.count(0.0)) for _ in range(2)))

    with pytest.warns(RepeatWarning, match="torch has no deterministic kernel for `put_` on this device, or since"):
        profile(model, step)


class Alone(nn.Module):
    """Calls no modules."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x):
        return torch.tanh(x @ self.weight * import_module("random").random())


def test_a_budget_that_cannot_be_kept_for_that_is_told_with_the_reason():
    torch.manual_seed(0)
    model = nn.Sequential(*(Counts() for _ in range(3)))
    with pytest.warns(RepeatWarning):
        planner = Planner(model, step)

    with pytest.raises(BudgetError, match=r"Smallest budget that works.*it gives other values then"):
        planner.plan("50%")


def test_a_plan_keeps_the_reasons_in_its_file_and_names_the_modules(tmp_path):
    torch.manual_seed(0)
    model = Between(Counts)
    with pytest.warns(RepeatWarning):
        planner = Planner(model, step, cost="flops")
    plan = planner.plan("90%")
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json").unlike == plan.unlike
    assert "not whole  parts.0, parts.1, parts.2: see `unlike`" in str(plan)


def test_where_memory_is_short_a_unit_is_tried_at_a_time(monkeypatch):
    torch.manual_seed(0)
    model, parts = Between(Counts), []
    plain = outcome(model, step)
    tried = profiling.tried
    monkeypatch.setattr(profiling, "tried", lambda *args: parts.append(args[-2]) or tried(*args))
    monkeypatch.setattr(Here, "free_bytes", lambda _: 0)

    with pytest.warns(RepeatWarning, match="it gives other values then"):
        planner = Planner(model, step, cost="flops")
    plan = planner.plan(planner.floor_bytes)
    plan.apply(model)

    assert {len(part) for part in parts} == {1}
    assert planner.profile.units.unlike.keys() == {"parts.0", "parts.1", "parts.2"}
    assert differences(outcome(model, step), plain) == []


def test_memory_that_runs_out_in_a_trial_makes_it_smaller(monkeypatch):
    torch.manual_seed(0)
    held, repeat = [], Region.repeat

    def with_less(region):
        alive = [one for one in gc.get_objects() if isinstance(one, Region) and one.held]
        held.append(len(alive))
        if len(alive) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        repeat(region)

    monkeypatch.setattr(Region, "repeat", with_less)
    with pytest.warns(RepeatWarning, match="it gives other values then"):
        pair = profile(Between(Counts), step)

    assert max(held) > 2
    assert min(held) <= 2
    assert pair.blocks.units.unlike.keys() == {"parts.0", "parts.1", "parts.2"}


def test_memory_that_runs_out_for_a_single_unit_is_told(monkeypatch):
    torch.manual_seed(0)
    tries = []

    def repeat(region):
        tries.append(region)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Region, "repeat", repeat)

    with pytest.warns(RepeatWarning, match="not enough memory to try"):
        pair = profile(Between(Counts), step)

    assert tries
    assert pair.blocks.units.unlike == {}


class Subclass(torch.Tensor):
    """A tensor whose bits nobody can read."""


def test_tensors_that_cannot_be_compared_leave_what_raises():
    torch.manual_seed(0)
    model = Between(IsTold, tell, forget)

    def other(model):
        return square(model(inputs().as_subclass(Subclass))).as_subclass(torch.Tensor)

    with pytest.warns(RepeatWarning, match="TypeError"):
        pair = profile(model, other)

    assert pair.blocks.units.unlike.keys() == {"parts.0", "parts.1", "parts.2"}


collected = ContextVar("collected")


class Collects(nn.Module):
    """Puts what it returns where code outside of the model finds it."""

    def __init__(self):
        super().__init__()
        self.inner = block()

    def forward(self, x):
        y = self.inner(x)
        collected.get().append(y)
        return y


def test_a_trial_leaves_no_region_behind():
    # No backward follows it, which would have let go of what the user's code holds on to.
    torch.manual_seed(0)
    model = nn.Sequential(*(Collects() for _ in range(3)))
    kept = []

    def step(model):
        collected.set([])
        kept.append(collected.get())
        return square(model(inputs()))

    gc.collect()
    gc.disable()
    try:
        profile(model, step)
        kept.clear()
        collected.set([])
        left = [one for one in gc.get_objects() if isinstance(one, Region) and one.calls]
    finally:
        gc.enable()

    assert left == []


def test_flags_are_as_they_were_also_after_an_error():
    assert not torch.are_deterministic_algorithms_enabled()
    seen = Log()

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()

        def forward(self, x):
            seen.append(torch.are_deterministic_algorithms_enabled())
            if any(seen):
                raise KeyboardInterrupt
            return self.inner(x)

    with pytest.raises(KeyboardInterrupt):
        profile(nn.Sequential(Fails(), block(), Noise()), step)  # the noise is why units are tried

    assert seen[-1]
    assert not torch.are_deterministic_algorithms_enabled()


def test_shapes_that_come_later_are_tried_no_more(monkeypatch):
    torch.manual_seed(0)
    model, tries = Between(Counts), []
    tried = profiling.tried
    monkeypatch.setattr(profiling, "tried", lambda *args: tries.append(args) or tried(*args))

    def on(model, rows):
        begins(model)
        return square(model(inputs(rows, 64)))

    plain = {}
    for rows in (64, 128, 256):
        loss = on(model, rows)
        loss.backward()
        plain[rows] = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Adaptive(model, on, budget="1MiB", shape=lambda rows: (rows,), cost="flops", over="warn") as adaptive:
            adaptive.learn(64)
            first = len(tries)
            adaptive.learn(128, 256)
            for rows, grads in plain.items():
                adaptive(rows)
                assert all(torch.equal(own.grad, grad) for own, grad in zip(model.parameters(), grads, strict=True))
                model.zero_grad(set_to_none=True)
            recomputed = [one.recomputed_calls for one in adaptive.plans]

    assert first
    assert len(tries) == first
    assert sum(one.category is RepeatWarning for one in caught) == 1
    assert max(recomputed) > 0


def test_reasons_are_told_with_the_modules_that_have_them():
    unlike = {"": "it counts"} | {f"layers.{number}": "it draws" for number in range(5)}

    message = told(unlike)

    assert "modules of the model (6)" in message
    assert "the model itself: it counts; `layers.0`, `layers.1`, `layers.2` and 2 more: it draws. " in message
