"""The findings of a check when a recompute differs from its forward: bare facts, without words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchremat.tensors.metadata import Metadata

Kind = Literal["too many", "too few", "metadata", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a recompute differs from its forward.

    Attributes:
        kind: The property that was compared.
        index: The first saved tensor that differs, None if only their numbers do.
        then: Its metadata in the forward.
        now: Its metadata in the recompute.
        saved_then: How many tensors the forward saved.
        saved_now: How many the recompute saved until it was stopped.
    """

    kind: Kind
    index: int | None = None
    then: Metadata | None = None
    now: Metadata | None = None
    saved_then: int
    saved_now: int


class DivergedError(Exception):
    """A recompute differs from its forward; the caller finds the words."""

    def __init__(self, call: int, difference: Difference) -> None:
        super().__init__(call, difference)
        self.call = call
        self.difference = difference


def named(metadata: Metadata, *, strides: bool = False) -> dict[str, object]:
    """Return metadata by name, printed as `torch.utils.checkpoint` prints them.

    >>> import torch
    >>> named((torch.Size([2]), torch.float32, torch.device("cpu"), (1,)))
    {'shape': torch.Size([2]), 'dtype': torch.float32, 'device': device(type='cpu')}
    """
    shape, dtype, device, layout = metadata
    found: dict[str, object] = {"shape": shape, "dtype": dtype, "device": device}
    if strides:
        found["strides" if isinstance(layout, tuple) else "layout"] = layout
    return found


def words(metadata: Metadata) -> str:
    """Return metadata in short words.

    >>> import torch
    >>> words((torch.Size([2, 3]), torch.float32, torch.device("cpu"), (3, 1)))
    'shape (2, 3), torch.float32, cpu'
    """
    shape, dtype, device, _ = metadata
    return f"shape {tuple(shape)}, {dtype}, {device}"
