"""Objects with views outside of Python: as a page, and for steps over time as a trace for Perfetto.

Each step is a process; each row of its slices a thread; the live bytes are a counter, and the peak is an instant.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchremat.views.html import fragment, write_page
from torchremat.views.page import Page
from torchremat.views.steps import Step

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
