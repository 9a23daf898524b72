"""Runs tests on the emulated device: `pytest -p emulator.plugin`, with `tests` on Python's path.

Installs it before anything imports torch, fails each test that leaves a race, starts each with fresh statistics, and
does what `exceptions.py` says. With TORCHREMAT_DEFAULT_DEVICE=cuda the suites that it names run on the device as well,
and of all others what is marked `gpu`.

    EMULATOR_LAG        how many times an event says that it has not fired: a number, or "never"
    EMULATOR_DEVICES    how many devices there are
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Generator

import emulator

emulator.install()

import pytest  # noqa: E402
import torch  # noqa: E402

from emulator import exceptions  # noqa: E402

_PLUGIN = "emulator.plugin"
_IS_DEFAULT = os.environ.get("TORCHREMAT_DEFAULT_DEVICE", "cpu").startswith("cuda")


def pytest_configure(config: pytest.Config) -> None:
    lag = os.environ.get("EMULATOR_LAG", "3")
    emulator.configure(
        lag=emulator.NEVER if lag == "never" else int(lag), devices=int(os.environ.get("EMULATOR_DEVICES", "2"))
    )
    # Autograd's thread of a device lets go of a graph after backward() has returned, and needs Python for it: it gets
    # it soon, so that few tests find what is about to go.
    sys.setswitchinterval(1e-5)
    # The processes of pytest-xdist load what -p names after the conftest, which imports torch; what the environment
    # names comes first.
    if getattr(config.option, "numprocesses", None):
        named = os.environ.get("PYTEST_PLUGINS", "")
        if _PLUGIN not in named.split(","):
            os.environ["PYTEST_PLUGINS"] = ",".join(filter(None, [named, _PLUGIN]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _IS_DEFAULT:
        runs = {item: _is_marked(item) or item.nodeid.startswith(exceptions.BY_DEFAULT) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
        items[:] = [item for item in items if runs[item]]
    for item in items:
        reason = _reason(item, exceptions.NOT_HERE)
        if reason is None and _IS_DEFAULT and not _is_marked(item):
            reason = _reason(item, exceptions.NOT_BY_DEFAULT)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"emulated device: {reason}"))


def _is_marked(item: pytest.Item) -> bool:
    """Whether the test names the device itself."""
    return "gpu" in item.keywords


def _reason(item: pytest.Item, tests: exceptions.Tests) -> str | None:
    for reason, beginnings in tests.items():
        for beginning in beginnings:
            if item.nodeid.startswith(beginning) and item.nodeid[len(beginning) :][:1] not in _GOES_ON:
                return reason
    return None


# A name that goes on after a pattern's end is another name; a pattern that ends in a bracket's middle goes on itself.
_GOES_ON = tuple("abcdefghijklmnopqrstuvwxyz_")


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
    try:
        result = yield
    except Exception as error:
        reason = None if _is_marked(item) else _fault_of_the_test(error)
        if reason is None:
            raise
        for one in _chain(error):
            traceback.clear_frames(one.__traceback__)  # what they hold would be there in the next test still
        pytest.skip(f"emulated device: {reason}")
    _settle()
    found = emulator.races()
    if found and _reason(item, exceptions.RACES_ON_PURPOSE) is None:
        pytest.fail("\n".join(["the emulated device has seen races:", *found]), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        _settle()
        emulator.races()  # of a test that has failed already: they are not the next one's


def _fault_of_the_test(error: BaseException) -> str | None:
    """The reason for which a test that was not written for the device cannot run on it."""
    for one in _chain(error) if _IS_DEFAULT else ():
        for pattern, reason in exceptions.ERRORS_OF_THE_TEST.items():
            if re.search(pattern, str(one)):
                return reason
    return None


def _chain(error: BaseException | None) -> Generator[BaseException, None, None]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _settle() -> None:
    """Let copies end that nobody has waited for, and with them what they find."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
