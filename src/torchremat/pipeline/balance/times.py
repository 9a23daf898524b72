"""The seconds of each layer's forward and backward."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.balance.layers import copied_to, copy_of, cut_off, entering, layers_of
from torchremat.tensors.structure import tensors_in


def layer_seconds(module: nn.Sequential, sample: object, *, timeout: float, device: torch.device) -> list[float]:
    """Return the seconds of a forward and a backward of each layer: the median of the runs that there is time for.

    The first run of a layer is not timed, since it loads and tunes kernels; at least one other is.

    Args:
        module: The layers; copies of them run.
        sample: What the first layer gets.
        timeout: Seconds for all runs together. What fast layers leave is given to those after them.
        device: Where the copies run.
    """
    layers = layers_of(module).values()
    seconds: list[float] = []
    # The generators alone: a copy has its own parameters and buffers.
    with untouched(None), heap_set_aside(), torch.inference_mode(False), torch.enable_grad():
        value = copied_to(device, sample)
        until = time.perf_counter() + timeout
        for number, layer in enumerate(layers):
            share = max(0.0, until - time.perf_counter()) / (len(layers) - number)
            median_s, value = _timed(copy_of(layer, device), value, device, share)
            seconds.append(median_s)
    return seconds


def _timed(layer: nn.Module, value: object, device: torch.device, timeout: float) -> tuple[float, object]:
    """Run a layer until the time is up; return the median of its seconds, and what it returned."""
    stop = time.perf_counter() + timeout
    _, output = _run(layer, value, device)
    runs = [_run(layer, value, device)[0]]
    while time.perf_counter() < stop:
        runs.append(_run(layer, value, device)[0])
    return median(runs), output


def _run(layer: nn.Module, value: object, device: torch.device) -> tuple[float, object]:
    """Run a layer forward and backward; return its seconds, and what it returned."""
    entered = entering(value, copied=True)
    start = _now(device)
    output = layer(entered)
    forward_s = _now(device) - start
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    grads = [torch.ones_like(root) for root in roots]
    start = _now(device)
    if roots:
        torch.autograd.backward(roots, grads)
    return forward_s + _now(device) - start, cut_off(output)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
