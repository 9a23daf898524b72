"""The costs of each layer: its saved tensors and parameters in bytes, its forward and backward in seconds."""

from __future__ import annotations

import time
from statistics import median
from typing import cast

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.keeping import report_of
from torchremat.measuring.runs import Subject
from torchremat.measuring.saving import SaveLog, watched
from torchremat.measuring.storages import StorageNumbers
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.balance.layers import Boundary, LayerCopy, mapped, run_each
from torchremat.pipeline.skip.layouts import SkipLayout
from torchremat.tensors.structure import tensors_in

_IDLE_RUNS = 25

# NOTE [ Whose a saved storage is ]
#
# A storage belongs to the first layer that saves it: the output of a ReLU, which the ReLU and the linear layer behind
# it save, counts for the ReLU. An input that only the linear layer saves counts for the linear layer. So the bytes of
# neighbours add up to the bytes of their stage; if a stage begins with a layer whose input counts for the layer before,
# the stage holds that much more.


def layer_bytes(module: nn.Sequential, microbatch: object, *, param_scale: float, device: torch.device) -> list[int]:
    """Return the bytes of each layer: the saved tensors of its forward, and its parameters times a factor.

    See NOTE [ Whose a saved storage is ]. Tensors in stores, and recomputed tensors, take no bytes.

    Args:
        module: The layers; copies of them run, once each.
        microbatch: The input of the first layer.
        param_scale: The factor.
        device: Where the copies run.
    """
    numbers = StorageNumbers()

    def sized(cell: LayerCopy) -> tuple[int, Boundary]:
        saved_bytes, after = _sized_run(cell, numbers)
        return saved_bytes + round(param_scale * StorageNumbers().new_bytes(list(cell.layer.parameters()))), after

    with untouched(None), torch.inference_mode(False), torch.enable_grad():
        return list(run_each(module, microbatch, device, sized))


def first_microbatch(batch: object, chunks: int) -> object:
    """Return the first of `chunks` microbatches, which is the largest; tensors without dimensions stay whole."""

    def cut(tensor: Tensor) -> Tensor:
        # A copy, since a view would keep the bytes of the batch.
        return tensor.detach()[: -(-len(tensor) // chunks)].clone().requires_grad_(tensor.requires_grad)

    return batch if chunks == 1 else mapped(lambda tensor: cut(tensor) if tensor.dim() else tensor, batch)


def _sized_run(cell: LayerCopy, counted: StorageNumbers) -> tuple[int, Boundary]:
    """Run a layer's forward; return the bytes that autograd keeps of it, and the values that pass on."""
    entered = cell.entered(copied=False)
    subject = Subject(
        step=lambda: cell.run(entered),
        model=None,
        models=(cell.layer,),
        inputs=tuple(tensors_in(entered)),
        optimizer=None,
    )
    with watched(subject, operators=False) as log:
        ran = cast("Boundary", log.take_result())
        return _kept_bytes(log, tensors_in(ran), counted), cell.after(ran)


def _kept_bytes(log: SaveLog, outputs: list[Tensor], counted: StorageNumbers) -> int:
    report = report_of(log, {}, [tensor for tensor in outputs if tensor.requires_grad])
    inputs = [log.before[number].tensor for number, one in report.storages.items() if one.kind == "input"]
    saved_bytes = report.saved_bytes + counted.new_bytes(inputs)
    counted.of([tensor for tensor in outputs if not report.storages.keys().isdisjoint(log.numbers.of(tensor))])
    return saved_bytes


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
    return median(_timed_run(cell, device)[0] for _ in range(_IDLE_RUNS))


def _timed(cell: LayerCopy, device: torch.device, timeout: float, idle_s: float) -> tuple[float, Boundary]:
    """Run a layer until the time is up; return the median of its seconds, and the values that pass on."""
    stop = time.perf_counter() + timeout
    _, after = _timed_run(cell, device, idle_s)
    runs = [_timed_run(cell, device, idle_s)[0]]
    while time.perf_counter() < stop:
        runs.append(_timed_run(cell, device, idle_s)[0])
    return median(runs), after


def _timed_run(cell: LayerCopy, device: torch.device, idle_s: float = 0.0) -> tuple[float, Boundary]:
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
