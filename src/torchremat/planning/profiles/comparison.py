"""Whether the units of a watched step repeat their forward: what they save and return is compared, bit by bit.

The recomputes of the watched step are those of training, so no other forward is needed for it. The work that is done
only for the comparison is hidden from the record; see `events.without_hidden`:

    fingerprints           of each tensor that a unit saves or returns, in its forward and in its recompute
    the rest of a unit     after the save at which a recompute would end: what it returns is compared as well
    copied inputs          of a unit that saves nothing. No backward asks for it, so it runs again after the backward

A tensor that is filled after it was saved has some other fingerprint each time. A difference is therefore no failure
yet: the units are then tried, see `replayability`. So are other units for which no backward asks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from torchremat.errors import CheckpointError
from torchremat.measuring.storages import StorageMap
from torchremat.regions.slots import Recomputable
from torchremat.regions.values import is_workspace
from torchremat.tensors.fingerprints import differing, fingerprint
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import tensors_in

# A tensor that a unit saved, by its number, or returned, by call and place.
_Key = tuple[int, int] | tuple[int, int, int]


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
        self._then: dict[_Key, Tensor] = {}
        self._now: dict[_Key, Tensor] = {}
        self._known = StorageMap[dict[tuple[object, ...], Tensor]]()
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

    def saved(self, unit: int, place: int, tensor: Tensor) -> None:
        """Note a tensor that a unit saves."""
        if not is_workspace(tensor):
            self._note(self._then, (unit, place), tensor)

    def saved_again(self, unit: int, place: int, tensor: Tensor, *, ends: bool) -> None:
        """Note a tensor that the recompute of a unit saves, and whether a recompute in training would end here."""
        if not is_workspace(tensor):
            self._note(self._now, (unit, place), tensor)
        if ends and self._rest < 0:
            self._rest = self._mark("rest")

    def returned(self, unit: int, call: int, output: object) -> None:
        """Note the output of a unit's call."""
        for place, tensor in enumerate(tensors_in(output)):
            self._note(self._then, (unit, call, place), tensor)

    def returned_again(self, unit: int, call: int, output: object) -> None:
        """Note the output of a call in the recompute of its unit."""
        for place, tensor in enumerate(tensors_in(output)):
            self._note(self._now, (unit, call, place), tensor)

    def recomputed(self) -> None:
        """Note the end of a recompute."""
        if self._rest >= 0:
            self.hidden.append((self._rest, self._mark("shows")))
            self._rest = -1

    def _note(self, noted: dict[_Key, Tensor], key: _Key, tensor: Tensor) -> None:
        with self._hiding():
            noted[key] = self._fingerprint(tensor)

    def _fingerprint(self, tensor: Tensor) -> Tensor:
        memories = memories_of(tensor)
        if len(memories) != 1 or tensor.layout is not torch.strided or (version := version_of(tensor)) < 0:
            return fingerprint(tensor, by_memory=True)
        found = self._known.get(memories[0])
        if found is None:
            found = self._known[memories[0]] = {}
        seen = version, tensor.dtype, tensor.storage_offset(), *tensor.shape, *tensor.stride()
        if seen not in found:
            found[seen] = fingerprint(tensor, by_memory=True)
        return found[seen]

    def keeps(self, unit: int, region: Recomputable) -> None:
        """Keep the region of a unit that saves nothing, which would be freed now, with copies of its inputs."""
        with self._hiding():
            inputs = region.recording.inputs
            inputs.held = [_copied(one) for one in inputs.held]
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
        keys = dict[torch.device, list[_Key]]()
        for key, one in self._then.items():
            if key[0] in asked:
                keys.setdefault(one.device, []).append(key)
        compared = chain.from_iterable(keys.values())
        if self._now.keys() != {*compared} or any(
            any(differing([self._then[key] for key in own], [self._now[key] for key in own])) for own in keys.values()
        ):
            raise CheckpointError("a unit has not repeated its forward.")
        return [unit for unit in range(units) if unit not in asked]


def _copied(held: HeldTensor) -> HeldTensor:
    """Return a copy of a held tensor, so that the tensor itself is freed as if nothing held it."""
    tensor = held.unpack()
    if isinstance(tensor, nn.Parameter):
        return held
    return type(held)(tensor.detach().clone().requires_grad_(held.requires_grad))
