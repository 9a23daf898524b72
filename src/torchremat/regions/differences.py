"""What a check finds when a recompute is not its forward: bare facts, without words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# What is compared of a saved tensor: its shape, dtype and device, and possibly strides and layout.
Metadata = tuple[object, ...]

Kind = Literal["too many", "too few", "metadata", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a recompute differs from its forward.

    Attributes:
        kind: What was compared.
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
    """A recompute is not its forward; whoever asked for it finds the words."""

    def __init__(self, call: int, difference: Difference) -> None:
        super().__init__(call, difference)
        self.call = call
        self.difference = difference


def named(metadata: Metadata) -> dict[str, object]:
    """Return metadata by name, printed as `torch.utils.checkpoint` prints them.

    >>> named((torch.Size([2]), torch.float32, torch.device("cpu")))
    {'shape': torch.Size([2]), 'dtype': torch.float32, 'device': device(type='cpu')}
    """
    found: dict[str, object] = {}
    for item in metadata:
        match item:
            case torch.Size():
                found["shape"] = item
            case torch.dtype():
                found["dtype"] = item
            case torch.device():
                found["device"] = item
            case torch.layout():
                found["layout"] = item
            case _:
                found["stride"] = item
    return found


def words(metadata: Metadata) -> str:
    """Return metadata in short words.

    >>> words((torch.Size([2, 3]), torch.float32, torch.device("cpu")))
    'shape (2, 3), torch.float32, cpu'
    """
    parts: list[str] = []
    for name, item in named(metadata).items():
        if name == "shape":
            parts.append(f"shape {tuple(item)}")  # pyright: ignore[reportArgumentType]: a `torch.Size`
        elif item is not None:
            parts.append(f"stride {item}" if name == "stride" else str(item))
    return ", ".join(parts)
