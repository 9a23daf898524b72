"""What two processes do with attached schedules."""

from functools import cache, partial

import torch

from pipeline.attaching.models import BLOCKS, MICROBATCHES, SCHEDULES, Program
from torchremat import wrap
from torchremat.pipeline import attach

TWICE = [2] * MICROBATCHES


def wrapped(module):
    wrap(module, "layers.*")


@cache
def plain(name):
    """The gradients without regions."""
    return Program(name).train()


def equal(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def one_recompute(name, **options):
    expected = plain(name)
    program = Program(name, wrapped)

    with attach(program.schedule, **options) as attached:
        ours = program.train()
        assert attached.open_sessions == 0

    assert program.calls == [TWICE] * BLOCKS * len(program.stages), program.calls
    assert equal(ours, expected)


CASES = {
    **{f"one recompute, {name}": partial(one_recompute, name) for name in SCHEDULES},
}
