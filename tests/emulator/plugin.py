"""Runs tests on the emulated device: `pytest -p emulator.plugin`, with `tests` on Python's path.

Installs it before anything imports torch, fails each test that leaves a race, starts each with fresh statistics, and
skips what `exceptions.py` lists. TORCHREMAT_DEFAULT_DEVICE=cuda runs tests on it that name no device.

    EMULATOR_LAG        how many times an event says that it has not fired: a number, or "never"
    EMULATOR_DEVICES    how many devices there are
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import emulator

emulator.install()

import pytest  # noqa: E402
import torch  # noqa: E402

from emulator.exceptions import KNOWN_RACES, NOT_HERE  # noqa: E402

_PLUGIN = "emulator.plugin"
_OWN_TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    lag = os.environ.get("EMULATOR_LAG", "3")
    emulator.configure(
        lag=emulator.NEVER if lag == "never" else int(lag), devices=int(os.environ.get("EMULATOR_DEVICES", "2"))
    )
    # The processes of pytest-xdist load what -p names after the conftest, which imports torch; what the environment
    # names comes first.
    if getattr(config.option, "numprocesses", None):
        named = os.environ.get("PYTEST_PLUGINS", "")
        if _PLUGIN not in named.split(","):
            os.environ["PYTEST_PLUGINS"] = ",".join(filter(None, [named, _PLUGIN]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for reason, patterns in NOT_HERE.items():
            if any(fnmatchcase(item.nodeid, pattern) for pattern in patterns):
                item.add_marker(pytest.mark.skip(reason=f"emulated device: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(1.0, index)
            torch.cuda.reset_accumulated_memory_stats(index)
            torch.cuda.reset_peak_memory_stats(index)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    _settle()
    found = [race for race in emulator.races() if not _is_known(item, race)]
    if found:
        pytest.fail("\n".join(["the emulated device has seen races:", *found]), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        _settle()
        emulator.races()  # of a test that has failed already: they are not the next one's


def _is_known(item: pytest.Item, race: str) -> bool:
    reason = next((reason for pattern, reason in KNOWN_RACES.items() if re.search(pattern, race)), None)
    if reason is None or item.path.parent == _OWN_TESTS:
        return False
    item.user_properties.append(("known race", reason))  # it travels from the processes of pytest-xdist as well
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        tests.update({value for name, value in report.user_properties if name == "known race"})
    for reason, count in tests.items():
        terminalreporter.write_line(f"known races in {count} tests: {reason}")


def _settle() -> None:
    """Let copies end that nobody has waited for, and with them what they find."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
