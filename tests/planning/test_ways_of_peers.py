"""How the optimizer steps under plans of several processes, and their stores; the cases are in `way_cases`."""

from distributed.processes import case_tests
from planning.way_cases import CASES

test_ways_of_peers = case_tests(CASES)
