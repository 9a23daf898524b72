"""Puts back the state that a step has changed, and finds the iterators and optimizers that it has advanced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from torchremat.ambient.hidden import hiding
from torchremat.ambient.registry import Captured
from torchremat.errors import UnsupportedError
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.step import held_within, is_iterator
from torchremat.measuring.untouched import Buffers, RandomNumbers
from torchremat.measuring.writes import Place, is_plain
from torchremat.planning.guarding.gradients import Gradients
from torchremat.state.guarded import looks_after_itself
from torchremat.state.reach import reach
from torchremat.state.snapshot import Snapshot
from torchremat.state.world import Reaching
from torchremat.tensors.copies import again
from torchremat.tensors.metadata import version_of
from torchremat.tensors.versioned import Versioned

# The objects that a step holds are searched in plain sight, as in `measuring.step`: its arguments, closure cells,
# defaults, the globals that its code names, and, for a bound method, the attributes of its object that it names; and in
# the functions among all these.
#
#     an iterator     the next attempt would get another batch: refused before the first step
#     an optimizer    its state is written before its parameters, and memory may run out between: versions are watched


def check_no_iterators(step: Callable[..., object], objects: Iterable[object]) -> None:
    """Refuse a step that takes its batch from an iterator.

    Raises:
        UnsupportedError: The step receives one, or holds one.
    """
    held = [(f"`{name}`", one) for name, one in held_within(step)]
    found = next((words for words, one in (*(("an argument", one) for one in objects), *held) if is_iterator(one)), "")
    if found:
        raise UnsupportedError(
            f"guard: the step takes from an iterator ({found}). Run again, it would get the next batch, and planning "
            "takes some too. Take the batch before: `for batch in loader: run(batch)`."
        )


def optimizers_of(given: torch.optim.Optimizer | None, *callables: object) -> list[torch.optim.Optimizer]:
    """Return the given optimizer, and the optimizers that callables hold, each once."""
    held = (one for function in callables for _, one in held_within(function))
    found = [given, *(one for one in held if isinstance(one, torch.optim.Optimizer))]
    return list(dict.fromkeys(one for one in found if one is not None))


def _state_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[int, int]]:
    """Return the tensors of the state of optimizers, and their versions."""
    states = (state for one in optimizers for state in cast("dict[object, dict[str, object]]", one.state).values())
    tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
    return [(id(tensor), version_of(tensor)) for tensor in tensors]


# State that one attempt changes and the next must not see:
#
#     random numbers        all generators of torch, Python's, NumPy's global one          state restored
#     buffers               of the model and of the modules that the step holds            values and versions restored
#     training flags        of the same modules                                            restored
#     attributes, hooks     of the same modules, and all objects reachable from them       the same objects in them
#     arguments, `guard`    lists, dicts, attributes inside, to any depth                  the same objects in them
#     registered state      `extend.register`                                              restored
#     gradients             see NOTE [ Gradients of a step that is run again ]             left out
#     optimizer's state     the same tensors at the same versions                          changed: not run again
#     parameters, batch,    their versions are watched                                     moved: not run again
#     other tensors of      `.data` that was set to other memory                           their own memory again
#     the modules


class StepState:
    """The current values of the state that a step may change.

    Args:
        modules: All modules that the step runs, each once.
        leaves: All leaves that its backward gives gradients to.
        tensors: The batch, and other tensors that the step only reads. So are all that the modules hold, buffers aside:
            parameters without grad, as a teacher has, are not among the leaves.
        objects: The arguments that are not tensors.
        guard: Further objects, as `checkpoint(guard=...)` takes them.
        optimizers: All optimizers that the step can reach.
        watched: Large buffers that no earlier step has written, see `Buffers`.
    """

    def __init__(
        self,
        *,
        modules: Sequence[nn.Module],
        leaves: Sequence[Tensor],
        tensors: Iterable[Tensor],
        objects: list[object],
        guard: Sequence[object],
        optimizers: Sequence[torch.optim.Optimizer],
        watched: Mapping[int, ReferenceType[Tensor]],
    ) -> None:
        self.gradients = Gradients(leaves)
        self._optimizers, self._optimizer_state = optimizers, _state_of(optimizers)
        with hiding():
            self.buffers = Buffers(modules, watched)
        self._random = RandomNumbers()
        self._registered = Captured()
        world = Reaching()
        for one in guard:
            if looks_after_itself(one):
                world.skip(one)
        reach(world, guard, are_named=True)
        reach(world, objects, are_arguments=True)
        named = [one for one in world.tensors if id(one) in world.named]
        self._named = list(zip(named, again(named), strict=True))
        reach(world, modules)
        restored = world.named.union(id(one) for module in modules for one in module.buffers(recurse=False))
        read = {id(one): one for one in (*leaves, *tensors, *world.tensors) if one.is_leaf}
        self._read = [Versioned(one) for key, one in read.items() if key not in restored]
        with hiding():
            self._places = [Place(one.tensor) for one in self._read if is_plain(one.tensor)]
        self._world = Snapshot(world, guard, backs_up=False)

    def held_bytes(self, device: torch.device) -> int:
        """Return the bytes of the copies that stay on a device until the step is done."""
        return (
            self.buffers.held_bytes(device)
            + self._random.held_bytes(device)
            + sum(clone.nbytes for _, clone in self._named if clone.device == device)
        )

    def has_stepped(self) -> bool:
        """Return whether a tensor of an optimizer's state was written or added."""
        return _state_of(self._optimizers) != self._optimizer_state

    def written(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that an attempt has written and that cannot be restored, each with a description."""
        found = [("the gradient of {}", leaf) for leaf in self.gradients.written()]
        found += [("{}", one.tensor) for one in self._read if one.is_written]
        return found + [("the buffer {}", buffer) for buffer in self.buffers.written()]

    def put_back(self) -> None:
        """Restore the state from before the step; for gradients see NOTE [ Gradients of a step that is run again ]."""
        with uninterrupted(), hiding():
            self.gradients.put_back()
            for place in self._places:
                place.put_back()
            self.buffers.put_back()
            self._random.put_back()
            self._registered.put_back()
            self.put_back_objects()
            for tensor, clone in self._named:
                tensor.data.copy_(clone)

    def put_back_objects(self) -> None:
        """Restore the objects that attributes, arguments and named objects held; nothing is written to a tensor."""
        self._world.put_back()
