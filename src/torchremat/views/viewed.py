"""Objects with views outside of Python: as a page, and for steps over time as a trace for Perfetto.

A page is one file that works without a network, or a table of a notebook. In a trace each step is a process; each row
of its slices a thread; the live bytes are a counter, and the peak is an instant.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from torchremat.errors import UnsupportedError
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow
from torchremat.views.steps import Step

_MOST_ROWS = 40  # in a notebook
_LONGEST_VALUE = 32  # a longer value is a sentence, not a number


def write_page(page: Page, path: str | Path) -> None:
    """Write a page into one self-contained file: a browser opens it without network requests.

    Raises:
        UnsupportedError: plotly is not installed.
        OSError: The file cannot be written.
    """
    library = _library()
    charts = [
        {"figure": chart.figure, "spans": {key: [*spans] for key, spans in chart.spans.items()}, "height": chart.height}
        for chart in page.charts
    ]
    parts = {
        "title": escape(page.title),
        "style": _resource("page.css"),
        "facts": f"<dl>{''.join(map(_fact, page.facts))}</dl>",
        "charts": "\n".join(
            f'<section class="chart"><h2>{escape(one.title)}</h2>{_note(one.note)}'
            f'<div class="figure" data-chart="{place}" style="height:{one.height}px"></div></section>'
            for place, one in enumerate(page.charts)
        ),
        "tables": "\n".join(map(_table, page.tables)),
        # "</" would end the script, and "<!--" would hide the rest.
        "data": json.dumps(charts, allow_nan=False).replace("<", "\\u003c"),
        "library": library(),
        "script": _resource("page.js"),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _resource("page.html"))
    Path(path).write_text(text, encoding="utf-8")


def check_pages() -> None:
    """Raise an UnsupportedError if no page could be written, before any content exists."""
    _library()


def _library() -> Callable[[], str]:
    """Return the function that returns the code of plotly.js."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError(
            "a page needs plotly, which is not installed. Install it with: pip install 'torchremat[html]'"
        ) from error
    return get_plotlyjs


def fragment(page: Page) -> str:
    """Return the facts and the first table of a page for a notebook, without scripts, in the notebook's own style."""
    facts = "".join(map(_plain_fact, page.facts))
    pieces = [f"<p><strong>{escape(page.title)}</strong></p>", f"<table>{facts}</table>"]
    if page.tables:
        pieces.append(_plain_table(page.tables[0]))
    return "".join(pieces)


def _resource(name: str) -> str:
    return files("torchremat.views").joinpath(name).read_text(encoding="utf-8")


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""


def _fact(one: Fact) -> str:
    is_sentence = len(one.value) > _LONGEST_VALUE
    value = f"<span>{escape(one.value)}</span>" if is_sentence else f"<b>{escape(one.value)}</b>"
    return f"<div><dt>{escape(one.name)}</dt><dd>{value}<span>{escape(one.note)}</span></dd></div>"


def _table(table: Table) -> str:
    numbers = _numbers(table)
    heads = "".join(
        f'<th scope="col"{" class=number" if is_number else ""}><button type="button">{escape(name)}</button></th>'
        for name, is_number in zip(table.columns, numbers, strict=True)
    )
    rows = "\n".join(
        f'<tr data-key="{escape(row.key)}">'
        + "".join(map(_cell, row.cells, numbers, [row.share, *[None] * (len(numbers) - 1)]))
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<section class="table"><h2>{escape(table.title)}</h2>{_note(table.note)}<div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div></section>"
    )


def _cell(cell: TableCell, is_number: bool, share: float | None) -> str:
    kind = ' class="number"' if is_number else ""
    order = "" if cell.order is None else f' data-order="{cell.order!r}"'
    bar = "" if share is None else f'<i class="bar" style="width:{100 * share:.1f}%"></i>'
    return f"<td{kind}{order}>{bar}<span>{escape(cell.text)}</span></td>"


