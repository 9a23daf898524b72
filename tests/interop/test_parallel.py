"""Trainings of two processes within a budget; the cases are in `parallel_cases`."""

from distributed.processes import case_tests
from interop.parallel_cases import CASES

test_two_processes_train_within_the_budget = case_tests(CASES)
