"""Steps of a training that are measured now and then, on the CPU."""

import threading
import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import torchremat
from probes.memory import profiled
from probes.planning import applied_scopes
from torchremat import BudgetWarning

X = torch.randn(8, 64, 64)


class Net(nn.Module):
    """Its forward takes its batch as often as somebody has said, which no shape of an input shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.times = 1

    def forward(self, x):
        x = x.repeat(self.times, 1, 1)
        for block in self.blocks:
            x = x + block(x)
        return x


def step(model):
    return model(X).square().mean()


@cache
def planned(*, accumulates):
    model = Net()
    optimizer = AdamW(model.parameters())
    options = {"cost": "flops", "operators": False, "optimizer": optimizer, "accumulates": accumulates}
    return torchremat.plan(model, step, budget="60%", **options)


@pytest.fixture
def trained(request):
    """A planned model, its optimizer, the plan, and what measures; time stands still, so that nothing is left out.

    The plan is for a loop that drops gradients before the forward, or for one that accumulates, as a parameter says.
    """
    model = Net()
    optimizer = AdamW(model.parameters())
    plan = planned(accumulates=getattr(request, "param", False))
    plan.apply(model)
    soundings = applied_scopes(model)[0].checks._soundings
    soundings._log.clock = lambda: 0.0
    yield model, optimizer, plan, soundings
    assert not profiled.a_profiler_runs()
    assert not profiled._recording.locked()


def train(model, optimizer, steps, *, zero="after"):
    def closure():
        optimizer.zero_grad()
        loss = step(model)
        loss.backward()
        return loss

    for _ in range(steps):
        if zero == "closure":
            optimizer.step(closure)
            continue
        loss = step(model)
        if zero == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()


def test_the_second_step_and_then_ones_at_distances_that_double(trained):
    model, optimizer, _, soundings = trained

    train(model, optimizer, 20)

    assert soundings.measured == [2, 4, 8, 16]


def test_measuring_takes_a_small_share_of_the_time(trained):
    model, optimizer, _, soundings = trained
    now_s = iter(range(10_000))
    soundings._log.clock = lambda: float(next(now_s))  # each look takes a second, and nothing else does

    train(model, optimizer, 40)

    assert soundings.measured == [2]


@pytest.mark.parametrize(
    ("trained", "zero"), [(True, "never"), (True, "between"), (False, "after")], indirect=["trained"]
)
def test_the_measured_peaks_are_the_predicted_ones(trained, zero):
    model, optimizer, plan, soundings = trained

    train(model, optimizer, 2, zero=zero)

    (peak, where), (optimizer_peak, what) = soundings._log.peaks
    assert (where, what) == ("forward and backward", "AdamW.step()")
    assert optimizer_peak == plan.optimizer_peak_bytes
    if zero == "between":  # the plan has gradients lie there all along, and here they go before the backward
        gradients = sum(one.nbytes for one in model.parameters())
        assert plan.step_peak_bytes - gradients < peak < plan.step_peak_bytes
    else:
        assert peak == plan.step_peak_bytes


def test_a_step_with_a_closure_is_measured_when_that_has_run(trained):
    model, optimizer, plan, soundings = trained

    train(model, optimizer, 3, zero="closure")

    # The closure of the third step begins with a forward, which takes what was measured of the one before.
    assert soundings._log.peaks == [(plan.optimizer_peak_bytes, "AdamW.step()")]


def test_a_step_above_the_budget_is_told_once_and_nothing_is_measured_after_it(trained):
    model, optimizer, plan, _ = trained
    train(model, optimizer, 3)
    model.times = 2

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, optimizer, 20)

    (said,) = found
    assert said.category is BudgetWarning
    assert "in forward and backward: " in str(said.message)
    asked = torchremat.planning.training.checks.format_bytes(plan.budget_bytes)
    assert f"above the budget of {asked}" in str(said.message)
    assert applied_scopes(model)[0].checks._soundings is None


def test_training_is_bit_identical(trained):
    model, optimizer, _, soundings = trained
    plain = Net()
    train(plain, AdamW(plain.parameters()), 6)

    train(model, optimizer, 6)

    assert soundings.measured == [2, 4]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_nothing_is_measured_under_a_profiler(trained):
    model, optimizer, _, soundings = trained

    with torch.profiler.profile() as profile:
        train(model, optimizer, 3)

    assert soundings.measured == []
    assert sum(event.name == "aten::addmm" for event in profile.events()) >= 3 * 12


def test_a_profiler_that_starts_in_the_midst_of_it_has_all_its_events(trained):
    model, optimizer, _, soundings = trained
    train(model, optimizer, 1)
    loss = step(model)

    with torch.profiler.profile() as profile:
        loss.backward()
        optimizer.step()

    assert soundings.measured == [2]
    assert soundings._log.peaks == []
    assert any(event.name.startswith("Optimizer.step#AdamW") for event in profile.events())


def test_a_profiler_of_another_thread_waits_for_its_end(trained):
    model, optimizer, _, soundings = trained
    train(model, optimizer, 1)
    loss, counts = step(model), []

    def other():
        with torch.profiler.profile() as profile:
            torch.ones(3).exp()
        counts.append(len(profile.events()))

    thread = threading.Thread(target=other)
    thread.start()
    loss.backward()
    optimizer.step()
    thread.join()

    assert counts[0] > 0
    assert len(soundings._log.peaks) >= 1


def test_measure_is_not_disturbed(trained):
    model, optimizer, _, soundings = trained
    train(model, optimizer, 1)
    alone = torchremat.measure(model, step, optimizer=optimizer).peak_bytes
    loss = step(model)

    measured = torchremat.measure(model, step, optimizer=optimizer)
    loss.backward()

    assert soundings.measured == [2]
    assert (measured.peak_bytes, measured.source) == (alone, "allocator")


def test_a_forward_that_raises_ends_the_recording(trained):
    model, optimizer, _, soundings = trained
    train(model, optimizer, 1)

    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))

    assert soundings.measured == [2]
    assert not profiled._recording.locked()


def test_two_forwards_before_one_backward_are_one_step(trained):
    model, optimizer, plan, soundings = trained
    train(model, optimizer, 1)

    (step(model) + step(model)).backward()
    optimizer.step()

    assert soundings.measured == [2]
    # What both have kept lies there when backward begins.
    assert soundings._log.peaks[0][0] > plan.step_peak_bytes


def test_a_thread_that_ends_in_the_midst_of_it_leaves_nothing_behind(trained):
    model, optimizer, _, _ = trained
    train(model, optimizer, 1)
    thread = threading.Thread(target=lambda: step(model))
    thread.start()
    thread.join()

    train(model, optimizer, 3)

    assert torchremat.measure(model, step).source == "allocator"
