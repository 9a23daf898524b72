"""Released gradients and stored state over two processes; the cases are in `releasing`."""

from distributed.processes import case_tests
from distributed.releasing import CASES

test_releasing = case_tests(CASES)
