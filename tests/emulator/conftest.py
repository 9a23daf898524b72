"""Tests of the emulated device are marked `gpu`, and run on it: `make emulated`. Those of its building run anywhere.

Two of these need the library, and run where it is built already.
"""

from pathlib import Path

import pytest

import emulator

collect_ignore = ["plugin.py"]  # it installs the device as soon as it is imported

HERE = Path(__file__).parent
ANYWHERE = "test_building.py"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and item.path.name != ANYWHERE:
            item.add_marker("gpu")
            if not emulator.is_installed():
                item.add_marker(pytest.mark.skip(reason="runs on the emulated device: make emulated"))


@pytest.fixture
def configured():
    """Call it as `emulator.configure`; what it changes is put back after the test."""
    before = emulator.configure()
    yield emulator.configure
    emulator.configure(**before)
