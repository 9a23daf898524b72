"""Plans for the stages of schedules of torch.distributed.pipelining; the cases are in `cases`."""

from distributed.processes import case_tests
from stages.cases import CASES

test_schedules = case_tests(CASES)
