"""Steps that accumulate gradients: a framework reduces them over processes only in the last of several steps.

That last step is the largest, so the plan is for it, whichever step comes first: the accumulated gradients of the
earlier steps are in memory, and so is the memory that reduces them.

DistributedDataParallel    `.grad`, as in one process; the last step fills buckets, which count in any case
FSDP2                      whole gradients, not only this process's shard: they exist once a step has run
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from torch import nn

from torchremat._compat.binding import overridden
from torchremat._compat.data_parallel import is_data_parallel
from torchremat._compat.sharding import (
    adds_gradients_up,
    reducing,
    unreduced_gradients_again,
    unreduced_gradients_aside,
)
from torchremat.measuring.runs import StepObserver, Subject


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
        put_there = subject.train(_keep_unreduced(modules))
        with unreduced_gradients_aside(modules), reducing(modules):
            put_there()
            yield


def _keep_unreduced(modules: Sequence[nn.Module]) -> StepObserver[Callable[[], None]]:
    yield
    yield
    return unreduced_gradients_again(modules)
