"""Which saved tensors of a unit can go into a store, and at what cost: the vocabulary of plans with stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from torchremat.regions.offload_schedule import Transfer
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One storage that a unit saves, measured while a store takes it and gives it back.

    Attributes:
        place: The number of the tensor among all saved tensors of the unit; the last number if several share the
            storage.
        storage: Its boundary storage, which other units may also give to the store; None if only this unit has the
            storage.
        leaves: Whether its memory is freed. Memory stays if something else references it, or if the store itself keeps
            it.
        bytes: Bytes allocated when it is back.
        held_bytes: Bytes that the store holds on the device in its place.
        passing_bytes: Bytes of the store's intermediate form, which the store reads until the storage has left.
        ahead_bytes: Bytes allocated when the store begins to bring it back.
        put_peak_bytes: Peak of the put, over the live bytes before.
        get_peak_bytes: Peak while it is brought back, over the live bytes before the store has begun.
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
    """The payload that one unit gives to one store. Bytes are those of the planned device.

    Attributes:
        parcels: Its parcels in the order of the puts; they are brought back in the same order.
    """

    parcels: tuple[Parcel, ...]

    @cached_property
    def leaving(self) -> tuple[Parcel, ...]:
        """The parcels whose memory is freed."""
        return tuple(parcel for parcel in self.parcels if parcel.leaves)

    @cached_property
    def boundary(self) -> frozenset[int]:
        """The boundary storages that leave; units may share them."""
        return frozenset(parcel.storage for parcel in self.leaving if parcel.storage is not None)

    @cached_property
    def inside_bytes(self) -> int:
        """Bytes of the other storages that leave."""
        return sum(parcel.bytes for parcel in self.leaving if parcel.storage is None)

    @cached_property
    def all_bytes(self) -> int:
        """Bytes of all storages that leave, boundary and inside."""
        return sum(parcel.bytes for parcel in self.leaving)

    @property
    def tensors(self) -> int:
        """The number of tensors that leave."""
        return len(self.leaving)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that the store holds on the device in place of all parcels."""
        return sum(parcel.held_bytes for parcel in self.parcels)

    @cached_property
    def comes_ahead(self) -> bool:
        """Whether everything is allocated when the store begins to bring it back."""
        return all(parcel.ahead_bytes >= parcel.bytes for parcel in self.leaving)


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """The cost of transfers in one direction, measured.

    Attributes:
        tensor_s: Seconds per tensor, whatever its size, if the model waits for it.
        byte_s: Seconds per byte, likewise.
        busy_tensor_s: The part of `tensor_s` that the model loses even without waiting.
        busy_byte_s: The same of `byte_s`.
    """

    tensor_s: float
    byte_s: float
    busy_tensor_s: float
    busy_byte_s: float

    def seconds(self, offload_size: OffloadSize) -> float:
        """Return the seconds of one transfer."""
        return offload_size.tensors * self.tensor_s + offload_size.all_bytes * self.byte_s

    def busy_s(self, offload_size: OffloadSize) -> float:
        """Return the part of these seconds that the model loses even without waiting."""
        return offload_size.tensors * self.busy_tensor_s + offload_size.all_bytes * self.busy_byte_s


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a store is, measured.

    Attributes:
        out: Bandwidth into it.
        back: Bandwidth out of it.
        spread: Half the interquartile range of the measurements, relative to the measured value.
        measured_bytes: Bytes moved in each measurement.
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
            f"{2**30 * back.busy_byte_s:.2f} s even if nothing waits; measured here with "
            f"{format_bytes(self.measured_bytes)}, +-{100 * self.spread:.0f}%"
        )


@dataclass(frozen=True, kw_only=True)
class StoreProfile:
    """A store as the planner sees it.

    Attributes:
        store: Its index among the given stores.
        offload_sizes: Offload sizes by the calls of a unit, so that they hold in each mixture of whole and split units;
            units without any are absent.
        speed: Its speed.
        limit_bytes: Its capacity in bytes; None for no limit.
    """

    store: int
    offload_sizes: Mapping[tuple[int, ...], OffloadSize]
    speed: Speed
    limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StoredUnit:
    """A unit whose saved tensors wait in a store.

    Attributes:
        unit: Its index in the order of the units.
        store: The index of the store among the given stores.
        leaves_after: The unit at whose end the whole payload has left.
        comes_before: The unit before whose backward the store begins to bring the payload back.
        stored_bytes: Bytes that leave.
    """

    unit: int
    store: int
    leaves_after: int
    comes_before: int
    stored_bytes: int

    @property
    def transfer(self) -> Transfer:
        """The transfer as the executor takes it."""
        return Transfer(store=self.store, leaves_after=self.leaves_after, comes_before=self.comes_before)


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """A stored unit with its payload, as the interpreter needs it."""

    planned: StoredUnit
    offload_size: OffloadSize


Offloads = Mapping[int, OffloadChoice]
NO_OFFLOADS: Offloads = MappingProxyType({})
