"""Saved tensors as a page: a tree of the modules that save them, and the tables of the report."""

from __future__ import annotations

from collections.abc import Mapping

from torchremat.measuring.measured_page import OUTSIDE
from torchremat.measuring.saved_data import SavedData
from torchremat.measuring.saved_text import storage_rows, summary_rows
from torchremat.tensors.sizes import format_bytes
from torchremat.views.charts import tree_chart
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, size_cell


def page_of(report: SavedData) -> Page:
    """Return the page of a report."""
    title = f"What autograd keeps: {format_bytes(report.saved_bytes)}"
    if not report.requires_grad:
        return Page(title=title, facts=(Fact(name="saved", value="nothing", note="the loss does not require grad"),))
    modules = report.by_module()
    named = {name: size for name, size in modules.items() if size}
    tables = (
        _totals("Modules", "module", modules, report.saved_bytes),
        _storages(report),
        _totals("Operators", "node", report.by_operator(), report.saved_bytes),
        _blocks(report),
    )
    chart = tree_chart(
        named, root="the model", title="By module", note="A box is a module, as large as what is saved in it."
    )
    return Page(
        title=title,
        facts=tuple(Fact(name=name.strip(), value=value, note=note) for name, value, note in summary_rows(report)),
        charts=(chart,) if named else (),
        tables=tuple(one for one in tables if one.rows),
    )


def _totals(title: str, name: str, totals: Mapping[str, int], whole: int) -> Table:
    rows = tuple(
        TableRow(
            cells=(TableCell(key or OUTSIDE), size_cell(size), TableCell(f"{100 * size / whole:.1f}%", size)),
            key=key if name == "module" else "",
            share=size / whole,
        )
        for key, size in totals.items()
        if size and whole
    )
    return Table(title=title, columns=(name, "saved", "share"), rows=rows)


def _storages(report: SavedData) -> Table:
    rows = tuple(
        TableRow(
            cells=(
                TableCell(first.place + (f" +{len(one.saves) - 1}" if len(one.saves) > 1 else "")),
                TableCell(format_bytes(one.size) + (" stored" if one.kind == "stored" else ""), one.size),
                TableCell(first.operator),
                TableCell(first.module),
                TableCell(first.source),
                TableCell(f"{first.dtype}{list(first.shape)}"),
            ),
            key=first.module,
        )
        for one, first in storage_rows(report)
    )
    return Table(
        title="Tensors",
        columns=("saved for", "bytes", "operator", "module", "at", "tensor"),
        rows=rows,
        note="Each storage once, with the first save of it; +1 means that another save shares it.",
    )


def _blocks(report: SavedData) -> Table:
    rows: list[TableRow] = []
    for name in () if report.is_compiled else report.blocks:
        one = report.freed_by(blocks=[name])
        rows.append(TableRow(cells=(TableCell(name), size_cell(one.freed_bytes), size_cell(one.input_bytes))))
    return Table(
        title="Blocks as regions",
        columns=("as a region", "frees", "keeps"),
        rows=tuple(rows),
        note="What a recompute of the block would free, and what the region would hold for it.",
    )
