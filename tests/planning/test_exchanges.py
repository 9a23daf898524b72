"""Plans for models that exchange in their forward, over two processes; the cases are in `exchange_cases`."""

from distributed.processes import case_tests
from planning.exchange_cases import CASES

test_exchanges = case_tests(CASES)
