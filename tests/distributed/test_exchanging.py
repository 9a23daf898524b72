"""What other processes have sent, kept by policies, over two processes; the cases are in `exchanging`."""

from distributed.exchanging import CASES
from distributed.processes import case_tests

test_exchanging = case_tests(CASES)
