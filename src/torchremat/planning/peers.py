"""What the processes of a group have to agree on: results, and that all of them go on or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from torchremat.errors import TorchrematError

T = TypeVar("T")


def gathered(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Do some work in every process of a group, and return the result of each, in the order of their ranks.

    What the work raises in one process is raised in all of them, so that none waits for one that has stopped.

    Args:
        work: Does without the others; its result can be pickled.
        group: The process group, None for all processes.
    """
    mine: tuple[T | None, BaseException | None]
    try:
        mine = work(), None
    except Exception as error:  # noqa: BLE001  whatever it is, it is raised below, once the others know
        mine = None, error
    rank, told = dist.get_rank(group), None if mine[1] is None else _told(mine[1])
    found: list[tuple[T | None, tuple[type[TorchrematError] | None, str] | None] | None]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (mine[0], told), group=group)
    if mine[1] is not None:
        raise mine[1]
    for other, one in enumerate(found):
        if one is not None and one[1] is not None:
            kind, words = one[1]
            raise (kind or RuntimeError)(f"in process {other} of the group (this is {rank}): {words}")
    return [cast("T", one[0]) for one in found if one is not None]


def _told(error: BaseException) -> tuple[type[TorchrematError] | None, str]:
    """Return what other processes can raise: of errors that are not ours, nobody knows how they are made."""
    if isinstance(error, TorchrematError):
        return type(error), str(error)
    return None, f"{type(error).__name__}: {error}"
