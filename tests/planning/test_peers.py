"""Plans for models that several processes train; the cases are in `peer_cases` and `meeting_cases`."""

from distributed.processes import case_tests
from planning import meeting_cases, peer_cases

test_peers = case_tests(peer_cases.CASES | meeting_cases.CASES)
test_four_peers = case_tests(peer_cases.OF_FOUR | meeting_cases.OF_FOUR, world=4)
