"""A guard in one of two processes."""

import pytest

from distributed.guarding import CASES
from distributed.processes import run_all


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("guarding"))


@pytest.mark.parametrize("name", CASES)
def test_both_processes(name, told):
    assert told[name] == ""
