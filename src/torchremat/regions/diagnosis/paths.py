"""The paths of the modules whose calls are running, read from the Python stack."""

from __future__ import annotations

from collections.abc import Iterator

from torchremat.frames import running_modules
from torchremat.regions.calls import Call
from torchremat.regions.diagnosis.captures import Reach


class ModulePaths:
    """The modules that a call reaches, by path; they are searched for on the first query.

    Args:
        call: The call.
        label: The words for its region, which the paths of a wrapped module's parts begin with.
    """

    def __init__(self, call: Call, label: object) -> None:
        self._call = call
        self._label = label
        self._names: dict[int, str] | None = None

    def known(self) -> list[str]:
        """Return all paths."""
        return list(self._found().values())

    def running(self) -> str:
        """Return the path of the innermost module that is running, "" if none is."""
        return next(self._running(), "")

    def all_running(self) -> list[str]:
        """Return the paths of the modules that are running, innermost first."""
        return list(self._running())

    def _running(self) -> Iterator[str]:
        names = self._found()
        for module in running_modules():
            path = names.get(id(module))
            if path is not None:
                yield path

    def _found(self) -> dict[int, str]:
        if self._names is None:
            self._names = Reach([self._call], self._label).names
        return self._names
