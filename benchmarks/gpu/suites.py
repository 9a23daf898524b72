"""Suites of regions, policies and state, with the device as torch's default one."""

from __future__ import annotations

import sys
from pathlib import Path

import suite

SUITES = (
    "tests/policies",
    "tests/test_ambient.py",
    "tests/regions/test_world_hooks.py",
    "tests/regions/test_state_fuzz.py",
    "tests/regions/test_engine.py",
    "tests/regions/test_runtime.py",
    "tests/regions/test_threads.py",
    "tests/regions/test_diagnosis.py",
)


def main() -> None:
    suite.run(Path(sys.argv[1]), *SUITES, seconds=150, processes=14, TORCHREMAT_DEFAULT_DEVICE="cuda")


if __name__ == "__main__":
    main()
