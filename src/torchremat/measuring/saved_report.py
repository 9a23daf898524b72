"""What autograd keeps at the end of a forward, as data.

Bytes are those of storages, each once: that is what goes if nobody saves it any more. A save is one place in one node;
several saves may share a storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from torchremat.measuring.freeing import Freed, StepLog, freed
from torchremat.measuring.needs import Need
from torchremat.measuring.saved_page import page_of
from torchremat.measuring.saved_text import described
from torchremat.policies import (
    everything_saved,
    nothing_saved,
    save_attention,
    save_convolutions,
    save_matmuls,
    save_unbatched_matmuls,
)
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Page
from torchremat.views.viewed import Viewed

Kind = Literal["saved", "parameter", "buffer", "input", "stored"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One save: a tensor in one place of one node.

    Attributes:
        storages: Its storages, by number; several only for tensors that consist of others.
        storage_bytes: Bytes of those.
        tensor_bytes: Bytes of its elements, as if they lay alone.
        kind: `saved`: made by the step, so that it is there for autograd's sake. `parameter`, `buffer` and `input`
            (a tensor that the step holds) are there anyway. `stored`: what a store has taken.
        node: The node of the graph that holds it, `MulBackward0` or the class of a custom Function; "" if it is not in
            reach of the loss, or is the input of a region.
        slot: The place in the node: `self`, `indices[0]`, `tensors[1]` for what a custom Function saved.
        operator: The operator that saved it, `aten.mul.Tensor`; a custom Function's name; "" if it is not known.
        function: The function of `torch.nn.functional` that called the operator, or "".
        module: The name of the innermost module that ran; that of the model's class for the model itself; or "".
        source: File, line and function of the code that called it.
        shape: Its shape.
        dtype: Its dtype.
        strides: In elements; empty for a layout without strides.
        device: Its device.
        is_first: Whether no save before shares its storages: totals by operator, module, line and dtype count it here.
        others: The numbers of the other saves that share a storage with it.
        need: What would do in its place, by the rules of its node: its shape, or one bit for each element.
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
    """A saved storage that could be made again from another one that is there anyway.

    Attributes:
        storage: The number of the copy.
        source: The number of the storage that it was copied from, neither of them written since.
        source_kind: Why the source is there; see `Saved`.
        operator: What made the copy: `aten._to_copy.default` for a cast, `aten.clone.default` for `contiguous()`.
        where: The line of code that made it.
        freed_bytes: What going without the copy would free.
    """

    storage: int
    source: int
    source_kind: Kind
    operator: str
    where: str
    freed_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedReport(Viewed):
    """What autograd keeps of a step at the end of its forward.

    Attributes:
        entries: The saves, in order; those that were found in the graph alone come last.
        storages: What they keep, by number.
        copies: Storages of the step's that repeat others.
        blocks: The names of the blocks: the modules that the model calls one after the other.
        region_slots: Saved tensors that are recomputed, and take no bytes.
        regions: The regions that these belong to.
        unknown: Saved tensors that hooks of others hold in some way of theirs, by the type of what they hold.
        requires_grad: Whether the loss requires grad; otherwise nothing is kept for it.
        is_compiled: Whether compiled code ran. What it saves is one node, and its operators are not known.
    """

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
        """Bytes of the storages that are there for autograd's sake, each once."""
        return self.bytes_of("saved")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the saved storages that are parameters'."""
        return self.bytes_of("parameter")

    @property
    def stored_bytes(self) -> int:
        """Bytes that stores hold of saved tensors."""
        return self.bytes_of("stored")

    @property
    def bytes_by_save(self) -> int:
        """Bytes of all saves that are not there anyway, as if each kept elements of its own."""
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
        """Return the saved bytes that could be a shape, or bits: of storages all of whose saves need no more."""
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
        """Return what would be kept and freed if blocks were regions, with a policy or without.

        Decided from the log of the step; nothing runs again. The policy gets tensors of the device `meta`, which have
        all but values.

        Args:
            policy: As for `checkpoint`; called as `policy(ctx, op, *args, **kwargs)`.
            blocks: Names of modules whose calls become regions; `report.blocks` if not given.

        Raises:
            PolicyError: The policy gives no valid answer, or the step calls no module of that name with grad mode on.
            UnsupportedError: Compiled code ran, whose operators no policy sees; or the policy goes by the names of
                tensors, which are not logged.
        """
        return freed(self.log, policy, self.blocks if blocks is None else blocks)

    def freed_by_policies(self) -> dict[str, Freed]:
        """Return the same for the blocks with each policy that the library has; nothing where compiled code ran."""
        if self.is_compiled or not self.blocks:
            return {}
        return {repr(policy): self.freed_by(policy) for policy in _POLICIES}

    # --------------------------------------------------------------------------------------------------------- forms

    def as_dict(self) -> dict[str, object]:
        """Return all of it in lists, dicts, strings and numbers, as JSON has them."""
        return {
            "saved_bytes": self.saved_bytes,
            "bytes_by_save": self.bytes_by_save,
            "parameter_bytes": self.parameter_bytes,
            "buffer_bytes": self.bytes_of("buffer"),
            "input_bytes": self.bytes_of("input"),
            "stored_bytes": self.stored_bytes,
            "requires_grad": self.requires_grad,
            "is_compiled": self.is_compiled,
            "region_slots": self.region_slots,
            "regions": self.regions,
            "unknown": dict(self.unknown),
            "by_operator": self.by_operator(),
            "by_module": self.by_module(),
            "by_line": self.by_line(),
            "by_dtype": self.by_dtype(),
            "by_need": dict(self.by_need()),
            "entries": [_listed(asdict(one)) for one in self.entries],
            "storages": [_listed(asdict(one)) for one in self.storages.values()],
            "copies": [asdict(one) for one in self.copies],
            "blocks": [{"name": name, **asdict(self.freed_by(blocks=[name]))} for name in self.blocks],
            "policies": [{"policy": name, **asdict(one)} for name, one in self.freed_by_policies().items()],
        }

    def save(self, path: str | Path) -> None:
        """Write `as_dict()` into a file, as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def text(self, top: int = 10) -> str:
        """Return the report with the `top` largest storages, modules and operators; `print(report)` shows 10."""
        return described(self, top)

    def _page(self) -> Page:
        return page_of(self)

    def __repr__(self) -> str:
        storages = sum(one.kind == "saved" for one in self.storages.values())
        return f"<SavedReport: {format_bytes(self.saved_bytes)} in {storages} storages>"

    def __str__(self) -> str:
        return self.text()


def _listed(found: dict[str, object]) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


# Those that need no argument.
_POLICIES = (
    nothing_saved,
    save_attention,
    save_convolutions,
    save_unbatched_matmuls,
    save_matmuls,
    everything_saved,
)
