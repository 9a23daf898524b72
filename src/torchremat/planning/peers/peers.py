"""The processes that train one model together, and their agreements.

Each process has a budget of its own, and all have the same plan: a region that one process recomputes and another does
not would gather parameters, or reduce gradients, in another order. So they agree, in this order, on

    a profile      the most bytes of any process, the mean of the seconds
    a plan         the plan of the process with the largest step, and so all points of a frontier
    a measurement  the most bytes of any process, the differences of all

Peers of a model in DistributedDataParallel, or sharded by FSDP2, are the processes that hold its replicas or, with
tensor parallelism, the other parts of its parameters. Each process plans any other model alone, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from torchremat._compat.sharding import is_dtensor, is_sharded
from torchremat.errors import StepError, TorchrematError
from torchremat.measuring.communication import is_data_parallel

T = TypeVar("T")


def gathered(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run some work in every process of a group, and return all results, in the order of the ranks.

    An error that the work raises in one process is raised in all, so that none waits for a process that has stopped.

    Args:
        work: Runs without communication; its result can be pickled.
        group: The process group, None for all processes.
    """
    mine: tuple[T | None, Exception | None]
    try:
        mine = work(), None
    except Exception as error:  # noqa: BLE001  any error is raised below, once the others know
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


def _told(error: Exception) -> tuple[type[TorchrematError] | None, str]:
    """Return an error that other processes can raise: constructors of errors that are not ours are unknown."""
    if isinstance(error, TorchrematError):
        return type(error), str(error)
    return None, f"{type(error).__name__}: {error}"


class Peers:
    """The processes that train a model together.

    Args:
        groups: Their process groups, one for each dimension of their mesh; none if there is one process.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups = tuple(groups)

    @property
    def are_several(self) -> bool:
        """Whether other processes have to agree."""
        return bool(self._groups)

    def all(self, work: Callable[[], T]) -> list[T]:
        """Run some work in each process, and return all results; an error in one is raised in all."""
        return self._along(self._groups, work)

    def _along(self, groups: Sequence[dist.ProcessGroup], work: Callable[[], T]) -> list[T]:
        # Each dimension gathers the results of the previous ones, so that an error on the way is passed on too.
        if not groups:
            return [work()]
        return [one for those in gathered(lambda: self._along(groups[1:], work), groups[0]) for one in those]

    def each(self, work: Callable[[], T]) -> T:
        """Run some work in each process, and return its result here; an error in one is raised in all."""
        found: list[T] = []
        self.all(lambda: found.append(work()))
        return found[0]

    def everywhere(self, check: Callable[[], bool]) -> bool:
        """Return whether something holds in each process."""
        return all(self.all(check))

    @property
    def place(self) -> int:
        """The index of this process's result among those of `all`."""
        place = 0
        for group in self._groups:
            place = place * dist.get_world_size(group) + dist.get_rank(group)
        return place

    def at(self, place: int, work: Callable[[], T]) -> T:
        """Run some work in the process at a place, and return the result in each; an error is raised in all."""
        return cast("T", self.all(lambda: work() if place == self.place else None)[place])


def peers_of(model: nn.Module) -> Peers:
    """Return the processes that train a model together, judged by its wrapper or its shards."""
    if not (dist.is_available() and dist.is_initialized()):
        return Peers()
    for module in model.modules():
        if is_data_parallel(module):
            return Peers([cast("dist.ProcessGroup", module.process_group)])
        if is_sharded(module):
            meshes = [cast("Any", one).device_mesh for one in module.parameters() if is_dtensor(one)]
            if meshes:
                return Peers(max(meshes, key=lambda mesh: mesh.ndim).get_all_groups())
    return Peers()


def check_same_calls(names: Sequence[Sequence[str]]) -> None:
    """Raise a StepError where the modules that some processes called are not the same."""
    for rank, one in enumerate(names):
        if one != names[0]:
            raise StepError(
                f"process {rank} called other modules in the step than process 0: {', '.join(one)}, against "
                f"{', '.join(names[0])}. Processes that share their parameters need the same plan, so give them "
                "batches of the same kind."
            )
