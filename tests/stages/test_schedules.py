"""Plans for the stages of schedules of torch.distributed.pipelining; the cases are in `cases`."""

import pytest

from distributed.processes import judge, run_all
from stages.cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("budgets"))


@pytest.mark.parametrize("case", CASES)
def test_schedules(told, case):
    judge(told[case])
