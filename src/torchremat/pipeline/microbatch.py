"""A batch cut into microbatches, and their results put together.

A batch is any nesting of tuples, lists, dicts and the like. Its tensors are cut along their first dimension; all other
values go to every microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchremat.errors import PipelineError
from torchremat.tensors.structure import join, same_structure, split


@dataclass(slots=True)
class Microbatch:
    """A value on its way through the stages.

    Attributes:
        template: The value, with a `Leaf` in place of each tensor.
        tensors: The tensors, in order.
    """

    template: object
    tensors: list[Tensor]

    @staticmethod
    def of(value: object) -> Microbatch:
        """Return a value split into template and tensors."""
        tensors: list[Tensor] = []
        return Microbatch(split(value, tensors, []), tensors)

    @property
    def value(self) -> object:
        """The value."""
        return join(self.template, self.tensors)

    def take(self) -> object:
        """Return the value, and release it."""
        template, tensors = self.template, self.tensors
        self.template, self.tensors = None, []
        return join(template, tensors)


def scatter(value: object, chunks: int) -> list[Microbatch]:
    """Return a batch as at most `chunks` microbatches of equal size, of which the last may be smaller.

    The result has fewer if the batch has fewer rows, or if the batch does not fill as many of that size.

    Args:
        value: The batch; every tensor in it has the same size in its first dimension.
        chunks: At least 1.

    Raises:
        PipelineError: The batch has no tensor, a tensor has no dimensions or is sparse or nested, or the sizes differ.
    """
    batch = Microbatch.of(value)
    if not batch.tensors:
        raise PipelineError("input: expected at least one tensor to cut into microbatches along dimension 0.")
    jagged = [place for place, tensor in enumerate(batch.tensors) if tensor.layout != torch.strided or tensor.is_nested]
    if jagged:
        raise PipelineError(
            f"input: tensors {jagged} of {len(batch.tensors)} are sparse or nested, and only dense tensors can be "
            "cut into microbatches. Make them dense, or make them in the first layer."
        )
    scalars = [place for place, tensor in enumerate(batch.tensors) if tensor.dim() == 0]
    if scalars:
        raise PipelineError(
            f"input: tensors {scalars} of {len(batch.tensors)} have no dimension, and microbatches are cut along "
            "dimension 0. Pass a number for all microbatches as a Python number, or expand the tensor."
        )
    sizes = [int(tensor.shape[0]) for tensor in batch.tensors]
    if len(set(sizes)) > 1:
        raise PipelineError(
            f"input: the tensors have {sizes} rows in dimension 0, but they are cut into microbatches together, so "
            "all need the same number."
        )
    cut = [torch.chunk(tensor, chunks) for tensor in batch.tensors]
    return [Microbatch(batch.template, list(tensors)) for tensors in zip(*cut, strict=True)]


def gather(microbatches: Sequence[Microbatch]) -> object:
    """Return the results of all microbatches as the batch's result: tensors concatenated along their first dimension.

    Raises:
        PipelineError: A tensor has no dimensions, or its other dimensions, a non-tensor value, or the structure,
            differs between microbatches.
    """
    first = microbatches[0]
    for number, other in enumerate(microbatches):
        if not _agree(first, other):
            raise PipelineError(
                f"output: microbatches {number} and 0 differ in structure or in a value that is not a tensor: "
                f"{other.value!r:.200} and {first.value!r:.200}. Return a tensor for each value that differs."
            )
    for place, tensor in enumerate(first.tensors):
        if tensor.dim() == 0:
            raise PipelineError(
                f"output: tensor {place} of {len(first.tensors)} has no dimension, so the microbatches cannot be put "
                "together along dimension 0. Compute a mean or a loss after the pipe, or return one value per row."
            )
    columns = list(zip(*(one.tensors for one in microbatches), strict=True))
    for place, column in enumerate(columns):
        shapes = [tuple(tensor.shape) for tensor in column]
        if len({shape[1:] if shape else None for shape in shapes}) > 1:
            raise PipelineError(
                f"output: tensor {place} of {len(columns)} has the shapes {shapes} in the microbatches, but only the "
                "first dimension may differ. Pad the batch to one size."
            )
    return join(first.template, [torch.cat(column) for column in columns])


def _agree(first: Microbatch, other: Microbatch) -> bool:
    try:
        return same_structure(first.template, other.template)
    except Exception:  # noqa: BLE001  objects may compare in any way; comparing arrays does not give a bool
        return False
