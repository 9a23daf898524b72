"""A page: facts on top, charts, and tables whose rows are linked to the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the summary: what it is, the number, and a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class TableCell:
    """What a cell shows, and what it is sorted by; text is sorted by itself, and has no `order`."""

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
        title: Its heading.
        columns: Their headings.
        rows: As long as `columns` each.
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
        title: Its heading.
        figure: `data` and `layout`. Text like "@forward" stands for a colour of the page's palette.
        spans: Where in it each row of the tables is, as pairs of x.
        note: A sentence below the heading.
        height: In pixels.
    """

    title: str
    figure: Mapping[str, object]
    spans: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict[str, Sequence[tuple[float, float]]])
    note: str = ""
    height: int = 460


@dataclass(frozen=True, kw_only=True)
class Page:
    """What there is to see of one thing.

    Attributes:
        title: What it is.
        facts: The summary.
        charts: The charts.
        tables: The tables.
    """

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
