"""Saved tensors as a page: a tree of the modules that save them, and the tables of the report."""

from __future__ import annotations

from torchremat.measuring.saved_data import SavedData
from torchremat.measuring.saved_text import summary_rows, tables_of
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Fact, Page
from torchremat.views.tree_chart import tree_chart


def page_of(report: SavedData) -> Page:
    """Return the page of a report."""
    title = f"What autograd keeps: {format_bytes(report.saved_bytes)}"
    if not report.requires_grad:
        return Page(title=title, facts=(Fact(name="saved", value="nothing", note="the loss does not require grad"),))
    named = {name: size for name, size in report.by_module().items() if size}
    chart = tree_chart(
        named, root="the model", title="By module", note="A box is a module, as large as what is saved in it."
    )
    return Page(
        title=title,
        facts=tuple(Fact(name=name.strip(), value=value, note=note) for name, value, note in summary_rows(report)),
        charts=(chart,) if named else (),
        tables=tuple(tables_of(report)),
    )
