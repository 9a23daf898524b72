"""Observers of the regions of single steps: what a step saves, and saved tensors that stay for a while."""

from __future__ import annotations

from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.measuring.storages import storages_in
from torchremat.regions.region import Region
from torchremat.regions.settings import Observer

# The owner of tensors that a forward leaves in slots: no backward has this number.
_FORWARD = -2


class Keeping(Observer):
    """Lets the saved tensors of a step stay in their slots until the next step begins.

    Of a loop whose length is not known any step may be the last one, with which the backward begins.
    """

    def __init__(self) -> None:
        self._region: ReferenceType[Region] | None = None

    def saved(self, region: Region, call: int, tensor: Tensor) -> None:
        """Keep a saved tensor."""
        slot = region.slots[-1]()
        if slot is not None:
            slot.put(_FORWARD, tensor if tensor.is_leaf else region.detached(tensor))

    def ended(self, region: Region, call: int, output: object) -> None:
        """Let them stay, and let go of those of the step before."""
        region.kept_for = _FORWARD
        self._region = ref(region)

    def let_go(self) -> None:
        """Drop the saved tensors of the step that ran last."""
        region = None if self._region is None else self._region()
        if region is not None:
            region.kept_for = None
            region.forget(_FORWARD)


class Measuring(Keeping):
    """Measures what autograd saves in one step, which it keeps: bytes of storages that were not there before.

    Attributes:
        saved_bytes: These bytes.
        reached: The tensors that the body reaches in other ways than by its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Tensor] = []  # kept until the end, so that no memory is used twice
        self._before: list[Tensor] = []
        self.reached: list[Tensor] = []
        self.saved_bytes = 0

    def began(self, region: Region, call: int, tensors: list[Tensor]) -> None:
        """Note the inputs."""
        self._before += tensors

    def saved(self, region: Region, call: int, tensor: Tensor) -> None:
        """Note a saved tensor."""
        super().saved(region, call, tensor)
        (self._before if tensor.is_leaf and tensor.requires_grad else self._saved).append(tensor.detach())

    def ended(self, region: Region, call: int, output: object) -> None:
        """Count, without what the body reaches."""
        super().ended(region, call, output)
        self.reached = region.made[call].reached()
        self.saved_bytes = new_bytes([*self._before, *self.reached], self._saved)
        self._before.clear()
        self._saved.clear()


def new_bytes(before: list[Tensor], after: list[Tensor]) -> int:
    """Return the bytes of the storages of `after` that `before` does not share."""
    shared = {storage.data_ptr() for storage in storages_in(before)}
    found = {storage.data_ptr(): storage.nbytes() for storage in storages_in(after)}
    return sum(size for address, size in found.items() if address not in shared)
