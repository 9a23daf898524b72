"""Trainings of two processes within a budget; the cases are in `parallel_cases`."""

import pytest

from distributed.processes import judge, run_all
from interop.parallel_cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("trainers"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_within_the_budget(told, case):
    judge(told[case])
