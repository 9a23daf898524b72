"""How a batch looks: what of it and of the model decides which figures hold, and the sizes that these depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from torchremat.errors import StepError
from torchremat.planning.shapes.fits import Shape
from torchremat.tensors.structure import place_of, split

ShapeOf = Callable[[object], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """A batch as planning sees it.

    Attributes:
        kind: What batches that can be compared have in common: places, types and numbers of dimensions of the tensors,
            which modules train, which parameters get gradients, autocast.
        shape: All sizes, in an order that the kind fixes.
        tensors: The tensors.
        words: The sizes, for people.
    """

    kind: tuple[object, ...]
    shape: Shape
    tensors: tuple[Tensor, ...]
    words: str


def look_of(model: nn.Module, batch: object, shape_of: ShapeOf | None, device: torch.device) -> Look:
    """Return how a batch looks.

    Raises:
        StepError: It has no tensors, or `shape_of` returns no sizes.
    """
    opened = dict(cast("Mapping[object, object]", batch)) if isinstance(batch, Mapping) else batch
    found: list[Tensor] = []
    template = split(opened, found, [])
    # By place, so that the order of the keys of a dict is no matter.
    placed = sorted((place_of(template, index) or "", index) for index in range(len(found)))
    tensors = tuple(found[index] for _, index in placed)
    if shape_of is not None:
        shape = _given(shape_of(batch))
        words = ", ".join(map(str, shape))
        kind: tuple[object, ...] = ("given", len(shape))
    elif tensors:
        shape = tuple(size for tensor in tensors for size in tensor.shape)
        words = ", ".join(
            f"{place or 'batch'} {' x '.join(map(str, tensor.shape)) or 'scalar'}"
            for (place, _), tensor in zip(placed, tensors, strict=True)
        )
        kind = tuple(
            (place, tensor.dtype, tensor.device, tensor.dim(), tensor.requires_grad, tensor.layout)
            for (place, _), tensor in zip(placed, tensors, strict=True)
        )
    else:
        raise StepError(
            f"the batch, a {type(batch).__name__}, has no tensors in plain sight, so its shape is not known. Give "
            "`Adaptive` a `shape=`: a function that returns the sizes of a batch, like "
            "`lambda batch: (len(batch), longest(batch))`."
        )
    return Look(kind=(kind, *_state_of(model, device)), shape=shape, tensors=tensors, words=words)


def _given(shape: object) -> Shape:
    sizes = cast("tuple[object, ...]", shape) if isinstance(shape, tuple) else (shape,)
    if not sizes or any(type(size) is not int or size < 0 for size in sizes):
        raise StepError(f"`shape` returned {shape!r}: a tuple of sizes is needed, ints of at least 0.")
    return cast("Shape", sizes)


def _state_of(model: nn.Module, device: torch.device) -> tuple[object, ...]:
    kind = device.type
    cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    parameters = tuple((parameter.requires_grad, parameter.dtype, parameter.shape) for parameter in model.parameters())
    return tuple(module.training for module in model.modules()), parameters, cast_to
