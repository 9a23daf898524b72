"""Schedules of torch.distributed.pipelining with sessions; the cases are in `cases`."""

import pytest

from distributed.processes import judge, run_all
from pipeline.attaching.cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("attaching"))


@pytest.mark.parametrize("case", CASES)
def test_attaching(told, case):
    judge(told[case])
