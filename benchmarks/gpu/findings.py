"""What a section has found: written after each finding, so that a section that is stopped keeps what it has."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

Finding = Callable[[], object]

# On the emulated device everything is small: there it is seen whether a section runs, and nothing else.
IS_SMALL = "emulator" in sys.modules


class Findings:
    """Runs the findings of a section one by one, and keeps what each returns or raises."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, object] = {}

    def find(self, name: str, finding: Finding) -> None:
        """Run one; an error of its is what it has found, and the others go on."""
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        try:
            found = finding()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  an error is a finding
            found = {"error": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-1200:]}
        self._found[name] = {"found": found, "seconds": round(time.perf_counter() - start_s, 2)}
        self._path.write_text(json.dumps(self._found, indent=2, default=str) + "\n")


def section(**findings: Finding) -> None:
    """Run the findings of a section, by name, into the file that the command line names."""
    found = Findings(Path(sys.argv[1]))
    for name, finding in findings.items():
        found.find(name, finding)
