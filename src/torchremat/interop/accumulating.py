"""Steps that accumulate gradients: a framework reduces them over processes only in the last of several steps.

That last step is the largest, so the plan is for it, whichever step comes first: the accumulated gradients of the
earlier steps are in memory, and so is the memory that reduces them.

DistributedDataParallel    `.grad`, as in one process; the last step fills buckets, which count in any case
FSDP2                      whole gradients, not only this process's shard: they exist once a step has run
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torchremat._compat.binding import overridden
from torchremat._compat.data_parallel import is_data_parallel
from torchremat._compat.sharding import (
    adds_gradients_up,
    reducing,
    unreduced_gradients_again,
    unreduced_gradients_aside,
)
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import run_backward


@contextmanager
def as_the_last(subject: Subject) -> Generator[None]:
    """Make each run of a step in the block like the last of the steps whose gradients the framework accumulates.

    Raises:
        StepError: The step returns no loss.
    """
    modules = [module for model in subject.models for module in model.modules()]
    with overridden(filter(is_data_parallel, modules), require_backward_grad_sync=True):
        if not adds_gradients_up(modules):
            yield
            return
        with subject.untouched():
            run_backward(subject.forward())
            put_there = unreduced_gradients_again(modules)
        with unreduced_gradients_aside(modules), reducing(modules):
            put_there()
            yield
