"""Plans for models that exchange in their forward, over two processes; the cases are in `exchange_cases`."""

import pytest

from distributed.processes import judge, run_all
from planning.exchange_cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("exchanges"))


@pytest.mark.parametrize("case", CASES)
def test_exchanges(told, case):
    judge(told[case])
