"""The methods of objects with views outside of Python: a page, and for steps over time a trace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torchremat.views.html import fragment, write_page
from torchremat.views.page import Page
from torchremat.views.steps import Step
from torchremat.views.trace import write_trace


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
