"""How the optimizer steps under plans of several processes, and their stores; the cases are in `way_cases`."""

import pytest

from distributed.processes import run_all
from planning.way_cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("ways"))


@pytest.mark.parametrize("case", CASES)
def test_ways_of_peers(told, case):
    assert not told[case], told[case]
