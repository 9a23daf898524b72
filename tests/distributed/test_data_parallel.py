"""DistributedDataParallel over two processes; the cases are in `data_parallel`."""

import pytest

from distributed.data_parallel import CASES
from distributed.processes import run_all


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("data_parallel"))


@pytest.mark.parametrize("case", CASES)
def test_data_parallel(told, case):
    assert not told[case], told[case]
