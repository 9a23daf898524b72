"""What the planner sees of a batch: its sizes, and the facts that decide which figures hold for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchremat.errors import StepError
from torchremat.measuring.step import holdings_of
from torchremat.planning.shapes.fits import Shape
from torchremat.state.reach import tensors_inside
from torchremat.tensors.structure import Leaf, leaves_of, split

B = TypeVar("B")

ShapeOf = Callable[[object], tuple[int, ...]]


# NOTE [ What of a batch is a size ]
# The bytes of a step follow from the sizes in its batch, and not only tensors have a size:
#
#   tensors, NumPy arrays     their dimensions
#   ints                      themselves: a length that the step cuts to
#   strings, bytes            their length, which gives the number of tokens only approximately
#   other objects             the dimensions of tensors that they hold, and their `len`
#   lists of such             their number, the largest of each dimension, and the sum
#   None, bools, types        none; batches that differ in one are of two kinds
#   floats, all else          none
# If a batch holds something in which a size can hide (strings, objects, floats), each step is measured.


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """A batch as the planner sees it.

    Attributes:
        kind: The properties that comparable batches share: places, types and numbers of dimensions of their items,
            which modules train, which parameters get gradients, autocast.
        shape: All sizes, in an order that the kind fixes. See NOTE [ What of a batch is a size ]
        tensors: The tensors.
        words: The sizes, for people.
        hides: Whether the batch may have invisible sizes.
        has_gradients: Whether its step begins with gradients of the model.
    """

    kind: tuple[object, ...]
    shape: Shape
    tensors: tuple[Tensor, ...]
    words: str
    hides: bool = False
    has_gradients: bool = False


def step_of(
    step: Callable[[nn.Module, B], object], batch: object = None, tensors: tuple[Tensor, ...] = ()
) -> Callable[[nn.Module], object]:
    """Return the step of one batch, which visibly holds the same objects as `step`, and the tensors of the batch."""
    held = holdings_of(step)

    def bound(model: nn.Module, _held: object = (held.modules, held.tensors, tensors)) -> object:
        return step(model, cast("B", batch))

    return bound


def look_of(model: nn.Module, batch: object, shape_of: ShapeOf | None, device: torch.device) -> Look:
    """Return the look of a batch.

    Raises:
        StepError: The batch has no sizes, or `shape_of` returns none.
    """
    opened = dict(cast("Mapping[object, object]", batch)) if isinstance(batch, Mapping) else batch
    tensors: list[Tensor] = []
    # By place, so that the order of the keys of a dict does not matter.
    placed = sorted(leaves_of(split(opened, tensors, [])), key=lambda one: one[0])
    state = _state_of(model, device)
    if shape_of is not None:
        shape = _given(shape_of(batch))
        words = ", ".join(map(str, shape))
        return Look(kind=(("given", len(shape)), *state), shape=shape, tensors=tuple(tensors), words=words)
    parts = [_part_of(place, tensors[leaf.index]) for place, leaf in placed if isinstance(leaf, Leaf)]
    others: dict[str, list[object]] = {}
    for place, leaf in placed:
        if not isinstance(leaf, Leaf):
            others.setdefault(_NUMBER.sub("[]", place), []).append(leaf)
    for place, leaves in others.items():
        parts += _parts_of(place, leaves)
    if all(part.hides or not (part.sizes or part.tensors) for part in parts):
        raise StepError(
            f"the batch, a {type(batch).__name__}, has no tensors in plain sight, nor arrays or numbers, so its shape "
            "is not known. Give `Adaptive` a `shape=`: a function that returns the sizes of a batch, like "
            "`lambda batch: (len(batch), longest(batch))`."
        )
    return Look(
        kind=(tuple(part.kind for part in parts), *state),
        shape=tuple(size for part in parts for size in part.sizes),
        tensors=tuple(one for part in parts for one in part.tensors),
        words=", ".join(part.words for part in parts if part.sizes or part.tensors),
        hides=any(part.hides for part in parts),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """The leaf at one place of a batch, or the leaves at all places of a list."""

    kind: tuple[object, ...]
    place: str
    sizes: Shape
    tensors: tuple[Tensor, ...] = ()
    hides: bool = False

    @property
    def words(self) -> str:
        return f"{self.place or 'batch'} {' x '.join(map(str, self.sizes)) or 'scalar'}"


# The number of an item of a list.
_NUMBER = re.compile(r"\[\d+\]")
# Types without a size, of which different values may make different steps.
_SWITCHES = (type(None), bool, torch.dtype, torch.device, type)


def _part_of(place: str, tensor: Tensor) -> _Part:
    kind = (place, tensor.dtype, tensor.device, tensor.dim(), tensor.requires_grad, tensor.layout)
    return _Part(kind=kind, place=place, sizes=tuple(tensor.shape), tensors=(tensor,))


def _parts_of(place: str, leaves: list[object]) -> Iterator[_Part]:
    """Yield the parts for leaves that are no tensors, at the places of one list, or at one place."""
    if len(leaves) == 1 and isinstance(leaves[0], _SWITCHES):
        yield _Part(kind=(place, leaves[0]), place=place, sizes=())
        return
    kinds = {type(one).__qualname__ for one in leaves}
    for kind in sorted(kinds):
        own = [one for one in leaves if type(one).__qualname__ == kind]
        dimensions = [found for one in own if (found := _dimensions(one)) is not None]
        ranks = {len(one) for one in dimensions}
        sizes: Shape = ()
        if len(ranks) == 1:
            most = tuple(max(sizes) for sizes in zip(*dimensions, strict=True))
            # A single leaf needs no sum, and each size that varies takes more profiles.
            sizes = most if len(leaves) == 1 else (len(own), *most, sum(math.prod(one) for one in dimensions))
        hides = len(ranks) != 1 or not all(_is_whole(one) for one in own)
        yield _Part(kind=(place, kind, len(leaves) == 1, len(sizes)), place=place, sizes=sizes, hides=hides)
        if not _is_whole(own[0]):
            for number, tensor in enumerate(tensors_inside(own)):
                yield _part_of(f"{place}.tensor{number}", tensor)


def _dimensions(leaf: object) -> Shape | None:
    """Return the sizes of an object that is no tensor; None if it has none."""
    if isinstance(leaf, int):
        return (max(0, leaf),)
    shape = getattr(leaf, "shape", None)
    if isinstance(shape, tuple) and all(isinstance(size, int) for size in cast("tuple[object, ...]", shape)):
        return cast("Shape", shape)
    return (len(leaf),) if isinstance(leaf, Sized) else None


def _is_whole(leaf: object) -> bool:
    """Return whether the sizes of a leaf are all that the bytes of a step can depend on."""
    return isinstance(leaf, (int, np.ndarray, np.generic))


def _given(shape: object) -> Shape:
    sizes = cast("tuple[object, ...]", shape) if isinstance(shape, tuple) else (shape,)
    if not sizes or any(type(size) is not int or size < 0 for size in sizes):
        raise StepError(f"`shape` returned {shape!r}: expected a tuple of sizes, ints of at least 0.")
    return cast("Shape", sizes)


def _state_of(model: nn.Module, device: torch.device) -> tuple[object, ...]:
    kind = device.type
    cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    parameters = tuple((parameter.requires_grad, parameter.dtype, parameter.shape) for parameter in model.parameters())
    return tuple(module.training for module in model.modules()), parameters, cast_to
