"""A report of saved tensors as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchremat.measuring.saved_data import KeptStorage, Kind, Saved, SavedData
from torchremat.tensors.sizes import format_bytes

_WIDEST = 44  # width of a cell; the end of a path says more than its beginning


def described(report: SavedData, top: int) -> str:
    """Return a report as text, with the `top` largest of each kind of row."""
    if not report.requires_grad:
        return "The loss does not require grad: autograd keeps nothing for it."
    parts = ["\n".join(_summary(report)), *_tables(report, top)]
    return "\n\n".join(parts)


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


def _tables(report: SavedData, top: int) -> list[str]:
    found = [_table(["bytes", "saved for", "operator", "module", "at", "tensor"], _storage_rows(report), top)]
    for name, totals in (
        ("node", report.by_operator()),
        ("module", report.by_module()),
        ("line", report.by_line()),
        ("dtype", report.by_dtype()),
    ):
        found.append(_table(["bytes", "share", name], _total_rows(totals, report.saved_bytes, name), top))
    if report.copies:
        found.append(_table(["bytes", "copy", "of", "made by", "at"], _copy_rows(report), top))
    if report.blocks:
        found.append(_table(["frees", "keeps", "as a region"], _block_rows(report), top))
        # All of them, as they are few and their order matters.
        found.append(_table(["frees", "still kept", "these as regions with the policy"], _policy_rows(report), 99))
    return [one for one in found if one]


def storage_rows(report: SavedData) -> list[tuple[KeptStorage, Saved]]:
    """Return each storage that only autograd keeps alive, with its first save, the largest first."""
    found = sorted(report.storages.values(), key=lambda one: -one.size)
    return [(one, report.entries[one.saves[0]]) for one in found if one.kind in ("saved", "stored")]


def _storage_rows(report: SavedData) -> list[list[str]]:
    rows: list[list[str]] = []
    for one, first in storage_rows(report):
        more = f" +{len(one.saves) - 1}" if len(one.saves) > 1 else ""
        function = f" of F.{first.function}" if first.function else ""
        rows.append(
            [
                format_bytes(one.size) + (" stored" if one.kind == "stored" else ""),
                first.place + more,
                first.operator + function,
                first.module,
                first.source,
                f"{first.dtype}{list(first.shape)}",
            ]
        )
    return rows


def _total_rows(totals: Mapping[str, int], whole: int, of: str) -> list[list[str]]:
    nameless = {"module": "(outside of all)", "line": "(not in code of yours)"}
    return [
        [format_bytes(size), f"{size / whole:.0%}", name or nameless.get(of, "")]
        for name, size in totals.items()
        if size and whole
    ]


def _copy_rows(report: SavedData) -> list[list[str]]:
    rows: list[list[str]] = []
    for one in sorted(report.copies, key=lambda one: -one.freed_bytes):
        kept = report.storages.get(one.source)
        source = report.entries[kept.saves[0]].place if kept is not None and one.source_kind == "saved" else ""
        copy = report.entries[report.storages[one.storage].saves[0]]
        rows.append(
            [format_bytes(one.freed_bytes), copy.place, source or f"a {one.source_kind}", one.operator, one.where]
        )
    return rows


def _block_rows(report: SavedData) -> list[list[str]]:
    """Return a row for each block: the bytes that it frees as a region, and the bytes that the region keeps."""
    rows: list[list[str]] = []
    for name in report.blocks:
        one = report.freed_by(blocks=[name])
        rows.append([format_bytes(one.freed_bytes), format_bytes(one.input_bytes), name])
    if len(report.blocks) > 1:
        every = report.freed_by()
        rows.insert(0, [format_bytes(every.freed_bytes), format_bytes(every.input_bytes), f"all {len(rows)} of these"])
    return rows


def _policy_rows(report: SavedData) -> list[list[str]]:
    """Return a row for each policy of the library: the bytes that it frees in the blocks, and that these keep."""
    return [
        [format_bytes(one.freed_bytes), format_bytes(one.kept_bytes), name]
        for name, one in report.freed_by_policies().items()
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], top: int) -> str:
    if not rows:
        return ""
    shown = [list(map(_cut, row)) for row in rows[:top]]
    widths = [max(len(row[i]) for row in [headings, *shown]) for i in range(len(headings))]
    lines: list[str] = []
    for size, *rest in [headings, *shown]:
        cells = [size.rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    if len(rows) > top:
        lines.append(f"... {len(rows) - top} more")
    return "\n".join(lines)


def _cut(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else "..." + cell[3 - _WIDEST :]
