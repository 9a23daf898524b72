"""Plans for models that several processes train; the cases are in `peer_cases`."""

import pytest

from distributed.processes import run_all
from planning.peer_cases import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("peers"))


@pytest.mark.parametrize("case", CASES)
def test_peers(told, case):
    assert not told[case], told[case]
