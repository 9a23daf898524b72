"""The tests that are marked `gpu`."""

from __future__ import annotations

import sys
from pathlib import Path

import suite


def main() -> None:
    marked = [
        str(path.relative_to(suite.ROOT))
        for path in sorted(suite.ROOT.glob("tests/**/test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    suite.run(Path(sys.argv[1]), "-m", "gpu", *marked, seconds=170, processes=8)


if __name__ == "__main__":
    main()
