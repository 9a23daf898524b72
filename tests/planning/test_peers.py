"""Plans for models that several processes train; the cases are in `peer_cases`."""

import pytest

from distributed.processes import run_all
from planning import meeting_cases, peer_cases

CASES = peer_cases.CASES | meeting_cases.CASES
OF_FOUR = peer_cases.OF_FOUR | meeting_cases.OF_FOUR


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("peers"))


@pytest.mark.parametrize("case", CASES)
def test_peers(told, case):
    assert not told[case], told[case]


@pytest.fixture(scope="module")
def told_by_four(tmp_path_factory):
    return run_all(OF_FOUR, tmp_path_factory.mktemp("four_peers"), world=4)


@pytest.mark.parametrize("case", OF_FOUR)
def test_four_peers(told_by_four, case):
    assert not told_by_four[case], told_by_four[case]
