"""FSDP2 over two processes; the cases are in `fully_sharded`."""

from distributed.fully_sharded import CASES
from distributed.processes import case_tests

test_fully_sharded = case_tests(CASES)
