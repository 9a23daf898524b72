"""The outputs of all steps of a loop, stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.tensors.structure import Leaf, join, leaves_of, same_structure, split


def stacked(outputs: list[object]) -> object:
    """Return the outputs as one, whose tensors have a first dimension for the steps; None if there are none.

    Raises:
        UnsupportedError: An output has something that is not a tensor, or another structure or shape than the first.
    """
    columns: list[list[Tensor]] = []
    first: object = None
    for index, output in enumerate(outputs):
        tensors: list[Tensor] = []
        template = split(output, tensors, [])
        if index == 0:
            first = template
            for place, leaf in leaves_of(template, "output"):
                if not isinstance(leaf, Leaf) and leaf is not None:
                    raise UnsupportedError(f"loop: {place} is {leaf!r}; the output of a step has tensors, or None.")
            columns = [[] for _ in tensors]
        elif not same_structure(first, template):
            raise UnsupportedError(f"loop: the output of step {index} has another structure than that of step 0.")
        for column, tensor in zip(columns, tensors, strict=True):
            if column and tensor.shape != column[0].shape:
                raise UnsupportedError(
                    f"loop: an output of step {index} has the shape {tuple(tensor.shape)}, and that of step 0 "
                    f"{tuple(column[0].shape)}."
                )
            column.append(tensor)
    return join(first, [torch.stack(column) for column in columns])
