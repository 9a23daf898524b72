"""The tests of the emulated device run on it: in the process of test_building.py, or under the plugin."""

from pathlib import Path

import pytest

import emulator

collect_ignore = ["plugin.py"]  # it installs the device as soon as it is imported

HERE = Path(__file__).parent
ELSEWHERE = "test_building.py"


def pytest_collection_modifyitems(items):
    if emulator.is_installed():
        return
    skip = pytest.mark.skip(reason=f"runs on the emulated device, in a process of {ELSEWHERE}")
    for item in items:
        if item.path.parent == HERE and item.path.name != ELSEWHERE:
            item.add_marker(skip)


@pytest.fixture
def configured():
    """Call it as `emulator.configure`; what it changes is put back after the test."""
    before = emulator.configure()
    yield emulator.configure
    emulator.configure(**before)
