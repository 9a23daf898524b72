"""The report on the tensors that autograd keeps at the end of a forward: totals, what could be freed, text, page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchremat.json_data import data_of, fields_of, text_of
from torchremat.measuring.freeing import Freed, freed
from torchremat.measuring.measurement import OUTSIDE
from torchremat.measuring.saved_data import DerivedStorage, KeptStorage, Kind, Need, Saved
from torchremat.measuring.saving import StepLog
from torchremat.policies import (
    everything_saved,
    nothing_saved,
    save_attention,
    save_convolutions,
    save_matmuls,
    save_unbatched_matmuls,
)
from torchremat.tensors.sizes import format_bytes
from torchremat.views.charts import tree_chart
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, size_cell
from torchremat.views.viewed import Viewed

# Policies that need no argument.
_POLICIES = (
    nothing_saved,
    save_attention,
    save_convolutions,
    save_unbatched_matmuls,
    save_matmuls,
    everything_saved,
)

_WIDEST = 44  # width of a cell; the end of a path says more than its beginning


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedReport(Viewed):
    """The tensors of a step that autograd keeps at the end of its forward.

    Attributes:
        entries: The saves, in order; saves that were found only in the graph come last.
        storages: The storages that they keep, by number.
        copies: Storages of the step that repeat others.
        blocks: The names of the blocks: the modules that the model calls one after the other.
        region_slots: Saved tensors that are recomputed, and take no bytes.
        regions: The regions of these saved tensors.
        unknown: Saved tensors that foreign hooks packed in an unknown form, by the type of the packed object.
        requires_grad: Whether the loss requires grad; otherwise nothing is kept for it.
        is_compiled: Whether compiled code ran. It saves in one node, and its operators are not known.
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
        for index, one in enumerate(self.entries):
            if one.kind == "saved":
                storages = (self.storages[number] for number in one.storages)
                own = sum(each.size for each in storages if each.kind == "saved" and each.saves[0] == index)
                found[key(one)] = found.get(key(one), 0) + own
        return dict(sorted(found.items(), key=lambda item: -item[1]))

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

    # ------------------------------------------------------------------------------------------------------ as views

    def as_dict(self) -> dict[str, object]:
        """Return the whole report as JSON types: lists, dicts, strings and numbers."""
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
            "entries": data_of(self.entries),
            "storages": data_of([*self.storages.values()]),
            "copies": data_of(self.copies),
            "blocks": [{"name": name, **fields_of(self.freed_by(blocks=[name]))} for name in self.blocks],
            "policies": [{"policy": name, **fields_of(one)} for name, one in self.freed_by_policies().items()],
        }

    def save(self, path: str | Path) -> None:
        """Write `as_dict()` into a file, as JSON."""
        Path(path).write_text(text_of(self.as_dict()))

    def text(self, top: int = 10) -> str:
        """Return the report with the `top` largest storages, modules and operators; `print(report)` shows 10."""
        if not self.requires_grad:
            return "The loss does not require grad: autograd keeps nothing for it."
        # Of policies all are shown, as they are few and their order matters.
        tables = [_shown(one, len(one.rows) if one.title == "Policies" else top) for one in _tables_of(self)]
        return "\n\n".join(["\n".join(_summary(self)), *tables])

    def _page(self) -> Page:
        title = f"What autograd keeps: {format_bytes(self.saved_bytes)}"
        if not self.requires_grad:
            return Page(
                title=title, facts=(Fact(name="saved", value="nothing", note="the loss does not require grad"),)
            )
        named = {name: size for name, size in self.by_module().items() if size}
        chart = tree_chart(
            named, root="the model", title="By module", note="A box is a module, as large as what is saved in it."
        )
        return Page(
            title=title,
            facts=tuple(Fact(name=name.strip(), value=value, note=note) for name, value, note in _summary_rows(self)),
            charts=(chart,) if named else (),
            tables=tuple(_tables_of(self)),
        )

    def __repr__(self) -> str:
        storages = sum(one.kind == "saved" for one in self.storages.values())
        return f"<SavedReport: {format_bytes(self.saved_bytes)} in {storages} storages>"

    def __str__(self) -> str:
        return self.text()


def _summary_rows(report: SavedReport) -> list[tuple[str, str, str]]:
    """Return the totals of a report: the name of each, the bytes, and a note."""
    saved = [one for one in report.entries if one.kind == "saved"]
    count = sum(one.kind == "saved" for one in report.storages.values())
    rows = [
        (
            "saved",
            format_bytes(report.saved_bytes),
            f"in {_counted(count, 'storage')}, by {_counted(len(saved), 'save')}",
        )
    ]
    if report.bytes_by_save > report.saved_bytes:
        ratio = f", {report.bytes_by_save / report.saved_bytes:.2f} x" if report.saved_bytes else ""
        rows.append(("  each save alone", format_bytes(report.bytes_by_save), f"aliases counted again{ratio}"))
    before: tuple[Kind, ...] = ("parameter", "buffer", "input")
    for kind in before:
        if any(one.kind == kind for one in report.storages.values()):
            rows.append((f"{kind}s", format_bytes(report.bytes_of(kind)), "saved too, but live anyway"))
    if any(one.kind == "stored" for one in report.storages.values()):
        rows.append(("stored", format_bytes(report.stored_bytes), "taken by a store"))
    if report.region_slots:
        slots = f"{_counted(report.region_slots, 'slot')} of {_counted(report.regions, 'region')} to recompute"
        rows.append(("regions", format_bytes(0), f"{slots}; their inputs count above"))
    if report.unknown:
        kinds = ", ".join(f"{count} {name}" for name, count in report.unknown.items())
        rows.append(("other hooks", "?", f"what they hold is not known: {kinds}"))
    if report.copies:
        freed = sum(one.freed_bytes for one in report.copies)
        rows.append(
            ("copies", format_bytes(freed), f"{_counted(len(report.copies), 'storage')} made by copying another")
        )
    needs = report.by_need()
    if "shape" in needs:
        rows.append(("shape alone", format_bytes(needs["shape"]), "only the shape is needed"))
    if "mask" in needs:
        rows.append(("bits", format_bytes(needs["mask"]), "one bit for each element would do"))
    return rows


