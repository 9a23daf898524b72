"""The report on the tensors that autograd keeps at the end of a forward: as text, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchremat.measuring.saved_data import SavedData
from torchremat.measuring.saved_text import described, summary_rows, tables_of
from torchremat.tensors.sizes import format_bytes
from torchremat.views.charts import tree_chart
from torchremat.views.page import Fact, Page
from torchremat.views.viewed import Viewed


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedReport(SavedData, Viewed):
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
        return _page_of(self)

    def __repr__(self) -> str:
        storages = sum(one.kind == "saved" for one in self.storages.values())
        return f"<SavedReport: {format_bytes(self.saved_bytes)} in {storages} storages>"

    def __str__(self) -> str:
        return self.text()


def _listed(found: dict[str, object]) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _page_of(report: SavedData) -> Page:
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
