"""The saves of a forward, and the storages that they keep: the rows of a `SavedReport`.

Bytes count storages, each once: a storage is freed once no save holds it. A save is one slot in one node; several saves
may share a storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from torchremat.stores.needs import NEEDS, Shape

Need = Literal["shape", "mask"]
Kind = Literal["saved", "parameter", "buffer", "input", "stored"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One save: a tensor in one slot of one node.

    Attributes:
        storages: Its storages, by number; several only for tensors that consist of other tensors.
        storage_bytes: Bytes of these storages.
        tensor_bytes: Bytes of its elements alone.
        kind: `saved`: made by the step and kept alive by autograd. `parameter`, `buffer` and `input` (a tensor that the
            step holds) are alive anyway. `stored`: moved into a store.
        node: The node of the graph that holds it, `MulBackward0` or the class of a custom Function; "" if the loss does
            not reach it, or if it is the input of a region.
        slot: The place in the node: `self`, `indices[0]`, `tensors[1]` for tensors saved by a custom Function.
        operator: The operator that saved it, `aten.mul.Tensor`; a custom Function's name; "" if it is not known.
        function: The function of `torch.nn.functional` that called the operator, or "".
        module: The name of the innermost module that ran; for the model itself the name of its class; or "".
        source: File, line and function of the code that called it.
        shape: Its shape; -1 where the items of a nested tensor differ in length.
        dtype: Its dtype.
        strides: In elements; empty for a layout without strides.
        device: Its device.
        is_first: Whether it is the first save of one of its storages: totals by operator, module, line and dtype count
            these here.
        others: The numbers of the other saves that share a storage with it.
        need: The lesser need that suffices, by the rules of its node: its shape, or one bit for each element.
    """

    storages: tuple[int, ...]
    storage_bytes: int
    tensor_bytes: int
    kind: Kind
    node: str
    slot: str
    operator: str
    function: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    device: str
    is_first: bool
    others: tuple[int, ...]
    need: Need | None = None

    @property
    def place(self) -> str:
        """Node and slot, as in `MulBackward0.self`; else the operator."""
        return f"{self.node}.{self.slot}" if self.node else self.operator or "?"


@dataclass(frozen=True, kw_only=True)
class KeptStorage:
    """A storage that autograd keeps.

    Attributes:
        number: Its number.
        size: Its bytes.
        kind: See `Saved`.
        device: Its device.
        saves: The numbers of the saves that share it.
    """

    number: int
    size: int
    kind: Kind
    device: str
    saves: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DerivedStorage:
    """A saved storage that could be recomputed from another storage that is alive anyway.

    Attributes:
        storage: The number of the copy.
        source: The number of the storage that it was copied from; neither has been written since.
        source_kind: Why the source is alive; see `Saved`.
        operator: The operator that made the copy: `aten._to_copy.default` for a cast, `aten.clone.default` for
            `contiguous()`.
        where: The line of code that made it.
        freed_bytes: Bytes freed without the copy.
    """

    storage: int
    source: int
    source_kind: Kind
    operator: str
    where: str
    freed_bytes: int


def need_of(node: str, slot: str, dtype: torch.dtype) -> Need | None:
    """Return the lesser need that suffices for a saved tensor; None if backward needs its values."""
    need = NEEDS.get(node, {}).get(slot)
    if isinstance(need, Shape):
        return "shape"
    return "mask" if need is not None or dtype == torch.bool else None
