"""Parameters of a device in stores: exact bytes, and values that streams hand on in order."""

import pytest
import torch
from torch import nn, optim

import torchremat
from optimizing.loops import equal, nothing, trained_on_streams
from torchremat import Disk, Host, offload_optimizer, offload_parameters, release_gradients

pytestmark = pytest.mark.gpu

LAYERS, WIDTH = 6, 128
LAYER = WIDTH * WIDTH * 4
BLOCK = 512  # of the allocator, for the NaN that all share


def parameters(model, optimizer):
    offload_parameters(model, optimizer, Host(), min_bytes=8)


def on_disk(model, optimizer):
    offload_parameters(model, optimizer, Disk(), min_bytes=8)


def all_three(model, optimizer):
    release_gradients(model, optimizer)
    offload_optimizer(optimizer, Host(), min_bytes=8)
    parameters(model, optimizer)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()


@pytest.mark.parametrize("on_two_streams", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("prepare", [parameters, on_disk, all_three], ids=lambda one: one.__name__)
def test_a_run_is_bit_for_bit_the_plain_one(prepare, on_two_streams):
    own = trained_on_streams(net(), prepare, on_two_streams=on_two_streams)

    assert equal(own, trained_on_streams(net(), nothing, on_two_streams=on_two_streams))


def test_what_waits_takes_no_memory_of_the_device():
    model = net()
    with_parameters = torch.cuda.memory_allocated()

    with offload_parameters(model, None, Host()):
        torch.cuda.synchronize()
        assert with_parameters - torch.cuda.memory_allocated() in (LAYERS * LAYER, LAYERS * LAYER - BLOCK)

    assert torch.cuda.memory_allocated() - with_parameters in (0, BLOCK)  # others may have made the NaN


def test_three_parameters_are_in_memory_at_most():
    def step(model):
        return model(torch.ones(4, WIDTH, device="cuda")).square().mean()

    model = net()
    plain = torchremat.measure(model, step, accumulates=True).peak_bytes
    offload_parameters(model, None, Host())
    step(model).backward()  # learns what to bring ahead
    model.zero_grad()

    ours = torchremat.measure(model, step, accumulates=True)

    # The one that runs, the one before it, which leaves, and the one after it. The backward begins with the one that
    # the forward has ended with, so they are three again when the first of its saved tensors has gone.
    saved_bytes = 4 * WIDTH * 4
    assert ours.parameter_bytes == 0
    assert plain - ours.peak_bytes == (LAYERS - 3) * LAYER + saved_bytes


@pytest.mark.parametrize("is_stored", [False, True], ids=["by the plan", "already"])
def test_a_plan_counts_them_on_a_device(is_stored):
    def step(model):
        return model(torch.ones(2, WIDTH, device="cuda")).square().mean()

    (model, plain), store = (net(), net()), Host()
    optimizer, theirs = optim.AdamW(model.parameters()), optim.AdamW(plain.parameters())
    options = {"optimizer": optimizer, "cost": "flops", "release_gradients": True, "optimizer_store": store}
    if is_stored:
        offload_parameters(model, optimizer, store)
    else:
        options["parameter_store"] = store

    plan = torchremat.plan(model, step, budget="min", **options)

    assert (plan.away_bytes, plan.room_bytes) == (LAYERS * LAYER, 4 * LAYER)
    assert plan.before_bytes["parameters"] == 0
    plan.apply(model)
    for own, steps_on in ((model, optimizer), (plain, theirs)):
        for _ in range(3):
            steps_on.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            step(own).backward()
            steps_on.step()
        if own is model:
            peak_bytes = torch.cuda.max_memory_allocated() - sum(one.nbytes for one in plain.parameters())
    assert peak_bytes <= plan.peak_bytes
    assert equal([*model.parameters()], [*plain.parameters()])
