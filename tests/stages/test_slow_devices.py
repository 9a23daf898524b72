"""A device that is slow in backward, while all others are as far ahead as the edges of the pipe let them be."""

import time
from collections import Counter

import pytest
import torch
from torch import nn

from probes.pipelines import copying
from torchremat import Pipe
from torchremat._compat.autograd import current_graph_task
from torchremat.pipeline import StagePlanner
from torchremat.pipeline.skip import pop, skippable, stash

pytestmark = pytest.mark.gpu

MICROBATCHES, SIZE = 5, 1 << 14
BYTES = 4 * SIZE  # of what a microbatch passes
DEADLINE_S = 60
# A profile has a scalar in the place of the steps after a stage, which counts for each microbatch; and rounding.
SLACK_BYTES = 512 * (MICROBATCHES + 1)


class Slow:
    """Lets the backward of one stage wait for the gradients that may come to its device meanwhile.

    Attributes:
        stage: The stage; None if none waits.
        came: How many had come when each of its microbatches had waited.
    """

    def __init__(self):
        self.stage, self.came, self.copied = None, [], Counter()

    def begin(self, stage, device, expected=()):
        """Let a stage wait from now on.

        Args:
            stage: The stage.
            device: Its device.
            expected: How many gradients each of its microbatches waits for.
        """
        self.stage, self.device, self.expected = stage, device, expected
        self.came.clear()
        self.copied.clear()

    def wait(self, stage, *, is_last):
        if stage != self.stage:
            return
        if not is_last:
            time.sleep(0.005)
            return
        ends = time.monotonic() + DEADLINE_S
        while self.expected and self.copied[self.device] < self.expected[len(self.came)] and time.monotonic() < ends:
            time.sleep(0.001)
        time.sleep(0.02)  # so that more come, if nothing holds them back
        self.came.append(self.copied[self.device])


SLOW = Slow()


class Wait(torch.autograd.Function):
    """Passes a tensor on; in backward it waits."""

    @staticmethod
    def forward(ctx, stage, is_last, x):
        ctx.stage, ctx.is_last = stage, is_last
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        SLOW.wait(ctx.stage, is_last=ctx.is_last)
        return None, None, grad


def slowly(stage, x):
    """A slow backward, of several nodes: between them the thread of the device runs what others wait for."""
    for number in range(MICROBATCHES):
        x = Wait.apply(stage, number == 0, x)
    return x


class Layer(nn.Module):
    """Without products of matrices, which have workspaces."""

    def __init__(self, stage=None):
        super().__init__()
        self.weight, self.stage = nn.Parameter(torch.ones(SIZE)), stage

    def forward(self, x):
        x = (x * self.weight).tanh()
        return x if self.stage is None else slowly(self.stage, x)


@skippable(stash=["skip"])
class Stash(Layer):
    def forward(self, x):
        yield stash("skip", x * 2)
        return Layer.forward(self, x)


@skippable(pop=["skip"])
class Pop(Layer):
    def forward(self, x):
        skip = yield pop("skip")
        return Layer.forward(self, x) + skip


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    """Counts the gradients that are copied to each device."""
    plainly = copying.copied

    def copied(tensor, source, target):
        copy = plainly(tensor, source, target)
        if current_graph_task() != -1:
            SLOW.copied[target.device] += 1
        return copy

    monkeypatch.setattr(copying, "copied", copied)
    yield
    SLOW.stage = None


def devices(*numbers):
    if torch.cuda.device_count() <= max(numbers):
        pytest.skip(f"needs {max(numbers) + 1} devices")
    return [torch.device("cuda", number) for number in numbers]


def planned(places, *, skips=False):
    """Yield the step of a pipe under plans, and those of its devices: for their plain peaks, then for their floors."""
    torch.manual_seed(0)
    layers = [layer for stage in range(len(places)) for layer in (Layer(), Layer(stage), Layer())]
    if skips:
        layers[1], layers[-2] = Stash(0), Pop(len(places) - 1)
    pipe = Pipe(nn.Sequential(*layers), [3] * len(places), devices=places, chunks=MICROBATCHES, checkpoint="never")
    x = torch.rand(MICROBATCHES, SIZE, device=places[0])

    def step():
        return pipe(x).square().mean()

    planner = StagePlanner(pipe, lambda _: step(), cost="flops")
    step().backward()  # from now on gradients are there
    plain = planner.plan("100%")
    for plans in (plain, planner.plan([one.floor_bytes for one in plain.devices])):
        plans.apply(pipe)
        yield step, plans.devices
        plans.remove(pipe)


def differences(step, plans):
    """By how much the predicted bytes of each device are above the measured ones, without those there before a step."""
    places = [torch.device(one.name) for one in plans]
    before = [torch.cuda.memory_allocated(place) for place in places]
    for place in places:
        torch.cuda.reset_peak_memory_stats(place)
    step().backward()
    measured = [torch.cuda.max_memory_allocated(place) - one for place, one in zip(places, before, strict=True)]
    return [
        plan.peak_bytes - plan.before_bytes - plan.boundary_bytes - peak_bytes
        for plan, peak_bytes in zip(plans, measured, strict=True)
    ]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_gradient_waits_for_a_slow_device(count):
    # Without the edges of the pipe those of all microbatches came, and none was counted.
    places = devices(*range(count))
    may_come = [2, 3, 4, 5, 5]

    for step, plans in planned(places):
        for stage in range(count - 1):
            SLOW.begin(stage, places[stage], may_come)
            above_bytes = differences(step, plans)

            assert SLOW.came == may_come
            assert 0 <= above_bytes[stage] <= SLACK_BYTES
            assert min(above_bytes) >= 0


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_of_a_skip_wait_for_each_stage_between(count):
    places = devices(*range(count))
    may_come = [min(1 + ran, MICROBATCHES) + min(count - 1 + ran, MICROBATCHES) for ran in range(1, MICROBATCHES + 1)]

    for step, plans in planned(places, skips=True):
        for stage in range(count - 1):
            # The device of stage 1 has to be at work, or the skips of stage 0 do not come.
            SLOW.begin(stage, places[stage], may_come if count == 2 else ())
            above_bytes = differences(step, plans)

            assert min(above_bytes) >= 0
            if stage == 0:
                assert all(came <= most for came, most in zip(SLOW.came, may_come, strict=True))
                assert above_bytes[0] <= SLACK_BYTES + (count - 2) * BYTES


@pytest.mark.parametrize("numbers", [(0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0)], ids=str)
def test_devices_with_several_stages(numbers):
    places = devices(*numbers)

    for step, plans in planned(places):
        for stage in range(len(places) - 1):
            SLOW.begin(stage, places[stage])

            assert min(differences(step, plans)) >= 0
