"""Programs that communicate are planned by all processes together; they are in `communicating`.

benchmarks/communicating runs all of them, many times; `communicating/fuzz.py` as many random ones as one likes.
"""

from functools import partial

from distributed.communicating.cases import checked, checked_at_random
from distributed.processes import case_tests

MIN = ("min",)
OF_TWO = {
    "ring_attention": MIN,
    "layers_split_by_hand": ("70% of activations",),
    "experts": MIN,
    "contrastive": ("70% of activations",),
    "sequence_parallel": MIN,
    "loss_parallel_around": MIN,
    "halves": MIN,
    "low_ranks": MIN,
}
OF_FOUR = {
    "passed_on": MIN,
    "overlapping_groups": ("70% of activations",),
    "ring_in_each_replica": ("70% of activations",),
    "replicas_of_split_layers": ("70% of activations",),
}
RANDOM = (0, 1, 2, 3, 7, 9)  # those of the first that take the least time

test_two_processes = case_tests(
    {name: partial(checked, name, 1, budgets) for name, budgets in OF_TWO.items()}
    | {f"random {seed}": partial(checked_at_random, seed) for seed in RANDOM}
)
test_four_processes = case_tests(
    {name: partial(checked, name, 2, budgets) for name, budgets in OF_FOUR.items()}, world=4
)
