"""Pipes whose stages are on devices of their own: skips that jump over one, recomputes that do not wait, plans."""

import copy

import pytest
import torch
from torch import nn

import unet
from torchremat import Host, Pipe, offload
from torchremat.pipeline import plan_stages

pytestmark = pytest.mark.gpu

# Stage 0 stashes both skips of the U-Net; the first of them jumps over all others.
BALANCES = {2: [11, 8], 3: [7, 4, 8], 4: [7, 2, 2, 8]}


def devices(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return [torch.device("cuda", index) for index in range(count)]


def layers():
    torch.manual_seed(0)
    noisy = [nn.Dropout(0.1) if isinstance(one, nn.ReLU) else one for one in unet.UNet(2, 2, 4).layers()]
    return nn.Sequential(*noisy)


def loss_of(output):
    return output.square().mean()


def steps(pipe, batches):
    """The losses and gradients of some steps."""
    found = []
    for x in batches:
        pipe.zero_grad()
        output = pipe(x)
        loss = loss_of(output)
        loss.backward()
        found.append((loss.item(), [one.grad.cpu() for one in pipe.parameters()]))
    return found


def equal(one, other):
    return all(
        loss == wanted and all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        for (loss, gradients), (wanted, expected) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("count", BALANCES)
def test_gradients_are_those_of_one_device(count, checkpoint):
    places = devices(count)
    plain = Pipe(layers().cuda(), BALANCES[count], devices=[places[0]] * count, chunks=4, checkpoint="never")
    pipe = Pipe(copy.deepcopy(layers()), BALANCES[count], devices=places, chunks=4, checkpoint=checkpoint)
    batches = [torch.rand(8, 3, 16, 16, device=places[0]) for _ in range(3)]
    for stage in (*plain.partitions, *pipe.partitions):
        for one in stage.modules():
            if isinstance(one, nn.Dropout):
                one.eval()  # each device has a generator of its own, so masks are not those of one device

    assert {one.device for one in pipe.parameters()} <= set(places)
    assert equal(steps(pipe, batches), steps(plain, batches))


@pytest.mark.parametrize("count", BALANCES)
def test_recomputes_draw_what_the_forward_drew_on_each_device(count):
    places = devices(count)
    never, always = (
        Pipe(layers(), BALANCES[count], devices=places, chunks=4, checkpoint=mode) for mode in ("never", "always")
    )
    batches = [torch.rand(8, 3, 16, 16, device=places[0]) for _ in range(2)]

    torch.manual_seed(1)
    expected = steps(never, batches)
    torch.manual_seed(1)
    assert equal(steps(always, batches), expected)


@pytest.mark.parametrize("count", BALANCES)
def test_what_is_offloaded_comes_back_to_the_device_of_its_stage(count):
    places = devices(count)
    pipe = Pipe(layers(), BALANCES[count], devices=places, chunks=2, checkpoint="except_last")
    batches = [torch.rand(8, 3, 16, 16, device=places[0]) for _ in range(2)]
    torch.manual_seed(1)
    expected = steps(pipe, batches)

    found, store = [], Host()
    torch.manual_seed(1)
    for x in batches:
        pipe.zero_grad()
        with offload(store):
            loss = loss_of(pipe(x))
        loss.backward()
        found.append((loss.item(), [one.grad.cpu() for one in pipe.parameters()]))

    assert equal(found, expected)
    assert store.statistics.copied_in_bytes > 0


def planned(places, balance):
    """Plans half way between the smallest budget of each device and its plain peak, and what a step takes there."""
    x = torch.rand(16, 3, 32, 32, device=places[0])

    def step(pipe):
        return loss_of(pipe(x))

    plain = Pipe(layers(), balance, devices=places, chunks=4, checkpoint="never")
    torch.manual_seed(1)
    expected = steps(plain, [x, x])
    ends = plan_stages(plain, step, budget="100%").devices  # workspaces are most of both
    budgets = [(one.floor_bytes + one.plain_peak_bytes) // 2 for one in ends]
    plans = plan_stages(plain, step, budget=budgets, cost="flops")
    pipe = Pipe(layers(), balance, devices=places, chunks=4, checkpoint=plans)

    torch.manual_seed(1)
    assert equal(steps(pipe, [x, x]), expected)
    del plain, expected
    for place in places:
        torch.cuda.reset_peak_memory_stats(place)
    step(pipe).backward()
    return plans.devices, [torch.cuda.max_memory_allocated(place) for place in dict.fromkeys(places)]


def test_plans_of_stages_keep_each_device_within_its_budget():
    plans, measured = planned(devices(3), BALANCES[3])

    for plan, peak_bytes in zip(plans, measured, strict=True):
        assert plan.peak_bytes < plan.plain_peak_bytes
        assert 2**25 < peak_bytes <= plan.budget_bytes


def test_what_a_device_keeps_counts_once_for_all_its_stages():
    (plan,), (peak_bytes,) = planned([torch.device("cuda", 0)] * 2, BALANCES[2])

    assert peak_bytes <= plan.peak_bytes < peak_bytes + 2**25  # a workspace has 32 MiB


def test_what_is_there_before_a_step_counts_once():
    # The profile of a stage found the batch and the other stage of its device, too, and took them for memory that the
    # device keeps: 56 MiB on the first one, of a batch of 16 MiB and two weights with their gradients.
    first, other = devices(2)
    layers = [nn.Linear(2**16, 64, bias=False), nn.Linear(64, 2**16, bias=False), nn.Linear(2**16, 64, bias=False)]
    pipe = Pipe(nn.Sequential(*layers), [1, 1, 1], devices=[first, first, other], chunks=2, checkpoint="never")
    x = torch.rand(64, 2**16, device=first)

    def step(pipe):
        return pipe(x).square().mean()

    step(pipe).backward()  # gradients and workspaces are there
    plans = plan_stages(pipe, step, budget="100%", cost="flops")

    for plan, place in zip(plans.devices, (first, other), strict=True):
        found = torch.cuda.memory_allocated(place)
        assert found <= plan.before_bytes + plan.boundary_bytes < found + 2**22  # slack of the allocator
