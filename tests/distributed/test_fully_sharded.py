"""FSDP2 over two processes; the cases are in `fully_sharded`."""

import pytest

from distributed.fully_sharded import CASES
from distributed.processes import run_all


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("fully_sharded"))


@pytest.mark.parametrize("case", CASES)
def test_fully_sharded(told, case):
    assert not told[case], told[case]
