"""Compares what the units of a watched step save and return in their forward and their recompute, bit by bit.

The recomputes of the watched step are those of training, so no other forward is needed for it. The work that is done
only for the comparison is hidden from the record; see `without_hidden`:

    fingerprints           of each tensor that a unit saves or returns, in its forward and in its recompute. Those of
                           small tensors on the host take no memory and no longer than a mark: they are not hidden
    the rest of a unit     after the save at which a recompute would end: what it returns is compared as well
    copies                 of the inputs and of the state of a unit that saves nothing. No backward asks for it, so it
                           runs again after the backward

An input that a region holds is the same memory in both: its version tells whether it was written.

A tensor that is filled after it was saved has some other fingerprint each time. A difference is therefore no failure
yet: the units are then tried, see `replayability`. So are other units for which no backward asks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchremat.errors import CheckpointError
from torchremat.measuring.storages import StorageMap, address_of
from torchremat.measuring.traces import AllocationTrace
from torchremat.regions.slots import Recomputable
from torchremat.regions.values import is_workspace
from torchremat.tensors.fingerprints import differing, fingerprint, hash_here
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import tensors_in

# A tensor that a unit saved, by its number, or returned, by call and place.
_Key = tuple[int, int] | tuple[int, int, int]
# What stands for its bits: a hash, a fingerprint, or for memory that stays the memory itself, with the tensor's place.
_Bits = int | Tensor | tuple[object, ...]

# A tensor of at most so many bytes has its hash on the host within some 50 microseconds: a mark before it and one
# behind it, which would hide them, take a fifth of that.
_SHORT_BYTES = 512 << 10


class Comparison:
    """The fingerprints of a watched step.

    Args:
        mark: Marks the current time among the allocations.

    Attributes:
        hidden: The stretches to hide, as pairs of marks; none is inside another.
    """

    def __init__(self, mark: Callable[[str], int]) -> None:
        self.hidden: list[tuple[int, int]] = []
        self._mark = mark
        self._then: dict[_Key, _Bits] = {}
        self._now: dict[_Key, _Bits] = {}
        self._known = StorageMap[dict[tuple[object, ...], _Bits]]()
        self._again: dict[int, Recomputable] = {}
        self._rest = -1  # the mark where the rest of the running recompute begins

    @contextmanager
    def _hiding(self) -> Generator[None]:
        if self._rest >= 0:
            yield
            return
        begins = self._mark("hides")
        try:
            yield
        finally:
            self.hidden.append((begins, self._mark("shows")))

    def saved(self, unit: int, place: int, tensor: Tensor, stays: Container[int]) -> None:
        """Note a tensor that a unit saves; `stays`: addresses of storages that stay until its recompute has ended."""
        if not is_workspace(tensor):
            self._then[unit, place] = self._bits(tensor, stays)

    def saved_again(self, unit: int, place: int, tensor: Tensor, stays: Container[int], *, ends: bool) -> None:
        """Note a tensor that the recompute of a unit saves, and whether a recompute in training would end here."""
        if not is_workspace(tensor):
            self._now[unit, place] = self._bits(tensor, stays)
        if ends and self._rest < 0:
            self._rest = self._mark("rest")

    def returned(self, unit: int, call: int, output: object) -> None:
        """Note the output of a unit's call."""
        self._then.update(((unit, call, place), self._bits(one)) for place, one in enumerate(tensors_in(output)))

    def returned_again(self, unit: int, call: int, output: object) -> None:
        """Note the output of a call in the recompute of its unit."""
        self._now.update(((unit, call, place), self._bits(one)) for place, one in enumerate(tensors_in(output)))

    def recomputed(self) -> None:
        """Note the end of a recompute."""
        if self._rest >= 0:
            self.hidden.append((self._rest, self._mark("shows")))
            self._rest = -1

    def _bits(self, tensor: Tensor, stays: Container[int] = ()) -> _Bits:
        memories = memories_of(tensor)
        version = version_of(tensor) if len(memories) == 1 and tensor.layout is torch.strided else -1
        if version < 0:
            with self._hiding():
                return fingerprint(tensor, by_memory=True)
        if address_of(memories[0]) in stays:
            return address_of(memories[0]), *_seen(tensor, version)
        if tensor.nbytes <= _SHORT_BYTES and (hashed := hash_here(tensor)) is not None:
            return hashed
        found = self._known.get(memories[0])
        if found is None:
            found = self._known[memories[0]] = {}
        seen = _seen(tensor, version)
        if seen not in found:
            with self._hiding():
                hashed = hash_here(tensor)
                found[seen] = fingerprint(tensor, by_memory=True) if hashed is None else hashed
        return found[seen]

    def keeps(self, unit: int, region: Recomputable) -> None:
        """Keep the region of a unit that saves nothing, which would be freed now, with copies of all that it holds."""
        with self._hiding():
            region.held = [_copied(one) for one in region.held]
            for call in region.calls:
                call.generators = {one: state.clone() for one, state in call.generators.items()}
                if call.world.backups is not None:
                    call.world.backups.copy_again()
        self._again[unit] = region

    def run_again(self) -> None:
        """Run the kept regions again, the last one first, as in backward; the step has ended."""
        for unit in sorted(self._again, reverse=True):
            self._again[unit].repeat()
        self._again.clear()

    def unasked(self, units: int) -> list[int]:
        """Return which of a number of units have not run again, after the others were compared.

        Raises:
            CheckpointError: A unit has not repeated its forward.
        """
        asked = {unit for unit, *_ in self._now}
        keys = [key for key in self._then if key[0] in asked]
        pairs = [(self._then[key], self._now[key]) for key in keys if key in self._now]
        devices = dict[torch.device, list[tuple[Tensor, Tensor]]]()
        are_like = len(pairs) == len(keys) == len(self._now)
        for then, now in pairs:
            if isinstance(then, Tensor) and isinstance(now, Tensor):
                devices.setdefault(then.device, []).append((then, now))
            else:
                are_like &= type(then) is type(now) and then == now
        if not are_like or any(any(differing(*zip(*own, strict=True))) for own in devices.values()):
            raise CheckpointError("a unit has not repeated its forward.")
        return [unit for unit in range(units) if unit not in asked]


def without_hidden(trace: AllocationTrace, hidden: Sequence[tuple[int, int]]) -> AllocationTrace:
    """Return the trace as if nothing had run in some stretches, given by the marks at their ends, apart and in order.

    What they allocate goes, with its frees, and so do their seconds. Memory from before them is freed where it was.
    """
    return trace.without(trace.made_in(hidden)).without_seconds(hidden) if hidden else trace


def _seen(tensor: Tensor, version: int) -> tuple[object, ...]:
    return version, tensor.dtype, tensor.storage_offset(), *tensor.shape, *tensor.stride()


def _copied(held: HeldTensor) -> HeldTensor:
    """Return a copy of a held tensor, so that the tensor itself is freed as if nothing held it."""
    tensor = held.unpack()
    if isinstance(tensor, nn.Parameter):
        return held
    return type(held)(tensor.detach().clone().requires_grad_(held.requires_grad))
