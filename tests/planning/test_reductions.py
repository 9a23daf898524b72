"""Plans where reductions have state of their own; the cases are in `reduction_cases`."""

import pytest

from distributed.processes import run_all
from planning.reduction_cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("reductions"), world=3)


@pytest.mark.parametrize("case", CASES)
def test_reductions(told, case):
    assert not told[case], told[case]
