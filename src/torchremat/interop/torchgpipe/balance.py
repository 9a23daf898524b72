"""`torchgpipe.balance`: how many layers each partition gets, as a list for `GPipe`."""

from __future__ import annotations

import torch
from torch import nn

from torchremat.pipeline import balance as balances

__all__ = ["balance_by_time", "balance_by_size"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: object,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Return how many layers each partition has, such that the slowest is as fast as possible.

    Args:
        partitions: 1 to the number of layers.
        module: The layers.
        sample: The input of the first layer: a microbatch.
        timeout: Seconds for all runs together.
        device: Where the layers run; by default the device of the first parameter.

    Raises:
        ValueError: Too many partitions are given, or a parameter has a gradient.
    """
    _verify(partitions, module)
    return list(balances.balance_by_time(partitions, module, sample, timeout=timeout, device=device).counts)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: object,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Return how many layers each partition has, such that the largest needs as few bytes as possible.

    Args:
        partitions: 1 to the number of layers.
        module: The layers.
        input: A batch.
        chunks: The microbatches that it is cut into.
        param_scale: How often the bytes of parameters count: 2 to 3 for SGD, 4 to 5 for Adam.
        device: Where the layers run, a CPU too; by default the device of the first parameter.

    Raises:
        ValueError: Too many partitions are given, or a parameter has a gradient.
    """
    _verify(partitions, module)
    found = balances.balance_by_size(partitions, module, input, chunks=chunks, param_scale=param_scale, device=device)
    return list(found.counts)


def _verify(partitions: int, module: nn.Sequential) -> None:
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if len(module) < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({len(module)} < {partitions})")
    having = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    if having:
        raise ValueError(f"some parameter already has gradient: {having[0]!r}; call `zero_grad()` first")
