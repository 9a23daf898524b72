"""What of a unit can go into a store, and what that takes: the words of plans with stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from torchremat.regions.offload_schedule import Transfer
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One storage that a unit saves, as a store takes it and gives it back, measured.

    Attributes:
        place: The number of the tensor among all that the unit saves; the last one, if several share the storage.
        storage: The boundary storage that it is, which other units may give to the store as well; None if it is one
            of the unit alone.
        leaves: Whether its memory goes. What somebody else has stays, and so does what the store itself keeps.
        bytes: What is allocated when it is back.
        held_bytes: What the store holds on the device in its place.
        passing_bytes: What the store has made of it and reads until it has left.
        ahead_bytes: What is allocated when the store begins to bring it back.
        put_peak_bytes: Highest live bytes while it is put, over those before.
        get_peak_bytes: Highest live bytes while it is brought back, over those before the store has begun.
    """

    place: int
    storage: int | None
    leaves: bool
    bytes: int
    held_bytes: int
    passing_bytes: int
    ahead_bytes: int
    put_peak_bytes: int
    get_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class OffloadSize:
    """What one unit gives to one store. Bytes are those of the device that is planned for.

    Attributes:
        parcels: In the order in which they are put, which is also that in which they are brought back.
    """

    parcels: tuple[Parcel, ...]

    @cached_property
    def leaving(self) -> tuple[Parcel, ...]:
        """Those whose memory goes."""
        return tuple(parcel for parcel in self.parcels if parcel.leaves)

    @cached_property
    def boundary(self) -> frozenset[int]:
        """The boundary storages that leave; units may share them."""
        return frozenset(parcel.storage for parcel in self.leaving if parcel.storage is not None)

    @cached_property
    def inside_bytes(self) -> int:
        """Bytes of the others that leave."""
        return sum(parcel.bytes for parcel in self.leaving if parcel.storage is None)

    @cached_property
    def all_bytes(self) -> int:
        """Both together."""
        return sum(parcel.bytes for parcel in self.leaving)

    @property
    def tensors(self) -> int:
        """How many tensors leave."""
        return len(self.leaving)

    @cached_property
    def held_bytes(self) -> int:
        """What the store holds on the device in the place of all of them."""
        return sum(parcel.held_bytes for parcel in self.parcels)

    @cached_property
    def comes_ahead(self) -> bool:
        """Whether all of it is allocated when the store begins to bring it back."""
        return all(parcel.ahead_bytes >= parcel.bytes for parcel in self.leaving)


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What moves take in one direction, measured.

    Attributes:
        tensor_s: Of one tensor, whatever its size, if it is waited for.
        byte_s: Of one byte, likewise.
        busy_tensor_s: The part of `tensor_s` that the model loses even if it does not wait.
        busy_byte_s: The same of `byte_s`.
    """

    tensor_s: float
    byte_s: float
    busy_tensor_s: float
    busy_byte_s: float

    def seconds(self, offload_size: OffloadSize) -> float:
        """Return the seconds of moving a cargo."""
        return offload_size.tensors * self.tensor_s + offload_size.all_bytes * self.byte_s

    def busy_s(self, offload_size: OffloadSize) -> float:
        """Return those of them that the model loses even if it does not wait."""
        return offload_size.tensors * self.busy_tensor_s + offload_size.all_bytes * self.busy_byte_s


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a store is, measured.

    Attributes:
        out: Into it.
        back: Out of it.
        spread: Half the width of the middle half of what was measured, as a share of it.
        measured_bytes: How many bytes were moved for it, each time.
    """

    out: Bandwidth
    back: Bandwidth
    spread: float
    measured_bytes: int

    def __str__(self) -> str:
        out, back = self.out, self.back
        return (
            f"{1e6 * out.tensor_s:.0f} us a tensor and {2**30 * out.byte_s:.2f} s a GiB out, "
            f"{1e6 * back.tensor_s:.0f} us and {2**30 * back.byte_s:.2f} s back; of these "
            f"{1e6 * out.busy_tensor_s:.0f} us, {2**30 * out.busy_byte_s:.2f} s, {1e6 * back.busy_tensor_s:.0f} us, "
            f"{2**30 * back.busy_byte_s:.2f} s even if nobody waits; measured here with "
            f"{format_bytes(self.measured_bytes)}, +-{100 * self.spread:.0f}%"
        )


@dataclass(frozen=True, kw_only=True)
class StoreProfile:
    """A store as it is offered to a planner.

    Attributes:
        store: Its place among those given.
        cargoes: What leaves, by the calls of a unit, so that it holds in each mixture of whole and split units; units
            of which nothing leaves are absent.
        speed: How fast it is.
        limit_bytes: The most that it holds; None for no limit.
    """

    store: int
    cargoes: Mapping[tuple[int, ...], OffloadSize]
    speed: Speed
    limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StoredUnit:
    """A unit whose saved tensors wait in a store.

    Attributes:
        unit: Its place in the order of the units.
        store: The place of the store among those given.
        leaves_after: The unit at whose end all of it has left.
        comes_before: The unit before whose backward the store begins to bring it back.
        stored_bytes: How many bytes leave.
    """

    unit: int
    store: int
    leaves_after: int
    comes_before: int
    stored_bytes: int

    @property
    def transfer(self) -> Transfer:
        """The same for whoever runs it."""
        return Transfer(store=self.store, leaves_after=self.leaves_after, comes_before=self.comes_before)


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """A stored unit with its cargo, as the interpreter needs it."""

    planned: StoredUnit
    offload_size: OffloadSize


Offloads = Mapping[int, OffloadChoice]
NO_LOADS: Offloads = MappingProxyType({})
