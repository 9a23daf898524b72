"""Observers of the regions of single steps: what a step holds, and saved tensors that stay for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.measuring.storages import storages_in
from torchremat.regions.region import Region
from torchremat.regions.settings import Observer
from torchremat.regions.slots import Recomputable

# The owner of tensors that a forward leaves in slots: no backward has this number.
_FORWARD = -2


class Keeping(Observer):
    """Lets the saved tensors of a step stay in their slots until the next step begins.

    Of a loop whose length is not known any step may be the last one, with which the backward begins.
    """

    def __init__(self) -> None:
        self._region: ReferenceType[Region] | None = None

    def saved(self, region: Recomputable, call: int, tensor: Tensor) -> None:
        """Keep a saved tensor."""
        slot = region.slots[-1]()
        if slot is not None:
            own = cast("Region", region)
            slot.put(_FORWARD, None, own.detached(tensor))  # See NOTE [ What is handed back to autograd ]

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """Let them stay, and drop the ones of the step before."""
        own = cast("Region", region)
        own.stays_for = _FORWARD
        self._region = ref(own)

    def _region_alive(self) -> Region | None:
        return None if self._region is None else self._region()

    def let_go(self) -> None:
        """Drop the saved tensors of the step that ran last."""
        region = self._region_alive()
        if region is not None:
            region.stays_for = None
            region.forget(_FORWARD)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The bytes of a step, each storage once.

    Attributes:
        carry: Of the carry that it returns, without what it hands on of its own.
        step: What autograd saves in it beyond what was there before, and beyond what the next step saves as well.
        shared: The part of that which is the carry that it is given.
        state: Of the states of generators that it drew from, which every step keeps for itself.
    """

    carry: int
    step: int
    shared: int
    state: int


class Measuring(Keeping):
    """Measures what one step holds; it keeps what autograd saves in the step."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Tensor] = []
        self._before: list[Tensor] = []

    def began(self, region: Recomputable, call: int, tensors: list[Tensor]) -> None:
        """Note the inputs."""
        self._before += tensors

    def saved(self, region: Recomputable, call: int, tensor: Tensor) -> None:
        """Note a saved tensor."""
        super().saved(region, call, tensor)
        self._saved.append(tensor.detach())
        if tensor.is_leaf and tensor.requires_grad:
            self._before.append(self._saved[-1])

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """Note what the body reaches."""
        super().ended(region, call, output)
        self._before += region.calls[call].reached()

    def end(self, given: list[Tensor], returned: list[Tensor]) -> StepBytes:
        """Return the bytes, and let go of the tensors."""
        before, saved = _sizes(self._before), _sizes(self._saved)
        carry = _sizes(returned)
        shared = 0
        for one, other in zip(given, returned, strict=True):
            into, out = _sizes([one]), _sizes([other])
            # A carry that is saved on its way out is there on the way in already.
            if into.keys() <= saved.keys() and not out.keys() <= saved.keys():
                shared += sum(out.values())
        self._saved.clear()
        self._before.clear()
        region = self._region_alive()
        return StepBytes(
            carry=sum(size for address, size in carry.items() if address not in before),
            step=sum(size for address, size in saved.items() if address not in before) + shared,
            shared=shared,
            state=0 if region is None else sum(one.nbytes for one in region.calls[0].generators.values()),
        )


def _sizes(tensors: list[Tensor]) -> dict[int, int]:
    return {storage.data_ptr(): storage.nbytes() for storage in storages_in(tensors)}
