"""Policies and FSDP2 over two processes; the cases are in `selective`."""

from distributed.processes import case_tests
from distributed.selective import CASES

test_selective = case_tests(CASES)
