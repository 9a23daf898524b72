"""Seconds of a step on a device: its kernels' own, or the host's where the host limits the step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from logs import Log
from models import gpt_step
from planning import steps
from probes.memory import subject_of
from probes.planning import ForwardSeconds, Here, every_unit, find_units, profiling, scaled, trace
from torchremat import extend
from torchremat.measuring.traces import AllocationRecorder


@pytest.fixture(scope="module")
def profile():
    """A profile whose seconds count as a device's."""
    found = steps.profile(*gpt_step(batch=2, context=32, blocks=3, width=32, heads=2)).blocks
    trace = found.units.trace
    allocations = replace(trace.allocations, has_device_time=True)
    return replace(found, units=replace(found.units, trace=replace(trace, allocations=allocations)))


def test_a_device_that_is_slower_than_its_host_sets_the_seconds(profile):
    assert scaled(profile, ForwardSeconds(launched_s=1e-9, done_s=1.0)) is profile


def test_a_host_that_is_slower_than_its_device_sets_the_seconds(profile):
    found = scaled(profile, ForwardSeconds(launched_s=100.0, done_s=100.0))

    runs = len(profile.units.trace.operators.runs)
    assert found.forward_seconds == 100.0
    assert found.seconds == 200.0
    for cost, (operators, ends) in zip(found.costs, profile.reached, strict=True):
        assert cost.seconds == pytest.approx(100.0 * len(operators) / runs)
        # A recompute launches less than the whole forward, and the region comes on top.
        launched_s = 100.0 * sum(one < ends for one in operators) / runs
        assert launched_s < cost.seconds_truncated < launched_s + 0.1
    assert sum(len(operators) for operators, _ in profile.reached) <= runs


def test_the_seconds_of_a_cpu_are_those_of_the_unwatched_forward(profile):
    trace = profile.units.trace
    here = replace(trace, allocations=replace(trace.allocations, has_device_time=False))
    found = scaled(
        replace(profile, units=replace(profile.units, trace=here)), ForwardSeconds(launched_s=0.0, done_s=7.0)
    )

    assert found.forward_seconds == 7.0
    assert found.seconds / profile.seconds == pytest.approx(7.0 / profile.forward_seconds)
    for cost, own, state_s in zip(found.costs, profile.costs, profile.state_s, strict=True):
        # Those of operators are scaled; those of a region were taken as they are.
        assert cost.seconds / own.seconds == pytest.approx(7.0 / profile.forward_seconds)
        assert cost.seconds_inside == cost.seconds + state_s
        assert cost.seconds_truncated > state_s


TOOK_S = Log()


class Slow(nn.Linear):
    """Takes a thousand seconds by a clock of its own."""

    def forward(self, x):
        TOOK_S.append(1000.0)
        return super().forward(x).relu()


class SlowState:
    """State that takes a second to capture, and ten to restore."""

    name = "slow state"

    def capture(self):
        TOOK_S.append(1.0)

    def restore(self, state):
        TOOK_S.append(10.0)


@pytest.mark.parametrize("compares", [True, False])
def test_the_seconds_of_state_are_those_between_calls(monkeypatch, compares):
    monkeypatch.setattr(AllocationRecorder, "seconds", lambda _: sum(TOOK_S))
    model, x = nn.Sequential(*(Slow(4, 4) for _ in range(3))), torch.ones(2, 4)

    def step(model):
        return model(x).sum()

    units = find_units(trace(model, step))
    with extend.registered(SlowState()):
        subject, here = subject_of(step, model, None), Here(torch.device("cpu"))
        watched = profiling.watch(model, subject, units, every_unit(units), here, compares=compares)
        found = subject.train(watched).profile()

    # Captured before the call; for the recompute that of the backward is captured, and each is restored once.
    assert found.state_s == (1.0 + 1.0 + 10.0 + 10.0,) * 3
