"""Layers for pipes, and what a plain run of them gives."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Noted(nn.Module):
    """A layer that notes each of its runs: `F` in the forward, `R` in a recompute, `B` in the backward."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Note.apply(self.name, self.log, x))

    def __deepcopy__(self, memo: dict[int, object]) -> Noted:
        made = Noted(self.name, self.log)
        made.linear = copy.deepcopy(self.linear, memo)
        return made


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, log, x):
        import torchremat

        log.append(("R" if torchremat.is_recomputing() else "F") + name)
        ctx.name, ctx.log = name, log
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("B" + ctx.name)
        return None, None, grad


def layers(count: int = 4, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


def plainly(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """The module on one microbatch after the other."""
    return torch.cat([module(one) for one in x.chunk(chunks)])


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [one.grad for one in module.parameters()]


def equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def nodes(*outputs: Tensor) -> list[str]:
    """The names of all nodes of a graph."""
    found, pending = {}, [output.grad_fn for output in outputs]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            pending += [following for following, _ in node.next_functions]
    return list(found.values())
