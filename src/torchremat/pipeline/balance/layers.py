"""The layers of a model, run one by one on copies: one layer's parameters and graph are in memory at a time.

A layer gets what the one before it has returned, cut off from that one's graph. So a model is profiled on a device
which it does not fit on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchremat.tensors.structure import join, split


class _Context(Protocol):
    pass


class Enter(torch.autograd.Function):
    """Gives a layer its input: a tensor that is no leaf, since a layer may write to it in place, without a graph."""

    @staticmethod
    def forward(ctx: _Context, phony: Tensor, holder: list[Tensor]) -> Tensor:
        """Return the tensor in `holder`, which autograd does not see; `phony` makes it require grad."""
        return holder[0].detach()

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[None, None]:
        """Drop the gradient; to compute it was the layer's part."""
        return None, None


_enter = cast("Callable[[Tensor, list[Tensor]], Tensor]", Enter.apply)


def layers_of(module: nn.Sequential) -> dict[str, nn.Module]:
    """Return the layers by name, in order; one may be there several times."""
    return dict(module._modules)


def copy_of(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a layer on a device, in training mode."""
    return copy.deepcopy(layer).to(device).train()


def entering(value: object, *, copied: bool) -> object:
    """Return a value as the input of a layer; its tensors require grad where they do in `value`.

    Args:
        value: Any nesting of tensors and other things.
        copied: Whether tensors have memory of their own, so that the layer may be run again with `value`.
    """
    phony = torch.zeros(0, requires_grad=True)

    def entered(tensor: Tensor) -> Tensor:
        data = tensor.detach()
        data = data.clone() if copied else data
        return _enter(phony, [data]) if tensor.requires_grad else data

    return mapped(entered, value)


def cut_off(value: object) -> object:
    """Return a value without its graph; its tensors require grad where they did."""
    return mapped(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def copied_to(device: torch.device, value: object) -> object:
    """Return a copy of a value on a device, without its graph; its tensors require grad where they did."""
    return mapped(lambda tensor: tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad), value)


def mapped(function: Callable[[Tensor], Tensor], value: object) -> object:
    """Return a value with other tensors in the places of its own."""
    tensors: list[Tensor] = []
    template = split(value, tensors, [])
    return join(template, [function(tensor) for tensor in tensors])
