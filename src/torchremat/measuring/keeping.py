"""`saved_tensors`: one forward of a step, and a list of what autograd keeps at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from torchremat._compat.slots import NodeSlot, slots_below
from torchremat.errors import StepError
from torchremat.measuring.freeing import StepLog, freed
from torchremat.measuring.needs import need_of
from torchremat.measuring.packed import behind, kept_by
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.saved_report import Copy, KeptStorage, Kind, Saved, SavedReport
from torchremat.measuring.saving import Packed, SaveLog, Watched, watched
from torchremat.measuring.step import loss_of
from torchremat.regions.operators import Operator
from torchremat.regions.region import Region
from torchremat.regions.selection import HeldView
from torchremat.regions.slots import Slot
from torchremat.saved.metadata import Metadata, metadata_of, version_of
from torchremat.stores.stored import Stored

_INPUT = "input of a region"
_CHOSEN = "kept by a policy"

# A call is taken apart into the calls that it makes if its own code saves at most this share of what is saved in it,
_MOST_GLUE = 0.1
# and if it holds more than this share of what the whole forward saves.
_LEAST_SHARE = 0.5


def saved_tensors(step: Callable[..., object], model: nn.Module | None = None) -> SavedReport:
    """Run the forward of a training step and return what autograd keeps at its end.

    The forward runs once, or three times if compiled code is in it; backward does not run. Gradients, buffers,
    generators, training flags and hooks are put back as by `measure`, also if the step raises, and nothing of the step
    stays in memory.

    Args:
        step: Called as `step(model)`, or as `step()` if no model is given. Returns the loss: a scalar tensor, an
            object with a `.loss`, or a dict with a `"loss"`. If it does not require grad, the report is empty and
            says so.
        model: The model. Modules that the step itself holds count as well.

    Raises:
        StepError: The step returns no loss, runs backward itself, saves other tensors when compiled code of it runs
            again, or the model has parameters without values.
        VersionError: This torch does not say what a node holds.
    """
    subject = subject_of(step, model, None)
    with watched(subject, operators=True) as run:
        if not run.log.is_compiled:
            return _report(run, run.log.savers)
        eager = [
            (save_metadata, run.log.savers.get(index))
            for index, (save, save_metadata) in enumerate(zip(run.log.saves, run.log.metadata, strict=True))
            if not save.is_compiled
        ]
    with subject.untouched():
        # Before any hook is set: code that dynamo compiles with hooks in place may be other code.
        _root(subject.run())
    return _compiled_report(subject, eager)


def _compiled_report(subject: Subject, eager: list[tuple[Metadata, Operator | None]]) -> SavedReport:
    """Return the report of a run with compiled code; the operators outside of that are those of another run."""
    with watched(subject, operators=False) as run:
        outside = [index for index, save in enumerate(run.log.saves) if not save.is_compiled]
        if [run.log.metadata[index] for index in outside] != [metadata for metadata, _ in eager]:
            raise StepError(
                f"the step saves {len(outside)} tensors outside of compiled code, and {len(eager)}, or others, when it "
                "runs again. A report needs a step that does the same each time."
            )
        savers = {index: saver for index, (_, saver) in zip(outside, eager, strict=True) if saver is not None}
        return _report(run, savers)


def _root(result: object) -> Tensor | None:
    """Return the loss, or None if it is one that does not require grad."""
    loss = result
    if isinstance(result, Mapping):
        loss = cast("Mapping[object, object]", result).get("loss")
    elif not isinstance(result, Tensor):
        loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor) and not loss.requires_grad:
        return None
    return loss_of(result)


def _report(run: Watched, savers: Mapping[int, Operator]) -> SavedReport:
    root = _root(run.take_result())
    alive = {one.index: one for packed in run.log.packed if (one := packed()) is not None}
    slots = list(slots_below(root)) if root is not None else []
    if run.log.unpacks and not alive and not any(slot.packed is not None for slot in slots):
        raise StepError(
            "the step has run backward itself, so nothing is kept any more. Return the loss without calling backward."
        )
    return _Inventory(run, savers).report(alive, slots, requires_grad=root is not None)


@dataclass(slots=True)
class _Found:
    """A save, before it is known who shares its storages."""

    storages: tuple[int, ...]
    metadata: Metadata
    node: NodeSlot | None
    operator: Operator | None = None
    custom: str = ""
    module: str = ""
    source: str = ""
    call: int | None = None
    version: int = -1
    version_now: int = -1


class _Inventory:
    """Makes a report of a forward that has been watched."""

    def __init__(self, run: Watched, savers: Mapping[int, Operator]) -> None:
        self.run = run
        self.log: SaveLog = run.log
        self.savers = savers
        self.kinds: dict[int, Kind] = {number: one.kind for number, one in run.before.items()}
        self.stored: dict[int, int] = {}  # bytes by number; what is in a store has a negative one
        self.stores: dict[int, int] = {}
        self.found: list[_Found] = []
        self.regions: set[int] = set()
        self.region_slots = 0
        self.unknown: Counter[str] = Counter()

    def report(self, alive: Mapping[int, Packed], slots: list[NodeSlot], *, requires_grad: bool) -> SavedReport:
        held = {slot.packed.index: slot for slot in slots if isinstance(slot.packed, Packed)}
        for index, packed in alive.items():
            self._add_packed(packed, held.get(index))
        for slot in sorted(slots, key=lambda slot: slot.sequence):
            if not isinstance(slot.packed, Packed):
                self._add_foreign(slot.packed, slot)
        sharing: dict[int, list[int]] = {}
        for index, one in enumerate(self.found):
            for number in one.storages:
                sharing.setdefault(number, []).append(index)
        log = StepLog(
            operators=tuple(self.log.rans) if not self._is_compiled else (),
            saves=tuple(self.log.saves),
            calls=tuple(self.run.calls),
            roots=self.run.roots,
            kept=tuple((one.storages, one.call) for one in self.found),
            sizes=tuple(self.run.numbers.sizes),
            before=frozenset(self.run.before),
            parameters=frozenset(number for number, one in self.run.before.items() if one.kind == "parameter"),
            is_compiled=self._is_compiled,
        )
        return SavedReport(
            entries=tuple(self._entry(index, one, sharing) for index, one in enumerate(self.found)),
            storages={number: self._storage(number, saves) for number, saves in sharing.items()},
            copies=tuple(self._copies(sharing)),
            blocks=_blocks(log),
            region_slots=self.region_slots,
            regions=len(self.regions),
            unknown=dict(self.unknown),
            requires_grad=requires_grad,
            is_compiled=self._is_compiled,
            log=log,
        )

    @property
    def _is_compiled(self) -> bool:
        return any(save.is_compiled for save in self.log.saves) or self.log.is_compiled

    # -------------------------------------------------------------------------------------------------------- saves

    def _add_packed(self, packed: Packed, slot: NodeSlot | None) -> None:
        save = self.log.saves[packed.index]
        self.found.append(
            _Found(
                storages=self.run.numbers.of(packed.tensor),
                metadata=self.log.metadata[packed.index],
                node=slot,
                operator=self.savers.get(packed.index),
                custom=_INPUT if save.is_input else save.custom,
                module=save.module,
                source=str(save.source),
                call=save.call,
                version=packed.version,
                version_now=version_of(packed.tensor),
            )
        )

    def _add_foreign(self, packed: object, slot: NodeSlot | None, words: str = "") -> None:
        """Add what hooks of others hold, or no hook does: what is from before the step, or from another thread.

        Args:
            packed: What they hold.
            slot: Where; None if it is in no node.
            words: What it is, if it is no operator's.
        """
        if isinstance(packed, Packed):
            return
        if isinstance(packed, Slot):
            self._add_region(packed.region)
            if packed.value is None or isinstance(packed.value, HeldView):
                self.region_slots += 1
                return
            packed = packed.value
        found = list(behind(packed))
        if not found:
            self.unknown[type(packed).__name__] += 1
        for one in found:
            if isinstance(one, Stored):
                # The saves that share a record are stored once.
                number = self.stores.setdefault(id(one.record), -1 - len(self.stores))
                self.stored[number] = one.record.stored_bytes
                self.kinds[number] = "stored"
                self._place(slot, words, (number,), (one.size, one.dtype, one.record.device, one.stride))
            else:
                self._place(slot, words, self.run.numbers.of(one), metadata_of(one), version_of(one))

    def _add_region(self, region: Region) -> None:
        if id(region) in self.regions:
            return
        self.regions.add(id(region))
        for held in region.held:
            if not isinstance(held.kept, nn.Parameter):
                self._add_foreign(held.kept, None, _INPUT)
        for one in kept_by(region):
            self._add_foreign(one, None, _CHOSEN)

    def _place(
        self, slot: NodeSlot | None, words: str, storages: tuple[int, ...], metadata: Metadata, version: int = -1
    ) -> None:
        found = _Found(storages, metadata, slot, custom=words, version=version, version_now=version)
        ran = None if slot is None else self.log.by_node.get(slot.sequence)
        if ran is not None:
            found.operator, found.call = ran.operator, ran.call
            found.module, found.source = ran.operator.module, str(ran.operator.source)
        self.found.append(found)

    # ------------------------------------------------------------------------------------------------------- entries

    def _entry(self, index: int, one: _Found, sharing: Mapping[int, list[int]]) -> Saved:
        shape, dtype, device, strides = one.metadata
        others = sorted({other for number in one.storages for other in sharing[number]} - {index})
        kinds: list[Kind] = [self._kind(number) for number in one.storages]
        kind: Kind = "saved" if not kinds or "saved" in kinds else kinds[0]
        return Saved(
            storages=one.storages,
            storage_bytes=sum(self._size(number) for number in one.storages),
            tensor_bytes=shape.numel() * dtype.itemsize,
            kind=kind,
            node=one.node.node if one.node else "",
            slot=one.node.name if one.node else "",
            operator=one.custom or (one.operator.name if one.operator else ""),
            function=one.operator.function if one.operator and not one.custom else "",
            module=one.module,
            source=one.source,
            shape=tuple(shape),
            dtype=str(dtype).removeprefix("torch."),
            need=need_of(one.node.node, one.node.name, dtype) if one.node else None,
            strides=strides if isinstance(strides, tuple) else (),
            device=str(device),
            is_first=all(sharing[number][0] == index for number in one.storages),
            others=tuple(others),
        )

    def _storage(self, number: int, saves: list[int]) -> KeptStorage:
        device = str(self.run.numbers.devices[number]) if number >= 0 else ""
        return KeptStorage(
            number=number, size=self._size(number), kind=self._kind(number), device=device, saves=tuple(saves)
        )

    def _kind(self, number: int) -> Kind:
        return self.kinds.get(number, "saved")

    def _size(self, number: int) -> int:
        return self.run.numbers.sizes[number] if number >= 0 else self.stored[number]

    # -------------------------------------------------------------------------------------------------------- copies

    def _copies(self, sharing: Mapping[int, list[int]]) -> Iterator[Copy]:
        for number in sharing:
            copied = self.log.copied.get(number)
            if copied is None or self._kind(number) != "saved" or not self._is_at(number, copied.version, sharing):
                continue
            source = copied
            # What was copied may be a copy that nobody keeps, of something that is kept.
            while not self._is_at(source.source, source.source_version, sharing):
                further = self.log.copied.get(source.source)
                if further is None or further.version != source.source_version:
                    break
                source = further
            else:
                yield Copy(
                    storage=number,
                    source=source.source,
                    source_kind=self._kind(source.source),
                    operator=copied.operator.name,
                    where=str(copied.operator.source),
                    freed_bytes=self._size(number),
                )

    def _is_at(self, number: int, version: int, sharing: Mapping[int, list[int]]) -> bool:
        """Return whether a storage is kept, and holds now what it held at a version."""
        before = self.run.before.get(number)
        if before is not None:
            return version_of(before.tensor) == version
        return number in sharing and all(
            self.found[save].version == version == self.found[save].version_now for save in sharing[number]
        )


# -------------------------------------------------------------------------------------------------------------- blocks


def _blocks(log: StepLog) -> tuple[str, ...]:
    """Return the names of the modules that a model calls one after the other, as far as regions of them free bytes."""
    inside: list[set[int]] = [set() for _ in log.calls]  # saved in a call, at any depth
    own: list[set[int]] = [set() for _ in log.calls]
    for storages, call in log.kept:
        if call is not None:
            own[call].update(storages)
        for one in log.around(call):
            inside[one].update(storages)
    children: dict[int | None, list[int]] = {}
    for index, call in enumerate(log.calls):
        if call.has_grad:
            children.setdefault(call.parent, []).append(index)
    total = log.bytes_of({one for storages, _ in log.kept for one in storages})

    def parts(call: int) -> list[int]:
        within = children.get(call, [])
        whole = log.bytes_of(inside[call])
        is_root = log.calls[call].parent is None
        is_shell = whole > _LEAST_SHARE * total and log.bytes_of(own[call]) <= _MOST_GLUE * whole
        if not within or not (is_root or is_shell):
            return [call]
        return [one for child in within for one in parts(child)]

    names = dict.fromkeys(log.calls[one].name for root in children.get(None, []) for one in parts(root))
    return tuple(name for name in names if freed(log, None, [name]).freed_bytes > 0)
