"""What of a unit can go into a store, and what that takes: the words of plans with stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torchremat.regions.journeys import Trip
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Cargo:
    """What of one unit leaves for one store, measured. Bytes are those of the device that is planned for.

    Attributes:
        boundary: Boundary storages that leave, each with what the store holds on the device in its place; units may
            share them.
        inside_bytes: Bytes of the others that leave.
        all_bytes: Both together.
        tensors: How many tensors that are.
        resident_bytes: What the store holds on the device in the place of the others.
        passing: For boundary storages what the store has made of them and reads until they have left.
        passing_bytes: The same for the others.
        ahead_bytes: What is allocated when the store begins to bring them back.
        put_peak_bytes: Highest live bytes while they are put, over those before.
        get_peak_bytes: Highest live bytes while they are brought back, over those before the store has begun.
    """

    boundary: Mapping[int, int]
    inside_bytes: int
    all_bytes: int
    tensors: int
    resident_bytes: int
    passing: Mapping[int, int]
    passing_bytes: int
    ahead_bytes: int
    put_peak_bytes: int
    get_peak_bytes: int

    @property
    def comes_ahead(self) -> bool:
        """Whether all of it is allocated when the store begins to bring it back."""
        return self.ahead_bytes >= self.all_bytes


@dataclass(frozen=True, kw_only=True)
class Pace:
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

    def seconds(self, cargo: Cargo) -> float:
        """Return the seconds of moving a cargo."""
        return cargo.tensors * self.tensor_s + cargo.all_bytes * self.byte_s

    def busy_s(self, cargo: Cargo) -> float:
        """Return those of them that the model loses even if it does not wait."""
        return cargo.tensors * self.busy_tensor_s + cargo.all_bytes * self.busy_byte_s


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a store is, measured.

    Attributes:
        out: Into it.
        back: Out of it.
        spread: Half the width of the middle half of what was measured, as a share of it.
        measured_bytes: How many bytes were moved for it, each time.
    """

    out: Pace
    back: Pace
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
class Offer:
    """A store as it is offered to a planner.

    Attributes:
        store: Its place among those given.
        cargoes: What leaves, by the calls of a unit, so that it holds in each mixture of whole and split units; units
            of which nothing leaves are absent.
        speed: How fast it is.
        limit_bytes: The most that it holds; None for no limit.
    """

    store: int
    cargoes: Mapping[tuple[int, ...], Cargo]
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
    def trip(self) -> Trip:
        """The same for whoever runs it."""
        return Trip(store=self.store, leaves_after=self.leaves_after, comes_before=self.comes_before)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A stored unit with its cargo, as the interpreter needs it."""

    planned: StoredUnit
    cargo: Cargo


Loads = Mapping[int, Load]
NO_LOADS: Loads = MappingProxyType({})
