"""Which saved tensors of a unit can go into a store, and at what cost: the vocabulary of plans with stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from torchremat.measuring.store_speeds import Speed
from torchremat.regions.offload_schedule import Transfer


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
