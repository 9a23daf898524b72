"""Policies and FSDP2 over two processes; the cases are in `selective`."""

import pytest

from distributed.processes import run_all
from distributed.selective import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("selective"))


@pytest.mark.parametrize("case", CASES)
def test_selective(told, case):
    assert not told[case], told[case]
