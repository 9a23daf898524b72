"""The seconds of each layer's forward and backward."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.balance.layers import Boundary, LayerCopy, run_each
from torchremat.pipeline.skip.layouts import SkipLayout
from torchremat.tensors.structure import tensors_in

_IDLE_RUNS = 25


def layer_seconds(module: nn.Sequential, sample: object, *, timeout: float, device: torch.device) -> list[float]:
    """Return the seconds of a forward and a backward of each layer: the median of the runs that time allows.

    The first run of a layer is not timed, since it loads and tunes kernels; at least one other is. The overhead of
    starting a backward does not count.

    Args:
        module: The layers; copies of them run.
        sample: The input of the first layer.
        timeout: Seconds for all runs together. Time that fast layers leave goes to the layers after them.
        device: Where the copies run.
    """
    # Only the generators are restored: a copy has its own parameters and buffers.
    with untouched(None), heap_set_aside(), torch.inference_mode(False), torch.enable_grad():
        accelerator_of(device).warm(device)
        idle_s = _idle_seconds(device)
        until = time.perf_counter() + timeout

        def timed(cell: LayerCopy) -> tuple[float, Boundary]:
            share = max(0.0, until - time.perf_counter()) / (len(module) - cell.place)
            return _timed(cell, device, share, idle_s)

        return list(run_each(module, sample, device, timed))


def _idle_seconds(device: torch.device) -> float:
    """Return the seconds of an empty backward: here one starts for each layer, and for a model only one."""
    value = torch.ones(1, device=device, requires_grad=True)
    cell = LayerCopy(layer=nn.Identity(), place=0, layout=SkipLayout(1, {}), before=Boundary(value=value, skips={}))
    return median(_run(cell, device)[0] for _ in range(_IDLE_RUNS))


def _timed(cell: LayerCopy, device: torch.device, timeout: float, idle_s: float) -> tuple[float, Boundary]:
    """Run a layer until the time is up; return the median of its seconds, and the values that pass on."""
    stop = time.perf_counter() + timeout
    _, after = _run(cell, device, idle_s)
    runs = [_run(cell, device, idle_s)[0]]
    while time.perf_counter() < stop:
        runs.append(_run(cell, device, idle_s)[0])
    return median(runs), after


def _run(cell: LayerCopy, device: torch.device, idle_s: float = 0.0) -> tuple[float, Boundary]:
    """Run a layer forward and backward; return its seconds, and the values that pass on."""
    entered = cell.entered(copied=True)
    start = _now(device)
    ran = cell.run(entered)
    seconds = _now(device) - start
    # Skips that it stashes have a gradient as well.
    roots = [tensor for tensor in tensors_in(ran) if tensor.requires_grad]
    grads = [torch.ones_like(root) for root in roots]
    start = _now(device)
    if roots:
        torch.autograd.backward(roots, grads)
        seconds += max(0.0, _now(device) - start - idle_s)
    return seconds, cell.after(ran)


def _now(device: torch.device) -> float:
    return accelerator_of(device).seconds(device)
