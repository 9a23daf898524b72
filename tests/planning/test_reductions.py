"""Plans where reductions have state of their own; the cases are in `reduction_cases`."""

from distributed.processes import case_tests
from planning.reduction_cases import CASES

test_reductions = case_tests(CASES, world=3)
