"""A chain of layers whose parameters are in a store, and what is asked of it."""

import torch
from torch import nn

from torchremat import offload_parameters

LAYERS, LAYER = 8, 256 * 256 * 4


def stored(model):
    return [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]


def chain(store=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False), nn.GELU()) for _ in range(LAYERS)))
    return model, None if store is None else offload_parameters(model, None, store, **options)


def forward(model):
    return model(torch.ones(4, 256)).square().mean()


def gradients(model):
    model.zero_grad()
    forward(model).backward()
    return [p.grad for p in model.parameters()]


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        forward(model).backward()
        optimizer.step()
    return values(model)
