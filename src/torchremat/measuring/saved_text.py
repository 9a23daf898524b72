"""A report of saved tensors as tables, and as text."""

from __future__ import annotations

from collections.abc import Mapping

from torchremat.measuring.measured_page import OUTSIDE
from torchremat.measuring.saved_data import Kind, SavedData
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Table, TableCell, TableRow, size_cell

_WIDEST = 44  # width of a cell; the end of a path says more than its beginning


def described(report: SavedData, top: int) -> str:
    """Return a report as text, with the `top` largest of each kind of row."""
    if not report.requires_grad:
        return "The loss does not require grad: autograd keeps nothing for it."
    # Of policies all are shown, as they are few and their order matters.
    tables = [_shown(one, len(one.rows) if one.title == "Policies" else top) for one in tables_of(report)]
    return "\n\n".join(["\n".join(_summary(report)), *tables])


def summary_rows(report: SavedData) -> list[tuple[str, str, str]]:
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


def _summary(report: SavedData) -> list[str]:
    lines = [f"{name:<18}{size:>12}  {note}".rstrip() for name, size, note in summary_rows(report)]
    if report.is_compiled:
        lines.append("Compiled code ran; what it saves is one node for each graph.")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tables_of(report: SavedData) -> list[Table]:
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


def _storages(report: SavedData) -> Table:
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


def _copies(report: SavedData) -> Table:
    rows: list[TableRow] = []
    for one in sorted(report.copies, key=lambda one: -one.freed_bytes):
        kept = report.storages.get(one.source)
        source = report.entries[kept.saves[0]].place if kept is not None and one.source_kind == "saved" else ""
        copy = report.entries[report.storages[one.storage].saves[0]]
        told = copy.place, source or f"a {one.source_kind}", one.operator, one.where
        rows.append(TableRow(cells=(size_cell(one.freed_bytes), *map(TableCell, told))))
    return Table(title="Copies", columns=("bytes", "copy", "of", "made by", "at"), rows=tuple(rows))


def _blocks(report: SavedData) -> Table:
    found = [(name, report.freed_by(blocks=[name])) for name in report.blocks]
    if len(found) > 1:
        found.insert(0, (f"all {len(found)} of these", report.freed_by()))
    return Table(
        title="Blocks as regions",
        columns=("frees", "keeps", "as a region"),
        rows=tuple(_row_of(name, one.freed_bytes, one.input_bytes) for name, one in found),
        note="What a recompute of the block would free, and what the region would hold for it.",
    )


def _policies(report: SavedData) -> Table:
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
