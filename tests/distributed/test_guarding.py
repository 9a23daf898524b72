"""A guard in one of two processes."""

from distributed.guarding import CASES
from distributed.processes import case_tests

test_both_processes = case_tests(CASES)
