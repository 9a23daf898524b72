"""The part of the machine's memory that this process may use.

The system's memory is not the only limit: a container, a job of a scheduler or a service has its own limit, its
control group's, and is killed above it. And used memory is not all unavailable: the file cache makes room.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMachine:
    """A machine.

    Attributes:
        root: The root of its file system.
    """

    root: Path = Path("/")

    def capacity_bytes(self) -> int | None:
        """Return the total bytes that the process can have; None if unknown."""
        known = [_paged_bytes("SC_PHYS_PAGES"), *(group.limit_bytes for group in self._groups())]
        return min((one for one in known if one is not None), default=None)

    def free_bytes(self) -> int | None:
        """Return the bytes that the process could have now, in addition to its own; None if unknown."""
        system = self._available_bytes()
        known = [_paged_bytes("SC_AVPHYS_PAGES") if system is None else system]
        known += [group.free_bytes for group in self._groups()]
        return min((one for one in known if one is not None), default=None)

    def _available_bytes(self) -> int | None:
        """Return the free bytes, with those that the file cache would release; None if not reported."""
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(self.root / "proc/meminfo"), re.MULTILINE)
        return None if found is None else 1024 * int(found[1])

    def _groups(self) -> Generator[_ControlGroup]:
        """Yield the control groups of the process that have a limit, its own and its ancestors."""
        for line in _text(self.root / "proc/self/cgroup").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if not controllers:
                base, names = self.root / "sys/fs/cgroup", _SECOND
            elif "memory" in controllers.split(","):
                base, names = self.root / "sys/fs/cgroup/memory", _FIRST
            else:
                continue
            # In a container the path may be the host's; only its last part exists there, as the base itself.
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if not folder.is_relative_to(base):
                    break
                limit_bytes = _number(folder / names.limit)
                if limit_bytes is not None:
                    yield _ControlGroup(folder, names, limit_bytes)


@dataclass(frozen=True, kw_only=True)
class _GroupNames:
    """The names of the files of a control group, and of the file cache's numbers in the last file."""

    limit: str
    used: str
    cached: tuple[str, ...]
    numbers: str = "memory.stat"


_SECOND = _GroupNames(limit="memory.max", used="memory.current", cached=("inactive_file", "active_file"))
_FIRST = _GroupNames(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    cached=("total_inactive_file", "total_active_file"),
)


@dataclass(frozen=True)
class _ControlGroup:
    """A control group with a limit; no limit is the word `max`, or in the first version a huge number."""

    folder: Path
    names: _GroupNames
    limit_bytes: int

    @property
    def free_bytes(self) -> int | None:
        """The bytes left below the limit; None if the group does not report its usage."""
        used_bytes = _number(self.folder / self.names.used)
        if used_bytes is None:
            return None
        numbers = dict(re.findall(r"^(\w+) (\d+)$", _text(self.folder / self.names.numbers), re.MULTILINE))
        cached_bytes = sum(int(numbers.get(name, 0)) for name in self.names.cached)
        return max(0, self.limit_bytes - max(0, used_bytes - cached_bytes))


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _paged_bytes(pages: str) -> int | None:
    if pages not in os.sysconf_names:
        return None
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
