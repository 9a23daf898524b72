"""A guarded step in one of two processes: what is refused, and what both agree on."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from logs import Log
from planning.guarding.faults import batch, differing, normed, state
from torchremat import GuardError, UnsupportedError, guard


def failing(ranks, log):
    """A step whose first attempts fail in some of the processes."""

    def step(model, x):
        log.append(1)
        if len(log) == 1 and dist.get_rank() in ranks:
            raise MemoryError
        return model(x).square().mean()

    return step


def take(ranks, log, **options):
    model = normed()
    torch.manual_seed(9)
    with guard(model, failing((), Log()), group=dist.group.WORLD, **options) as run:
        run(batch())
    # Gradients are there, so that the process that had succeeded must not add its own twice.
    with guard(model, failing(ranks, log), group=dist.group.WORLD, **options) as run:
        loss = run(batch(seed=4))
    return state(model, loss), run


def one_fails_and_both_repeat():
    expected, _ = take((), Log())
    log = Log()
    found, run = take((1,), log)
    assert differing(found, expected) == []
    assert [attempt.phase for attempt in run.attempts] == ["forward" if dist.get_rank() == 1 else "elsewhere"]
    assert len(log) >= 2


def one_gives_up_and_so_do_both():
    log = Log()
    with pytest.raises(GuardError, match="attempts=1 are used up"):
        take((0,), log, attempts=1)
    assert len(log) == 1


def one_cannot_repeat_and_so_does_neither():
    def step(model, x):
        if dist.get_rank() == 0:
            x.add_(1)
            raise MemoryError
        return model(x).square().mean()

    words = "written in place" if dist.get_rank() == 0 else "another process cannot run it again"
    with pytest.raises(GuardError, match=words), guard(normed(), step, group=dist.group.WORLD) as run:
        run(batch())


def an_error_of_one_is_told_to_the_other():
    def step(model, x):
        if dist.get_rank() == 0:
            raise KeyError("mine")
        return model(x).square().mean()

    error, words = (KeyError, "mine") if dist.get_rank() == 0 else (GuardError, "another process raised")
    with pytest.raises(error, match=words), guard(normed(), step, group=dist.group.WORLD) as run:
        run(batch())


def alone_is_refused():
    with pytest.raises(UnsupportedError, match="this is one of 2 processes"), guard(normed(), failing((), Log())):
        pass


def reducing_in_the_backward_is_refused():
    model = DistributedDataParallel(normed())
    with guard(model, failing((), Log()), group=dist.group.WORLD) as run:
        with pytest.raises(UnsupportedError, match=r"within `model\.no_sync"):
            run(batch())
        with model.no_sync():
            run(batch())


CASES = {
    one.__name__: one
    for one in (
        one_fails_and_both_repeat,
        one_gives_up_and_so_do_both,
        one_cannot_repeat_and_so_does_neither,
        an_error_of_one_is_told_to_the_other,
        alone_is_refused,
        reducing_in_the_backward_is_refused,
    )
}
