"""The tensors that autograd keeps at the end of a forward, as data.

Bytes count storages, each once: a storage is freed once no save holds it. A save is one slot in one node; several saves
may share a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from torchremat.measuring.freeing import Freed, freed
from torchremat.measuring.saving import StepLog
from torchremat.policies import (
    everything_saved,
    nothing_saved,
    save_attention,
    save_convolutions,
    save_matmuls,
    save_unbatched_matmuls,
)
from torchremat.stores.slots import NEEDS, Shape

# Policies that need no argument.
_POLICIES = (
    nothing_saved,
    save_attention,
    save_convolutions,
    save_unbatched_matmuls,
    save_matmuls,
    everything_saved,
)

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
        shape: Its shape.
        dtype: Its dtype.
        strides: In elements; empty for a layout without strides.
        device: Its device.
        is_first: Whether no earlier save shares its storages: totals by operator, module, line and dtype count it here.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedData:
    """The saves and storages of a `SavedReport`, which describes them, and their totals."""

    entries: tuple[Saved, ...]
    storages: Mapping[int, KeptStorage]
    copies: tuple[DerivedStorage, ...]
    blocks: tuple[str, ...]
    region_slots: int
    regions: int
    unknown: Mapping[str, int]
    requires_grad: bool
    is_compiled: bool
    log: StepLog = field(repr=False)

    # ------------------------------------------------------------------------------------------------------- totals

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages that only autograd keeps alive, each once."""
        return self.bytes_of("saved")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the saved storages of parameters."""
        return self.bytes_of("parameter")

    @property
    def stored_bytes(self) -> int:
        """Bytes that stores hold for saved tensors."""
        return self.bytes_of("stored")

    @property
    def bytes_by_save(self) -> int:
        """Bytes of all saves that are not alive anyway, as if each kept its own elements."""
        return sum(one.tensor_bytes for one in self.entries if one.kind == "saved")

    def bytes_of(self, kind: Kind) -> int:
        """Return the bytes of the storages of one kind, each once."""
        return sum(one.size for one in self.storages.values() if one.kind == kind)

    def by_operator(self) -> dict[str, int]:
        """Return the saved bytes by node, or by operator where the node is not known; most bytes first."""
        return self._totals(lambda one: one.node or one.operator)

    def by_module(self) -> dict[str, int]:
        """Return the saved bytes by the innermost module that saved them first; most bytes first."""
        return self._totals(lambda one: one.module)

    def by_line(self) -> dict[str, int]:
        """Return the saved bytes by the file, line and function that saved them first; most bytes first."""
        return self._totals(lambda one: one.source)

    def by_dtype(self) -> dict[str, int]:
        """Return the saved bytes by dtype; most bytes first."""
        return self._totals(lambda one: one.dtype)

    def by_need(self) -> dict[Need, int]:
        """Return the saved bytes that could be a shape or bits: storages of which every save needs no more."""
        found: dict[Need, int] = {}
        for one in self.storages.values():
            needs = {self.entries[save].need for save in one.saves}
            if one.kind == "saved" and None not in needs:
                need: Need = "mask" if "mask" in needs else "shape"
                found[need] = found.get(need, 0) + one.size
        return found

    def _totals(self, key: Callable[[Saved], str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self.entries:
            if one.kind == "saved":
                found[key(one)] = found.get(key(one), 0) + (self._first_bytes(one) if one.is_first else 0)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _first_bytes(self, one: Saved) -> int:
        return sum(self.storages[number].size for number in one.storages if self.storages[number].kind == "saved")

    # ------------------------------------------------------------------------------------------------------- what if

    def freed_by(self, policy: Callable[..., object] | None = None, *, blocks: Sequence[str] | None = None) -> Freed:
        """Return the kept and freed bytes if blocks were regions, with a policy or without.

        Decided from the log of the step; nothing runs again. The policy gets tensors on the device `meta`, with
        everything except values.

        Args:
            policy: As for `checkpoint`; called as `policy(ctx, op, *args, **kwargs)`.
            blocks: Names of modules whose calls become regions; `report.blocks` if not given.

        Raises:
            PolicyError: The policy gives no valid answer, or the step calls no module of that name with grad mode on.
            UnsupportedError: Compiled code ran, whose operators no policy sees; or the policy uses the names of
                tensors, which are not logged.
        """
        return freed(self.log, policy, self.blocks if blocks is None else blocks)

    def freed_by_policies(self) -> dict[str, Freed]:
        """Return the same for the blocks with each policy that the library has; nothing where compiled code ran."""
        if self.is_compiled or not self.blocks:
            return {}
        return {repr(policy): self.freed_by(policy) for policy in _POLICIES}


def need_of(node: str, slot: str, dtype: torch.dtype) -> Need | None:
    """Return the lesser need that suffices for a saved tensor; None if backward needs its values."""
    need = NEEDS.get(node, {}).get(slot)
    if isinstance(need, Shape):
        return "shape"
    return "mask" if need is not None or dtype == torch.bool else None