def _summary(report: SavedReport) -> list[str]:
    lines = [f"{name:<18}{size:>12}  {note}".rstrip() for name, size, note in _summary_rows(report)]
    if report.is_compiled:
        lines.append("Compiled code ran; what it saves is one node for each graph.")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _tables_of(report: SavedReport) -> list[Table]:
    """Return the tables of a report, each with the rows of most bytes first; without empty ones."""
    found = [
        _storages(report),
        _totals("Operators", "node", report.by_operator(), report.saved_bytes),
        _totals("Modules", "module", report.by_module(), report.saved_bytes),
        _totals("Lines", "line", report.by_line(), report.saved_bytes),
        _totals("Dtypes", "dtype", report.by_dtype(), report.saved_bytes),
        _copies(report),
        _blocks(report),
        _policies(report),
    ]
    return [one for one in found if one.rows]


def _storages(report: SavedReport) -> Table:
    rows: list[TableRow] = []
    for one in sorted(report.storages.values(), key=lambda one: -one.size):
        if one.kind not in ("saved", "stored"):
            continue
        first = report.entries[one.saves[0]]
        told = (
            first.place + (f" +{len(one.saves) - 1}" if len(one.saves) > 1 else ""),
            first.operator + (f" of F.{first.function}" if first.function else ""),
            first.module,
            first.source,
            f"{first.dtype}{list(first.shape)}",
        )
        size = TableCell(format_bytes(one.size) + (" stored" if one.kind == "stored" else ""), one.size)
        rows.append(TableRow(cells=(size, *map(TableCell, told)), key=first.module))
    return Table(
        title="Tensors",
        columns=("bytes", "saved for", "operator", "module", "at", "tensor"),
        rows=tuple(rows),
        note="Each storage once, with the first save of it; +1 means that another save shares it.",
    )


def _totals(title: str, of: str, totals: Mapping[str, int], whole: int) -> Table:
    nameless = {"module": OUTSIDE, "line": "(not in code of yours)"}
    rows = tuple(
        TableRow(
            cells=(size_cell(size), TableCell(f"{size / whole:.0%}", size), TableCell(name or nameless.get(of, ""))),
            key=name if of == "module" else "",
            share=size / whole,
        )
        for name, size in totals.items()
        if size and whole
    )
    return Table(title=title, columns=("bytes", "share", of), rows=rows)


def _copies(report: SavedReport) -> Table:
    rows: list[TableRow] = []
    for one in sorted(report.copies, key=lambda one: -one.freed_bytes):
        kept = report.storages.get(one.source)
        source = report.entries[kept.saves[0]].place if kept is not None and one.source_kind == "saved" else ""
        copy = report.entries[report.storages[one.storage].saves[0]]
        told = copy.place, source or f"a {one.source_kind}", one.operator, one.where
        rows.append(TableRow(cells=(size_cell(one.freed_bytes), *map(TableCell, told))))
    return Table(title="Copies", columns=("bytes", "copy", "of", "made by", "at"), rows=tuple(rows))


def _blocks(report: SavedReport) -> Table:
    found = [(name, report.freed_by(blocks=[name])) for name in report.blocks]
    if len(found) > 1:
        found.insert(0, (f"all {len(found)} of these", report.freed_by()))
    return Table(
        title="Blocks as regions",
        columns=("frees", "keeps", "as a region"),
        rows=tuple(_row_of(name, one.freed_bytes, one.input_bytes) for name, one in found),
        note="What a recompute of the block would free, and what the region would hold for it.",
    )


def _policies(report: SavedReport) -> Table:
    found = report.freed_by_policies().items()
    return Table(
        title="Policies",
        columns=("frees", "still kept", "these as regions with the policy"),
        rows=tuple(_row_of(name, one.freed_bytes, one.kept_bytes) for name, one in found),
    )


def _row_of(name: str, freed_bytes: int, kept_bytes: int) -> TableRow:
    return TableRow(cells=(size_cell(freed_bytes), size_cell(kept_bytes), TableCell(name)))


def _shown(table: Table, top: int) -> str:
    shown = [[_cut(cell.text) for cell in row.cells] for row in table.rows[:top]]
    widths = [max(len(row[i]) for row in (table.columns, *shown)) for i in range(len(table.columns))]
    lines: list[str] = []
    for size, *rest in (table.columns, *shown):
        cells = [size.rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    if len(table.rows) > top:
        lines.append(f"... {len(table.rows) - top} more")
    return "\n".join(lines)


def _cut(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else "..." + cell[3 - _WIDEST :]
