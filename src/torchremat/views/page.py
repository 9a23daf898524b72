"""A page: facts on top, charts, and tables whose rows are linked to the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the summary: a label, a number, and a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class TableCell:
    """The text and the sort key of a cell; text is sorted by itself, and has no `order`."""

    text: str
    order: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Cells, and the key by which charts know the row; the share of its bar, if the table has bars."""

    cells: tuple[TableCell, ...]
    key: str = ""
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that can be sorted by each column.

    Attributes:
        rows: The rows, each as long as `columns`.
        note: A sentence below the heading.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of plotly.js, see `charts`.

    Attributes:
        figure: `data` and `layout`. Text like "@forward" stands for a colour of the page's palette.
        spans: The position of each table row in the figure, as pairs of x.
        note: A sentence below the heading.
    """

    title: str
    figure: Mapping[str, object]
    spans: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict[str, Sequence[tuple[float, float]]])
    note: str = ""
    height: int = 460


@dataclass(frozen=True, kw_only=True)
class Page:
    """The view of one object."""

    title: str
    facts: tuple[Fact, ...]
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


def size_cell(size: int) -> TableCell:
    """Return the cell of a size in bytes."""
    return TableCell(format_bytes(size), size)


def milliseconds_cell(seconds: float) -> TableCell:
    """Return the cell of a duration."""
    return TableCell(f"{1e3 * seconds:.2f} ms", seconds)
