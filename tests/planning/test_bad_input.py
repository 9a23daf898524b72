"""Models and steps out of the ordinary: each works, or gets an error that names it, and nothing has changed."""

import random
import re
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from logs import Count, Log
from planning.kinds import KINDS, Loop, block, inputs, linear, square
from planning.steps import differences, fingerprint, outcome, recomputed_flops
from probes.memory import Versioned
from torchremat import (
    Adaptive,
    BudgetError,
    Pipe,
    PlanError,
    Planner,
    StepError,
    UnsupportedError,
    WrapError,
    compiled,
    fit,
    frontier,
    guard,
    measure,
    plan,
    verify,
    wrap,
)
from torchremat.pipeline import attach, plan_stages
from turns import in_turn


def step(model):
    return square(model(inputs()))


def draws(model):
    random.random()
    np.random.rand()
    return square(model(inputs()) * torch.rand(()))


def floored(model, own=step):
    """The model with the lowest plan applied."""
    planner = Planner(model, own, cost="flops")
    planner.plan(planner.floor_bytes).apply(model)
    return model


def test_generators_of_torch_python_and_numpy_are_as_before():
    model = Loop()
    before = fingerprint(model)

    plan(model, draws, budget="80%")

    assert before.changes(fingerprint(model)) == []


def test_parameters_on_meta_are_named():
    with torch.device("meta"):
        model = Loop()

    with pytest.raises(StepError, match=r"16 parameters or buffers are on the meta device \(layers.0.0.weight, "):
        plan(model, step, budget="80%")


def test_lazy_modules_are_named():
    model = nn.Sequential(nn.LazyLinear(64), linear())

    with pytest.raises(StepError, match=r"have no shape yet \(0.weight, 0.bias\).*Run the model once"):
        plan(model, step, budget="80%")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so to whoever profiles
def test_a_profiler_of_the_users_keeps_its_events():
    model = Loop()
    before = fingerprint(model)

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model)
        with pytest.raises(UnsupportedError, match="profiler"):
            plan(model, step, budget="80%")

    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert before.changes(fingerprint(model)) == []


def test_a_model_in_eval_mode_is_planned_and_stays_there():
    model = Loop().eval()
    plain = outcome(model, step)

    floored(model)

    assert not any(module.training for module in model.modules())
    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) > 0


def test_a_model_that_changes_its_calls_between_runs_is_an_error():
    class Alternates(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = block(), block(), block()
            self.runs = Count()

        def forward(self, x):
            self.runs.up()
            return self.c(self.a(x) if self.runs.value % 2 else self.b(x))

    model = Alternates()

    with pytest.raises(StepError, match=r"was called in one run of the step and not in the next"):
        plan(model, step, budget="80%")

    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_saves_nothing():
    class Sum(nn.Module):
        def forward(self, x):
            return x + x

    model = nn.Sequential(Sum(), Sum())
    bias = torch.zeros(64, requires_grad=True)

    made = plan(model, lambda m: (m(inputs() + bias)).sum(), budget="100%")

    assert made.recomputed_calls == 0
    assert [unit.saved_bytes for unit in made.units] == [0, 0]
    assert bias.grad is None


def test_names_that_are_strange():
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in ("0", "self", "üñï", "with space", "__x__", "layers"):
        model.add_module(name, block())
    plain = outcome(model, step)

    floored(model)

    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) > 0


def test_deeply_nested_sequentials():
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    for _ in range(20):
        model = nn.Sequential(model)
    plain = outcome(model, step)

    floored(model)

    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) > 0


def test_a_buffer_that_grows():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x.detach().mean().view(1)])
            return self.inner(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Grows() for _ in range(4)))
    before = fingerprint(model)

    planner = Planner(model, step, cost="flops")
    assert before.changes(fingerprint(model)) == []
    planner.plan(planner.floor_bytes).apply(model)
    step(model).backward()

    assert [one.seen.numel() for one in model] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["loop", "glue in place", "siamese"])
