"""How a region behaves, and who watches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from torchremat.regions.region import Region

Check = Literal["metadata", "none"]


class Observer(Protocol):
    """Is told what happens to a region; made for the profiler."""

    def looks(self, region: Region) -> None:
        """The region is about to capture what a call will see: it copies generator states and buffers."""
        ...

    def began(self, region: Region, call: int, tensors: list[Tensor]) -> None:
        """It has, and the call begins to run in the region, for the first time, with these inputs."""
        ...

    def saved(self, region: Region, call: int, tensor: Tensor) -> None:
        """Autograd saves a tensor in the first run of a call."""
        ...

    def settles(self, region: Region) -> None:
        """A call has run; the region is about to drop the copies of what has not changed."""
        ...

    def ended(self, region: Region, call: int, output: object) -> None:
        """It has."""
        ...

    def recomputing(self, region: Region) -> None:
        """A recompute begins."""
        ...

    def recomputed(self, region: Region) -> None:
        """A recompute has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a region behaves."""

    check: Check = "metadata"
    preserve_rng: bool = True
    early_stop: bool = True
    guard: tuple[object, ...] = ()
    debug: bool = False
    observer: Observer | None = None
