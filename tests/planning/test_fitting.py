"""Plan, apply and one real step in one: it comes back confirmed, or with an error and untouched."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import models
from logs import Log
from planning.kinds import KINDS, Loop, block, inputs, square
from planning.steps import differences, fingerprint, outcome, recomputed_flops, traced_peak
from probes.planning import applied_scopes, fit_with, fitting
from torchremat import BudgetError, PlanError, Planner, StepError, fit, unwrap, wrap


def gpt(**options):
    return models.gpt_step(blocks=4, width=64, context=128, batch=4, **options)


@pytest.mark.parametrize("optimizer", [False, True])
def test_the_model_comes_back_within_the_budget(optimizer):
    model, step = gpt()
    own = torch.optim.AdamW(model.parameters(), fused=True) if optimizer else None
    plain, before = outcome(model, step), fingerprint(model, optimizer=own)
    budget = Planner(model, step, optimizer=own).plain_peak()[0] * 8 // 10

    returned = fit(model, step, budget=budget, optimizer=own)

    assert returned is model
    planner = Planner(gpt()[0], step)
    state = 2 * 4 * sum(p.numel() for p in model.parameters()) if optimizer else 0
    assert planner.fixed_bytes + state + traced_peak(model, step) <= budget
    assert recomputed_flops(model, step) > 0
    assert differences(outcome(model, step), plain) == []
    changed = {name.rpartition(".")[2] for name in before.changes(fingerprint(model, optimizer=own))}
    put_on = ("forward", "compile", "_replicate_for_data_parallel")
    assert all(one in put_on or one.endswith("keys") for one in changed)


def test_a_budget_that_needs_no_plan():
    model, step = gpt()

    fit(model, step, budget="100%")

    assert recomputed_flops(model, step) == 0
    assert len(applied_scopes(model)) == 1


def measured_with(monkeypatch, extra):
    """Let the step need more than it does, by `extra(attempt)` bytes."""
    real, attempts = fitting.observe_allocations, []

    def run(*args, **kwargs):
        attempts.append(1)
        traced = yield from real(*args, **kwargs)
        return replace(traced, trace=replace(traced.trace, slack_bytes=extra(len(attempts))))

    monkeypatch.setattr(fitting, "observe_allocations", run)
    return attempts


def test_a_measured_peak_above_the_budget_tightens_the_plan(monkeypatch):
    model, step = gpt()
    planner = Planner(model, step, cost="flops")
    budget = (planner.floor_bytes + planner.plain_peak()[0]) // 2
    loose = planner.plan(budget)
    extra = budget - loose.step_peak_bytes + 200_000
    attempts = measured_with(monkeypatch, lambda attempt: extra)

    fitted = fit_with(planner, model, budget=budget)

    made = fitted.plan
    assert len(attempts) >= 2
    assert fitted.peak_bytes <= fitted.limit_bytes == budget
    assert made.step_peak_bytes + extra <= budget
    assert made.budget_bytes == budget
    assert made.step_peak_bytes < loose.step_peak_bytes
    assert recomputed_flops(model, step) == made.recomputed_flops


def test_a_peak_that_stays_above_is_an_error_after_three_more(monkeypatch):
    model, step = gpt()
    step(model).backward()
    planner = Planner(model, step, cost="flops")
    budget = planner.plain_peak()[0]
    before = fingerprint(model)
    real, attempts = fitting.observe_allocations, []

    def run(*args, **kwargs):
        attempts.append(1)
        traced = yield from real(*args, **kwargs)
        more = budget + 1000 - planner.fixed_bytes - traced.peak_bytes
        return replace(traced, trace=replace(traced.trace, slack_bytes=more))

    monkeypatch.setattr(fitting, "observe_allocations", run)

    with pytest.raises(BudgetError, match=r"after 4 plans for .* the measured peak is still .* Give a larger budget"):
        fit_with(planner, model, budget=budget)

    assert len(attempts) == 4
    assert before.changes(fingerprint(model)) == []


def test_no_room_to_tighten_is_an_error_that_counts_what_is_set_aside(monkeypatch):
    model, step = gpt()
    planner = Planner(model, step)
    budget = planner.floor_bytes
    before = fingerprint(model)
    measured_with(monkeypatch, lambda attempt: 100_000)

    with pytest.raises(BudgetError, match="are set aside"):
        fit_with(planner, model, budget=budget)

    assert before.changes(fingerprint(model)) == []


def test_a_budget_below_the_floor_says_which_one_works():
    model, step = gpt()
    before = fingerprint(model)

    with pytest.raises(BudgetError) as error:
        fit(model, step, budget=1000)
    smallest = int(re.search(r"Smallest budget that works: (\d+) bytes", str(error.value))[1])

    assert before.changes(fingerprint(model)) == []
    fit(model, step, budget=smallest)
    assert recomputed_flops(model, step) > 0


@pytest.mark.parametrize("budget", ["6GB/s", 0, True, ""])
def test_a_budget_that_is_none_is_an_error_before_anything_runs(budget):
    ran = Log()

    with pytest.raises(BudgetError):
        fit(Loop(), lambda m: ran.append(1), budget=budget)

    assert ran == []


def test_a_wrapped_model_is_refused():
    model, step = KINDS["loop"]()
    wrap(model, "layers.1")
    before = fingerprint(model)

    with pytest.raises(PlanError, match=r"wrapped modules already \(layers.1\)"):
        fit(model, step, budget="90%")

    assert before.changes(fingerprint(model)) == []


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_interrupt_in_any_run_leaves_everything(place):
    torch.manual_seed(0)
    model, x = nn.Sequential(block(), block(), block()), inputs(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    square(model(x)).backward()
    optimizer.step()
    before = fingerprint(model, optimizer=optimizer)
    interrupted = 0

    for run in range(1, 10):
        runs = Log()

        def step(m, runs=runs, run=run):
            runs.append(1)
            loss = square(m(x))
            if len(runs) == run:
                if place == "forward":
                    raise KeyboardInterrupt
                if loss.requires_grad:  # in the run that is only timed it does not
                    loss.register_hook(_interrupt)
            return loss

        try:
            fit(model, step, budget="80%", optimizer=optimizer)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            unwrap(model)
        assert before.changes(fingerprint(model, optimizer=optimizer)) == [], run

    # Traced (no backward), watched, timed (no backward), watched in parts, plain, fitted.
    assert interrupted >= (5 if place == "forward" else 3)


def _interrupt(gradient):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m: None, "returned None"),
        (lambda m: m(inputs()), "a loss of shape"),
        (lambda m: (square(m(inputs())), 1), "a tuple of 2"),
        (lambda m: square(m(inputs())).detach(), "does not require grad"),
        (lambda m: square(m(inputs())).backward(), "the step has run backward itself"),
    ],
)
def test_bad_steps_are_named(step, said):
    model, good = KINDS["loop"]()
    good(model).backward()
    before = fingerprint(model)

    with pytest.raises(StepError, match=said):
        fit(model, step, budget="80%")

    assert before.changes(fingerprint(model)) == []