def test_autocast_around_the_step_is_exact(name):
    model, own = KINDS[name]()

    def half(m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return own(m).float()

    plain = outcome(model, half)

    floored(model, half)

    assert differences(outcome(model, half), plain) == []
    assert recomputed_flops(model, half) > 0


def test_a_step_that_raises_in_the_recompute_alone_leaves_everything():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.runs, self.hidden_runs = block(), 0, Count()

        def forward(self, x):
            self.runs += 1
            self.hidden_runs.up()
            if self.hidden_runs.value == 3:  # traced, watched, and then its recompute
                raise KeyboardInterrupt
            return self.inner(x)

    torch.manual_seed(0)
    model = nn.Sequential(block(), Fails(), block())
    square(model[2](model[0](inputs()))).backward()
    before = fingerprint(model)

    with pytest.raises(KeyboardInterrupt):
        plan(model, step, budget="80%")

    assert model[1].hidden_runs.value == 3
    assert before.changes(fingerprint(model)) == []


CALLS = {
    "plan": lambda model, own, **options: plan(model, own, budget="80%", **options),
    "fit": lambda model, own, **options: fit(model, own, budget="80%", **options),
    "verify": lambda model, own, **options: verify(model, own, **options),
    "measure": lambda model, own, **options: measure(model, own, **options),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": [Loop]}, r"model: expected a torch.nn.Module, got list"),
        ({"model": Loop}, r"model: expected a torch.nn.Module, got type"),
        ({"own": None}, r"step: expected a function that returns the loss, got NoneType"),
        ({"own": lambda: None}, r"step: it is called as `step\(model\)`, which .* does not take: too many positional"),
        ({"own": lambda m, x: None}, r"step: it is called as `step\(model\)`, .*: missing a required argument: 'x'"),
        ({"optimizer": torch.optim.SGD}, r"optimizer: expected a torch.optim.Optimizer, got type"),
        (
            {"optimizer": type("Optimizer", (), {"__module__": "package.optim"})()},
            r"optimizer: expected a torch.optim.Optimizer, got package.optim.Optimizer\.$",
        ),
    ],
)
def test_arguments_of_another_kind_are_named(call, change, said):
    # These ended in an AttributeError from within: 'list' object has no attribute 'named_parameters'.
    with pytest.raises(StepError, match=said):
        call(**{"model": Loop(), "own": step, **change})


def test_what_is_no_model_is_named_where_plans_and_regions_go():
    made = plan(Loop(), step, budget="100%")

    with pytest.raises(StepError, match="got NoneType"):
        verify(None, step)
    with pytest.raises(PlanError, match=r"model: expected a torch.nn.Module, got NoneType"):
        made.apply(None)
    with pytest.raises(PlanError, match=r"model: expected a torch.nn.Module, got function"):
        made.remove(step)
    with pytest.raises(WrapError, match=r"model: expected a torch.nn.Module, got NoneType"):
        wrap(None, "*")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", r"device='gpu' is not a device such as \"cpu\" or \"cuda:0\""),
        (object(), r"device=<object .* is not a device"),
        (f"cuda:{torch.cuda.device_count()}", r"torch finds \d+ CUDA devices here"),
        ("meta", r"on cpu and cuda, not on meta"),
    ],
)
def test_devices_that_are_not_there_are_named(call, device, said):
    # Without CUDA, torch raises an AssertionError here, which the documentation calls a bug of the library.
    with pytest.raises(UnsupportedError, match=said):
        call(Loop(), step, device=device)


@pytest.mark.parametrize("name", ["plan", "verify", "measure"])
def test_the_index_of_the_cpu_does_not_matter(name):
    # No tensor says that it is on "cpu:0", so nothing seemed to lie there before the step: peaks were too low by all of
    # the parameters and gradients.
    found, indexed = (CALLS[name](Loop(), step, device=device) for device in ("cpu", "cpu:0"))

    # Which plan is the fastest depends on a clock.
    peak, peak_indexed = (getattr(one, "plain_peak_bytes", None) or one.peak_bytes for one in (found, indexed))
    assert peak_indexed == peak


@pytest.mark.parametrize("call", [CALLS["plan"], CALLS["fit"], CALLS["verify"]], ids=["plan", "fit", "verify"])
def test_optimizers_that_cannot_step_by_themselves_are_named(call):
    model = Loop()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = fingerprint(model, optimizer=optimizer)

    said = r"LBFGS.step\(\) has to run by itself .*'closure'.*Leave the optimizer out"
    with pytest.raises(UnsupportedError, match=said):
        call(model, step, optimizer=optimizer)

    assert before.changes(fingerprint(model, optimizer=optimizer)) == []


