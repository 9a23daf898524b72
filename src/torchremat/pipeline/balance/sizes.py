"""The bytes of each layer: the saved tensors of its forward, and its parameters."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from torchremat.measuring.keeping import report_of
from torchremat.measuring.runs import Subject
from torchremat.measuring.saving import WatchedForward, watched
from torchremat.measuring.storages import StorageNumbers
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.balance.layers import Boundary, LayerCopy, mapped, run_each
from torchremat.tensors.structure import tensors_in

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
    counter = _StorageCounter()

    def sized(cell: LayerCopy) -> tuple[int, Boundary]:
        saved_bytes, after = _run(cell, counter)
        return saved_bytes + round(param_scale * _parameter_bytes(cell.layer)), after

    with untouched(None), torch.inference_mode(False), torch.enable_grad():
        return list(run_each(module, microbatch, device, sized))


def first_microbatch(batch: object, chunks: int) -> object:
    """Return the first of `chunks` microbatches, which is the largest; tensors without dimensions stay whole."""

    def cut(tensor: Tensor) -> Tensor:
        # A copy, since a view would keep the bytes of the batch.
        return tensor.detach()[: -(-len(tensor) // chunks)].clone().requires_grad_(tensor.requires_grad)

    return batch if chunks == 1 else mapped(lambda tensor: cut(tensor) if tensor.dim() else tensor, batch)


class _StorageCounter:
    """Knows which storages have been counted."""

    def __init__(self) -> None:
        self.numbers = StorageNumbers()
        self.counted: set[int] = set()

    def add(self, tensor: Tensor) -> int:
        """Count a tensor's storages; return the bytes of storages that were not counted before."""
        new = set(self.numbers.of(tensor)) - self.counted
        self.counted |= new
        return sum(self.numbers.sizes[number] for number in new)


def _run(cell: LayerCopy, counter: _StorageCounter) -> tuple[int, Boundary]:
    """Run a layer's forward; return the bytes that autograd keeps of it, and the values that pass on."""
    entered = cell.entered(copied=False)
    subject = Subject(
        step=lambda: cell.run(entered),
        model=None,
        models=(cell.layer,),
        inputs=tuple(tensors_in(entered)),
        optimizer=None,
    )
    with watched(subject, operators=False) as run:
        ran = cast("Boundary", run.take_result())
        return _kept_bytes(run, tensors_in(ran), counter), cell.after(ran)


def _kept_bytes(run: WatchedForward, outputs: list[Tensor], counter: _StorageCounter) -> int:
    report = report_of(run, {}, [tensor for tensor in outputs if tensor.requires_grad])
    inputs = [run.before[number].tensor for number, one in report.storages.items() if one.kind == "input"]
    saved_bytes = report.saved_bytes + sum(counter.add(tensor) for tensor in inputs)
    for tensor in outputs:
        if not report.storages.keys().isdisjoint(run.numbers.of(tensor)):
            counter.add(tensor)
    return saved_bytes


def _parameter_bytes(layer: nn.Module) -> int:
    counter = _StorageCounter()
    return sum(counter.add(parameter) for parameter in layer.parameters())
