"""DistributedDataParallel over two processes; the cases are in `data_parallel`."""

from distributed.data_parallel import CASES
from distributed.processes import case_tests

test_data_parallel = case_tests(CASES)
