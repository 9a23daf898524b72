"""`saved`: one forward of a step, and a list of the tensors that autograd keeps at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from torchremat.errors import StepError
from torchremat.measuring.arguments import Step, model_and_step, model_first
from torchremat.measuring.freeing import blocks_of
from torchremat.measuring.packed import InStore, behind, kept_by
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.saved_data import DerivedStorage, KeptStorage, Kind, Saved, need_of
from torchremat.measuring.saved_report import SavedReport
from torchremat.measuring.saving import SavedPlaceholder, SaveLog, watched
from torchremat.measuring.step import found_loss, loss_of
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.regions.diagnosis.operators import LoggedOperator
from torchremat.regions.footprints import abandon
from torchremat.regions.recording import Recording
from torchremat.regions.slots import Slot
from torchremat.tensors.graphs import GraphSlot, nodes_of, slots_of
from torchremat.tensors.metadata import Metadata, metadata_of, numbers_of, version_of

_INPUT = "input of a region"
_CHOSEN = "kept by a policy"


@without_our_frames
@model_first
def saved(model: nn.Module | Step, step: Step | None = None) -> SavedReport:
    """Run the forward of a training step and return the tensors that autograd keeps at its end.

    The forward runs once, or three times if it has compiled code; backward does not run. Gradients, buffers,
    generators, training flags and hooks are restored as by `measure`, also if the step raises, and nothing of the step
    stays in memory.

    Args:
        model: The model. Modules that the step itself holds count as well. If it holds all of them, pass the step
            alone.
        step: Called as `step(model)`, or as `step()` if no model is given. Returns the loss: a scalar tensor, an
            object with a `.loss`, or a dict with a `"loss"`. If it does not require grad, the report is empty and
            says so.

    Raises:
        StepError: The step returns no loss, runs backward itself, saves other tensors when its compiled code runs
            again, or the model has parameters without values.
        UnsupportedError: The step runs a transform of `torch.func` that refuses saved-tensor hooks.
    """
    subject = subject_of(*model_and_step(model, step), None)
    with watched(subject, operators=True) as log:
        if not log.is_compiled:
            return _report(log, log.savers)
        eager = [
            (save_metadata, log.savers.get(index))
            for index, (save, save_metadata) in enumerate(zip(log.step.saves, log.metadata, strict=True))
            if not save.is_compiled
        ]
    with subject.untouched():
        # Before any hook is set: dynamo may compile different code with hooks in place.
        root = _root(subject.run())
        abandon([] if root is None else [root])
        del root
    return _compiled_report(subject, eager)


def _compiled_report(subject: Subject, eager: list[tuple[Metadata, LoggedOperator | None]]) -> SavedReport:
    """Return the report of a run with compiled code; operators outside of compiled code come from another run."""
    with watched(subject, operators=False) as log:
        outside = [index for index, save in enumerate(log.step.saves) if not save.is_compiled]
        if [log.metadata[index] for index in outside] != [metadata for metadata, _ in eager]:
            raise StepError(
                f"the step saves {len(outside)} tensors outside of compiled code, and {len(eager)}, or others, when it "
                "runs again. A report needs a step that does the same each time."
            )
        savers = {index: saver for index, (_, saver) in zip(outside, eager, strict=True) if saver is not None}
        return _report(log, savers)


def _root(result: object) -> Tensor | None:
    """Return the loss, or None if it does not require grad."""
    loss = found_loss(result)
    return None if isinstance(loss, Tensor) and not loss.requires_grad else loss_of(result)


def _report(log: SaveLog, savers: Mapping[int, LoggedOperator]) -> SavedReport:
    root = _root(log.take_result())
    report = report_of(log, savers, [] if root is None else [root])
    if log.unpacks and not (report.entries or report.regions or report.unknown):
        raise StepError(
            "the step has run backward itself, so nothing is kept any more. Return the loss without calling backward."
        )
    return report


def report_of(log: SaveLog, savers: Mapping[int, LoggedOperator], roots: Sequence[Tensor]) -> SavedReport:
    """Return the report of a watched forward; no backward can go through its regions afterwards.

    Args:
        log: The log of the forward; the caller must hold no more of its result than a training step does.
        savers: The operators that have saved something, by the number of the save, where known.
        roots: The tensors that backward starts from.
    """
    alive = {one.index: one for packed in log.packed if (one := packed()) is not None}
    slots = [slot for node in nodes_of(roots) for slot in slots_of(node)]
    report = _Inventory(log, savers).report(alive, slots, requires_grad=bool(roots))
    abandon(roots)
    return report


@dataclass(slots=True)
class _FoundSave:
    """A save before the search for other saves that share its storages."""

    storages: tuple[int, ...]
    metadata: Metadata
    elements: int
    node: GraphSlot | None
    operator: LoggedOperator | None = None
    custom: str = ""
    module: str = ""
    source: str = ""
    call: int | None = None
    version: int = -1
    version_now: int = -1


class _Inventory:
    """Makes a report of a watched forward whose graph is still alive.

    of a save       where it was saved, and by which operator        the log of the forward
                    whether it is still alive                        the packed objects that autograd still holds
                    node and slot                                    the graph below the loss
    of all others   tensors held by foreign hooks, their storages    the graph, and the regions that its slots lead to

    Args:
        log: The log of the forward.
        savers: The operators that have saved something, by the number of the save.
    """

    def __init__(self, log: SaveLog, savers: Mapping[int, LoggedOperator]) -> None:
        self.log = log
        self.savers = savers
        self.kinds: dict[int, Kind] = {number: one.kind for number, one in log.before.items()}
        self.stored: dict[int, int] = {}  # bytes by number; numbers of a store are negative
        self.stores: dict[int, int] = {}
        self.found: list[_FoundSave] = []
        self.regions: set[int] = set()
        self.region_slots = 0
        self.unknown: Counter[str] = Counter()

    def report(
        self, alive: Mapping[int, SavedPlaceholder], slots: list[GraphSlot], *, requires_grad: bool
    ) -> SavedReport:
        """Return the report.

        Args:
            alive: The packed objects that autograd still holds, by the number of the save.
            slots: The places of the graph.
            requires_grad: Whether the loss requires grad.
        """
        inside = [(slot, slot.raw.data) for slot in sorted(slots, key=lambda slot: slot.sequence)]
        held = {packed.index: slot for slot, packed in inside if isinstance(packed, SavedPlaceholder)}
        for index, packed in alive.items():
            self._add_packed(packed, held.get(index))
        for slot, packed in inside:
            self._add_foreign(packed, slot)
        sharing: dict[int, list[int]] = {}
        for index, one in enumerate(self.found):
            for number in one.storages:
                sharing.setdefault(number, []).append(index)
        kept = tuple((one.storages, one.call) for one in self.found)
        operators = [] if self.log.has_compiled else self.log.step.operators
        log = replace(self.log.step, operators=operators, kept=kept, is_compiled=self.log.has_compiled)
        return SavedReport(
            entries=tuple(self._entry(index, one, sharing) for index, one in enumerate(self.found)),
            storages={number: self._storage(number, saves) for number, saves in sharing.items()},
            copies=tuple(self._copies(sharing)),
            blocks=blocks_of(log),
            region_slots=self.region_slots,
            regions=len(self.regions),
            unknown=dict(self.unknown),
            requires_grad=requires_grad,
            is_compiled=log.is_compiled,
            log=log,
        )

    # -------------------------------------------------------------------------------------------------------- saves

    def _add_packed(self, packed: SavedPlaceholder, slot: GraphSlot | None) -> None:
        save = self.log.step.saves[packed.index]
        self.found.append(
            _FoundSave(
                storages=self.log.numbers.of(packed.tensor),
                metadata=self.log.metadata[packed.index],
                elements=packed.tensor.numel(),
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

    def _add_foreign(self, packed: object, slot: GraphSlot | None, words: str = "") -> None:
        """Add a tensor packed by a foreign hook or by none: saved before the step, or in another thread.

        Args:
            packed: The packed object.
            slot: Its place; None if it is in no node.
            words: A description, if no operator saved it.
        """
        if isinstance(packed, SavedPlaceholder):
            return
        if isinstance(packed, Slot):
            self._add_region(packed.region)
            if packed.value is None:
                self.region_slots += 1
                return
            packed = packed.value
        found = list(behind(packed))
        if not found:
            self.unknown[type(packed).__name__] += 1
        for one in found:
            if isinstance(one, InStore):
                number = self.stores.setdefault(id(one.claim), -1 - len(self.stores))
                self.stored[number] = one.stored_bytes
                self.kinds[number] = "stored"
                self._place(slot, words, (number,), one.metadata, one.metadata[0].numel())
            else:
                storages, metadata = self.log.numbers.of(one), metadata_of(one)
                self._place(slot, words, storages, metadata, one.numel(), version_of(one))

    def _add_region(self, recording: Recording) -> None:
        if id(recording) in self.regions:
            return
        self.regions.add(id(recording))
        for held in recording.held:
            kept = held.kept if held.is_hooked else held.alias()
            if kept is not None and not isinstance(kept, nn.Parameter):
                self._add_foreign(kept, None, _INPUT)
        for frozen in [tensor for call in recording.calls for tensor in call.frozen]:
            self._add_foreign(frozen, None, _INPUT)
        for one in kept_by(recording):
            self._add_foreign(one, None, _CHOSEN)

    def _place(
        self,
        slot: GraphSlot | None,
        words: str,
        storages: tuple[int, ...],
        metadata: Metadata,
        elements: int,
        version: int = -1,
    ) -> None:
        found = _FoundSave(storages, metadata, elements, slot, custom=words, version=version, version_now=version)
        # Without a hook it was saved before the step or in another thread, which has its own numbers.
        is_known = slot is not None and slot.raw.unpack_hook is not None
        ran = self.log.by_node.get(slot.sequence) if slot is not None and is_known else None
        if ran is not None:
            found.operator, found.call = ran.operator, ran.call
            found.module, found.source = ran.operator.module, str(ran.operator.source)
        self.found.append(found)

    # ------------------------------------------------------------------------------------------------------- entries

    def _entry(self, index: int, one: _FoundSave, sharing: Mapping[int, list[int]]) -> Saved:
        shape, dtype, device, strides = one.metadata
        others = sorted({other for number in one.storages for other in sharing[number]} - {index})
        kinds: list[Kind] = [self._kind(number) for number in one.storages]
        kind: Kind = "saved" if not kinds or "saved" in kinds else kinds[0]
        return Saved(
            storages=one.storages,
            storage_bytes=sum(self._size(number) for number in one.storages),
            tensor_bytes=one.elements * dtype.itemsize,
            kind=kind,
            node=one.node.node.name() if one.node else "",
            slot=one.node.name if one.node else "",
            operator=one.custom or (one.operator.name if one.operator else ""),
            function=one.operator.function if one.operator and not one.custom else "",
            module=one.module,
            source=one.source,
            shape=numbers_of(shape),
            dtype=str(dtype).removeprefix("torch."),
            need=need_of(one.node.node.name(), one.node.name, dtype) if one.node else None,
            strides=numbers_of(strides) if isinstance(strides, tuple) else (),
            device=str(device),
            is_first=not one.storages or any(sharing[number][0] == index for number in one.storages),
            others=tuple(others),
        )

    def _storage(self, number: int, saves: list[int]) -> KeptStorage:
        device = str(self.log.numbers.devices[number]) if number >= 0 else ""
        return KeptStorage(
            number=number, size=self._size(number), kind=self._kind(number), device=device, saves=tuple(saves)
        )

    def _kind(self, number: int) -> Kind:
        return self.kinds.get(number, "saved")

    def _size(self, number: int) -> int:
        return self.log.numbers.sizes[number] if number >= 0 else self.stored[number]

    # -------------------------------------------------------------------------------------------------------- copies

    def _copies(self, sharing: Mapping[int, list[int]]) -> Iterator[DerivedStorage]:
        for number in sharing:
            copied = self.log.copied.get(number)
            if copied is None or self._kind(number) != "saved" or not self._is_at(number, copied.version, sharing):
                continue
            source = copied
            # The source may itself be an unkept copy of a tensor that is kept.
            while not self._is_at(source.source, source.source_version, sharing):
                further = self.log.copied.get(source.source)
                if further is None or further.version != source.source_version:
                    break
                source = further
            else:
                yield DerivedStorage(
                    storage=number,
                    source=source.source,
                    source_kind=self._kind(source.source),
                    operator=copied.operator.name,
                    where=str(copied.operator.source),
                    freed_bytes=self._size(number),
                )

    def _is_at(self, number: int, version: int, sharing: Mapping[int, list[int]]) -> bool:
        """Return whether a storage is kept and unchanged since a version."""
        before = self.log.before.get(number)
        if before is not None:
            return version_of(before.tensor) == version
        return number in sharing and all(
            self.found[save].version == version == self.found[save].version_now for save in sharing[number]
        )
