"""Runs of the programs: as cases of processes, which raise what is wrong, and by a crew, which tells it."""

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from distributed.communicating import parallel, programs
from distributed.communicating.fuzz import Spec, built
from distributed.communicating.trials import Load, Planned, faults, tried

PROGRAMS = programs.PROGRAMS | parallel.PROGRAMS
_SHARES = ("85% of activations", "70% of activations", "55% of activations")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A run of a program.

    Attributes:
        how: "equal", "wrong", "refused" (before training, by all), "failed" (with an error in all), "hang" or "abort".
        words: What is wrong.
        plans: The plans of all processes, one process after another.
    """

    how: str
    words: str = ""
    plans: tuple[Planned, ...] = ()


def tried_by(crew, name, seed):
    """Run a program for a share of its activations, or for the smallest budget in every second seed.

    One of its processes is slowed, and in every fifth seed none.
    """
    load = Load(rank=None if seed % 5 == 4 else (seed // 2) % crew.world)
    budget = "min" if seed % 2 else _SHARES[seed // 2 % len(_SHARES)]
    ended = crew.run(partial(tried, PROGRAMS[name], seed=seed, load=load, budgets=(budget,)))
    if ended.how != "done":
        words = [f"process {rank}: {one or 'is done'}" for rank, one in enumerate(ended.words)]
        return Ran(how=ended.how, words="\n".join(words))
    words = faults(ended.told, may_be_refused=name in programs.MAY_BE_REFUSED)
    how = "refused" if all(one.refused for one in ended.told) else "wrong" if words else "equal"
    return Ran(how=how, words=words, plans=tuple(one for own in ended.told for one in own.plans))


def checked(name, seed, budgets):
    """One of the programs, with process `seed` of as many as there are slowed."""
    told = _everywhere(PROGRAMS[name], seed=seed, load=Load(rank=seed % dist.get_world_size()), budgets=budgets)
    wrong = faults(told, may_be_refused=name in programs.MAY_BE_REFUSED)
    assert not wrong, wrong


def checked_at_random(seed):
    """The random program of a seed."""
    spec = Spec.of(seed)
    wrong = faults(_everywhere(partial(built, seed), **spec.options), may_be_refused=True, are_alike=False)
    assert not wrong, wrong


def _everywhere(build, **options):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tried(build, dist.get_rank(), **options))
    return found
