"""The bytes of each layer: the saved tensors of its forward, and its parameters."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from torchremat.measuring.keeping import report_of
from torchremat.measuring.runs import Subject
from torchremat.measuring.saving import SaveLog, watched
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
    numbers = StorageNumbers()

    def sized(cell: LayerCopy) -> tuple[int, Boundary]:
        saved_bytes, after = _run(cell, numbers)
        return saved_bytes + round(param_scale * StorageNumbers().new_bytes(list(cell.layer.parameters()))), after

    with untouched(None), torch.inference_mode(False), torch.enable_grad():
        return list(run_each(module, microbatch, device, sized))


def first_microbatch(batch: object, chunks: int) -> object:
    """Return the first of `chunks` microbatches, which is the largest; tensors without dimensions stay whole."""

    def cut(tensor: Tensor) -> Tensor:
        # A copy, since a view would keep the bytes of the batch.
        return tensor.detach()[: -(-len(tensor) // chunks)].clone().requires_grad_(tensor.requires_grad)

    return batch if chunks == 1 else mapped(lambda tensor: cut(tensor) if tensor.dim() else tensor, batch)


def _run(cell: LayerCopy, counted: StorageNumbers) -> tuple[int, Boundary]:
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
