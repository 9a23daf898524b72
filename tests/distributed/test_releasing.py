"""Released gradients and stored state over two processes; the cases are in `releasing`."""

import pytest

from distributed.processes import run_all
from distributed.releasing import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("releasing"))


@pytest.mark.parametrize("case", CASES)
def test_releasing(told, case):
    assert not told[case], told[case]
