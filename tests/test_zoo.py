"""Every model that the other tests plan for trains by itself, twice the same, and without a warning."""

from functools import partial

import pytest
import torch

import models
import zoo

SMALL = {"blocks": 1, "width": 64}
FACTORIES = {
    "gpt": partial(models.gpt_step, **SMALL, context=64),
    "unet": partial(models.unet_step, batch=1, size=16, width=8),
    "resnet": partial(models.resnet_step, batch=2, size=16, width=8),
    "gpt dropout": partial(models.gpt_step, **SMALL, context=64, dropout=0.1),
    "gpt2 cache": partial(zoo.gpt2, **SMALL, use_cache=True),
    **{name: partial(make, **SMALL) for name, make in zoo.ZOO.items()},
    **{f"{name} dropout": partial(make, **SMALL, dropout=0.1) for name, make in zoo.ZOO.items()},
}


@pytest.mark.parametrize("name", FACTORIES)
def test_plain_step_is_repeatable(name):
    losses, gradients = [], []

    for _ in range(2):
        model, step = FACTORIES[name]()
        torch.manual_seed(1)
        loss = step(model)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in model.parameters()])

    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_unet_and_resnet_have_the_blocks_that_they_claim():
    unet, resnet = models.UNet(), models.ResNet()

    assert sum(isinstance(module, models.ResidualBlock) for module in unet.modules()) == 10
    assert sum(isinstance(module, models.BasicBlock) for module in resnet.modules()) == 9


def test_gpt2_keeps_a_cache_unless_told_otherwise():
    model, _ = zoo.gpt2()

    assert model.config.use_cache