def _numbers(table: Table) -> list[bool]:
    """Return for each column whether it has numbers."""
    return [any(row.cells[place].order is not None for row in table.rows) for place in range(len(table.columns))]


def _plain_fact(one: Fact) -> str:
    value, note = (one.value, one.note) if len(one.value) <= _LONGEST_VALUE else ("", f"{one.value} {one.note}".strip())
    return (
        f'<tr><td style="text-align:left">{escape(one.name)}</td><td style="text-align:right">{escape(value)}</td>'
        f'<td style="text-align:left">{escape(note)}</td></tr>'
    )


def _plain_table(table: Table) -> str:
    sides = ["right" if is_number else "left" for is_number in _numbers(table)]
    heads = "".join(
        f'<th style="text-align:{side}">{escape(name)}</th>' for name, side in zip(table.columns, sides, strict=True)
    )
    rows = "".join(_plain_row(row, sides) for row in table.rows[:_MOST_ROWS])
    more = f"<p>... {len(table.rows) - _MOST_ROWS} more</p>" if len(table.rows) > _MOST_ROWS else ""
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _plain_row(row: TableRow, sides: Sequence[str]) -> str:
    cells = "".join(
        f'<td style="text-align:{side}">{escape(cell.text)}</td>' for cell, side in zip(row.cells, sides, strict=True)
    )
    return f"<tr>{cells}</tr>"


_Event = dict[str, object]


def write_trace(steps: Sequence[Step], path: str | Path) -> None:
    """Write steps into a trace file; one whose name ends in `.gz` is compressed.

    Raises:
        OSError: The file cannot be written.
    """
    events = [event for number, step in enumerate(steps, 1) for event in _events(step, number)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
    file = Path(path)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())


def _events(step: Step, process: int) -> Iterator[_Event]:
    yield _name_event("process_name", step.name, process)
    rows = {row: thread for thread, row in enumerate(dict.fromkeys(one.row for one in step.slices), 1)}
    for row, thread in rows.items():
        yield _name_event("thread_name", row, process, thread)
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for one in step.slices:
        yield {
            "ph": "X",
            "pid": process,
            "tid": rows[one.row],
            "name": one.name,
            "cat": one.kind,
            "ts": 1e6 * one.starts_s,
            "dur": 1e6 * (one.ends_s - one.starts_s),
            "args": {"told": "\n".join(one.says)} if one.says else {},
        }
    for one in step.points:
        args: _Event = {"bytes": one.live_bytes}
        yield {"ph": "C", "pid": process, "name": "live bytes", "ts": 1e6 * one.seconds, "args": args}
    if (peak := step.peak) is not None:
        args = {"bytes": peak.live_bytes, "told": "\n".join(peak.says)}
        yield {"ph": "i", "s": "p", "pid": process, "tid": 0, "name": "peak", "ts": 1e6 * peak.seconds, "args": args}


def _name_event(kind: str, name: str, process: int, thread: int = 0) -> _Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


class Viewed:
    """An object with a page for a browser, which notebooks show as well."""

    @abstractmethod
    def _page(self) -> Page:
        """Return the page."""

    def html(self, path: str | Path) -> None:
        """Write this as a page for a browser, into one file that needs no network.

        Raises:
            UnsupportedError: plotly is not installed.
            OSError: The file cannot be written.
        """
        write_page(self._page(), path)

    def _repr_html_(self) -> str:
        return fragment(self._page())


class ViewedOverTime(Viewed):
    """An object with a page, and with steps that happen in time."""

    @abstractmethod
    def _steps(self) -> Sequence[Step]:
        """Return the steps."""

    def trace(self, path: str | Path) -> None:
        """Write this in the trace format that ui.perfetto.dev and chrome://tracing read.

        Args:
            path: Of the file, `.json` or `.json.gz`.

        Raises:
            OSError: The file cannot be written.
        """
        write_trace(self._steps(), path)