class Unusual(torch.optim.SGD):
    """Keeps what it counts in places where torch's own optimizers keep nothing."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state["steps"] = 0
        self.rates = [torch.zeros(())]

    def step(self, closure=None):
        self.state["steps"] += 1
        self.rates.append(torch.ones(()))
        self.rates[0].add_(1)
        self.last = self.rates[-1]
        for group in self.param_groups:
            group["seen"] = True
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(parameter.grad.clone())
        super().step()


@pytest.mark.parametrize("ran", [False, True])
def test_an_optimizer_with_a_state_of_its_own_kind_is_left_as_it_was(ran):
    # A number among the state ended in a TypeError, attributes and options stayed as the step had left them, and a list
    # in the state kept what the step had appended.
    model = Loop()
    optimizer = Unusual(model.parameters(), lr=0.1)
    if ran:
        step(model).backward()
        optimizer.step()
    first = next(model.parameters())

    def told():
        history = [one.clone() for one in optimizer.state[first]["history"]] if ran else None
        return (
            sorted(vars(optimizer)),
            optimizer.state["steps"],
            optimizer.rates[0].item(),
            len(optimizer.rates),
            history,
        )

    before, same = told(), fingerprint(model, optimizer=optimizer)

    plan(model, step, budget="100%", optimizer=optimizer)

    assert same.changes(fingerprint(model, optimizer=optimizer)) == []
    assert str(told()) == str(before)


def test_the_tensor_of_a_learning_rate_stays_the_same_object():
    model = Loop()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    rate = optimizer.param_groups[0]["lr"]

    plan(model, step, budget="100%", optimizer=optimizer)

    assert optimizer.param_groups[0]["lr"] is rate


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rest = nn.Embedding(100, 64, sparse=True), Loop()

    def forward(self, words):
        return self.rest(self.words(words))


def sparse_step(model):
    return square(model(torch.arange(32)))


def test_sparse_gradients_that_are_there_are_compared():
    # A gradient from an earlier step makes those of the runs sparse, and torch.equal knows no sparse tensors.
    model = Sparse()
    sparse_step(model).backward()
    grad = model.words.weight.grad
    made = plan(model, sparse_step, budget="90%")
    made.apply(model)

    report = verify(model, sparse_step)

    assert report.is_exact is True
    assert model.words.weight.grad is grad
    assert grad.is_sparse


def test_complex_gradients_are_compared_in_both_parts():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.runs = nn.Parameter(torch.ones(4, dtype=torch.cfloat)), Count()

        def forward(self, x):
            self.runs.up()
            return (self.weight * x * (1 if self.runs.value <= 2 else 1j)).real.sum()

    report = verify(Turns(), lambda model: model(torch.ones(4)))

    assert "the gradient of `weight` differs by up to 1.41" in report.differences


def test_a_complex_loss_is_named():
    model = nn.Linear(4, 4, dtype=torch.cfloat)

    for call in CALLS.values():
        with pytest.raises(StepError, match=r"a complex loss \(torch.complex64\).*real part"):
            call(model, lambda m: m(torch.ones(2, 4, dtype=torch.cfloat)).sum())


def test_an_interrupt_while_the_optimizer_is_put_back_waits(monkeypatch):
    # The step of AdamW decays weights. Ctrl-C between two of them left those after it decayed.
    model = Loop()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    step(model).backward()
    optimizer.step()
    before = fingerprint(model, optimizer=optimizer)

    reset = Versioned.reset

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        reset(self)

    monkeypatch.setattr(Versioned, "reset", interrupted)

    with pytest.raises(KeyboardInterrupt):
        plan(model, step, budget="100%", optimizer=optimizer)

    assert before.changes(fingerprint(model, optimizer=optimizer)) == []


@pytest.mark.parametrize(
    "budget", ["9" * 5000 + "B", 10**5000, "100000TiB", 2**70], ids=["digits", "a long int", "TiB", "2**70"]
)
def test_a_budget_beyond_all_sizes_is_refused_before_any_work(budget):
    ran = Log()
    model = block()

    with pytest.raises(BudgetError):
        plan(model, lambda m: ran.append(1) or step(m), budget=budget)
    assert not ran


def adapted(model, own, **options):
    return Adaptive(model, lambda m, batch: own(m), **options)


def guarded(model, own, **options):
    with guard(model, own, **options) as safe:
        safe(model)


@pytest.mark.parametrize("call", [plan, fit, adapted, guarded])
@pytest.mark.parametrize(
    ("margin", "said"), [("much", "'much' is not a size"), (2**30, "leaves nothing of the budget of 1.00 GiB")]
)
def test_a_margin_that_is_none_is_refused_before_any_work(call, margin, said):
    # The step was profiled first, and what that took was lost.
    ran = Log()

    with pytest.raises(BudgetError, match=said):
        call(block(), lambda m: ran.append(1) or step(m), budget="1GiB", margin=margin)
    assert not ran


def test_what_is_no_model_is_named_without_running_as_well():
    with pytest.raises(StepError, match=r"expected a torch\.nn\.Module, got int"):
        plan(3, step, budget="80%", on="meta", device="h100")


FLAGS = [
    (plan, "operators"),
    (plan, "allow_lossy"),
    (fit, "operators"),
    (fit, "allow_lossy"),
    (frontier, "operators"),
    (frontier, "allow_lossy"),
    (adapted, "operators"),
    (lambda model, own, **options: compiled(model, **options), "fullgraph"),
    (lambda model, own, **options: compiled(model, **options), "dynamic"),
    (lambda model, own, **options: plan_stages(Pipe(model, balance=[len(model)]), own, **options), "lookahead"),
    (lambda model, own, budget, **options: attach(model, **options), "lookahead"),
    (lambda model, own, budget, **options: attach(model, **options), "record"),
]


@pytest.mark.parametrize(("call", "name"), FLAGS)
@in_turn("value", ["no", 3, 0, torch.tensor(True)])
def test_options_that_are_on_or_off_are_nothing_else(call, name, value):
    # "no" was taken for on, and 0 for off, without a word.
    ran = Log()
    options = {} if call is frontier else {"budget": 2**30}

    with pytest.raises(UnsupportedError, match=rf"^{name}={re.escape(repr(value))}: expected True.*"):
        call(block(), lambda m: ran.append(1) or step(m), **options, **{name: value})
    assert not ran


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (plan, {"cost": "bytes"}),
        (plan, {"on": "cuda"}),
        (plan, {"operators": 1}),
        (plan, {"progress": True}),
        (frontier, {"points": 1}),
        (adapted, {"over": "no"}),
        (adapted, {"classes": 0}),
        (guarded, {"attempts": 0}),
        (lambda model, own, **options: compiled(model, **options), {"cost": "bytes"}),
    ],
)
def test_wrong_options_are_errors_of_one_kind(call, options):
    # Some were a BudgetError, as if a budget were no size, and some an UnsupportedError, which was no ValueError.
    budget = {} if call is frontier else {"budget": 2**30}

    with pytest.raises(UnsupportedError, match=f"{next(iter(options))}=") as raised:
        call(block(), step, **budget, **options)
    assert isinstance(raised.value, ValueError)


def test_a_plan_is_applied_with_options_that_are_on_or_off_alone():
    model = block()
    made = plan(model, step, budget="100%")

    with pytest.raises(UnsupportedError, match=r"^allow_lossy='no': expected True or False"):
        made.apply(model, allow_lossy="no")


@pytest.mark.parametrize("margin", [False, 0.0, None, "", "0", -1])
def test_a_margin_is_a_size_or_nothing(margin):
    planner = Planner(block(), step)

    with pytest.raises(BudgetError):
        planner.plan("100%", margin=margin)
    for none in (0, "0B", "0 GiB"):
        planner.plan("100%", margin=none)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model": None}, UnsupportedError, "model: expected a torch.nn.Module or a function, got NoneType"),
        ({"model": 5}, UnsupportedError, "model: expected a torch.nn.Module or a function, got int"),
        ({"margin": "2GiB"}, BudgetError, "margin='2GiB' is 2.00 GiB, which leaves nothing of the budget of 1.00 GiB"),
        ({"margin": "much"}, BudgetError, "'much' is not a size"),
    ],
)
def test_what_cannot_be_compiled_is_said_at_once(change, error, said):
    # What is no model was an error of dynamo's at the first call, and a margin above the budget one of a split.
    with pytest.raises(error, match=said):
        compiled(**{"model": block(), "budget": "1GiB", **change})
