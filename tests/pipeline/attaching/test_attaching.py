"""Schedules of torch.distributed.pipelining with sessions; the cases are in `cases`."""

from distributed.processes import case_tests
from pipeline.attaching.cases import CASES

test_attaching = case_tests(CASES)
