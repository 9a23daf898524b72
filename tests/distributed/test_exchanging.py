"""What other processes have sent, kept by policies, over two processes; the cases are in `exchanging`."""

import pytest

from distributed.exchanging import CASES
from distributed.processes import judge, run_all


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("exchanging"))


@pytest.mark.parametrize("case", CASES)
def test_exchanging(told, case):
    judge(told[case])
