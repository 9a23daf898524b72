"""Measures what each unit gives to a store, by putting real saved tensors into it.

One forward runs in which every unit is stored, in measuring stores: they put each tensor into the real store, bring it
back at once under the allocator's events, and drop it. Units of one signature with the same payload are measured once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from torchremat.errors import StoreError, UnsupportedError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.runs import Subject
from torchremat.measuring.storages import address_of
from torchremat.measuring.store_speeds import Payload, measured_speed
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.peers.agreement import most
from torchremat.planning.peers.peers import Peers
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.offload_choices import OffloadSize, Parcel, StoreProfile
from torchremat.planning.stepping import StepStores
from torchremat.regions.offload_schedule import OffloadSchedule, Transfer
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import KeepNode
from torchremat.stores.base import held_in, limit_bytes_of, settle
from torchremat.tensors.handles import Handle, Store
from torchremat.tensors.parts import memories_of


def check_stores(stores: Sequence[Store], *, allow_lossy: bool) -> tuple[Store, ...]:
    """Return the stores if a plan may use them.

    Raises:
        UnsupportedError: One is no store, or is lossy and that is not allowed.
    """
    if isinstance(stores, str) or not isinstance(cast("object", stores), Sequence):
        raise UnsupportedError(f"stores={stores!r}: expected a list of stores, such as [torchremat.Disk()].")
    for place, store in enumerate(stores):
        _check_kind(store, f"stores[{place}]")
        lossy = _lossy_in(store)
        if lossy is not None and not allow_lossy:
            raise UnsupportedError(
                f"stores[{place}]={store!r} loses digits ({lossy!r}), so gradients would differ from the plain run. "
                "Pass allow_lossy=True if you accept that, or leave the codec out."
            )
    return tuple(stores)


def check_step_stores(stores: StepStores) -> None:
    """Raise if a plan may not put the state of an optimizer, or parameters, into their store.

    Raises:
        UnsupportedError: It is no store, or is lossy.
    """
    _check_lossless(
        stores.state,
        "optimizer_store",
        "planning moves the state there and back, so the state would be another one afterwards. Plan without it, and "
        "call `torchremat.offload_optimizer` before.",
    )
    _check_lossless(
        stores.parameters,
        "parameter_store",
        "planning moves the parameters there and back, so they would be others afterwards. Plan without it, apply the "
        "plan, and call `torchremat.offload_parameters` then.",
    )


def check_apart(stores: Sequence[Store], parameters: Store | None, name: str) -> None:
    """Raise if parameters would take room in a store that a plan counts on for saved tensors.

    Raises:
        UnsupportedError: They share a store that has a limit.
    """
    shared = {id(one) for store in stores for one in _limited_in(store)}
    found = next((one for one in _limited_in(parameters) if id(one) in shared), None)
    if found is not None:
        raise UnsupportedError(
            f"stores= and {name}: parameters take a part of the limit of {found!r} that changes in a step, so the room "
            "for saved tensors is not known. Give each a store of its own, or one without a limit."
        )


def _limited_in(store: object) -> Iterator[object]:
    """Yield the stores with a limit that a store is, or has inside of it."""
    if limit_bytes_of(store) is not None:
        yield store
    for inner in _inside(store):
        yield from _limited_in(inner)


def _inside(store: object) -> Iterator[object]:
    """Yield the stores inside of a store."""
    inner = (*cast("tuple[object, ...]", getattr(store, "stores", ())), getattr(store, "store", None))
    return (one for one in inner if one is not None)


def _check_lossless(store: Store | None, name: str, why: str) -> None:
    if store is None:
        return
    _check_kind(store, name)
    lossy = _lossy_in(store)
    if lossy is not None:
        raise UnsupportedError(f"{name}={store!r} loses digits ({lossy!r}), and {why}")


def _check_kind(store: Store, name: str) -> None:
    if isinstance(store, type) or not callable(getattr(store, "put", None)):
        raise UnsupportedError(f"{name}={store!r}: expected an object with a method `put`, such as torchremat.Disk().")


def _lossy_in(store: object) -> object:
    """Return the lossy codec of a store, or of a store inside it; None if it has none."""
    if getattr(store, "lossy", None) is not None:
        return cast("object", getattr(store, "lossy"))  # noqa: B009
    return next((found for one in _inside(store) if (found := _lossy_in(one)) is not None), None)


def weighed(
    model: nn.Module, subject: Subject, pair: ProfilePair, stores: Sequence[Store], peers: Peers | None = None
) -> tuple[StoreProfile, ...]:
    """Return the offload sizes of units, whole and split; the step's forward runs once or twice for each store.

    Of several processes the largest bytes, the slowest seconds and the smallest limit count.

    Raises:
        UnsupportedError: The step calls the model, or modules of it, several times.
    """
    profile = pair.blocks
    if stores and len(profile.units.roots) > 1:
        names = ", ".join(sorted({profile.units.trace.calls[root].name or "the model" for root in profile.units.roots}))
        raise UnsupportedError(
            f"stores=: the step makes {len(profile.units.roots)} calls (of {names}), and stores can be planned for a "
            "step that calls the model once. Leave `stores` out, or let one module make all the calls."
        )
    peers = peers or Peers()
    return tuple(_offer(model, subject, pair, place, store, peers) for place, store in enumerate(stores))


def _offer(
    model: nn.Module, subject: Subject, pair: ProfilePair, place: int, store: Store, peers: Peers
) -> StoreProfile:
    offload_sizes, payload = _weighed(model, subject, pair.blocks, store, peers)
    if pair.leaves is not None:
        offload_sizes = _weighed(model, subject, pair.leaves, store, peers)[0] | offload_sizes
    limit_bytes = limit_bytes_of(store)

    def measured() -> StoreProfile:
        speed = measured_speed(store, pair.blocks.device, payload, limit_bytes)
        return StoreProfile(store=place, offload_sizes=offload_sizes, speed=speed, limit_bytes=limit_bytes)

    return _agreed(peers.all(measured))


def _agreed(told: Sequence[StoreProfile]) -> StoreProfile:
    speeds, limits = [one.speed for one in told], [one.limit_bytes for one in told if one.limit_bytes is not None]
    speed = replace(speeds[0], out=most([one.out for one in speeds]), back=most([one.back for one in speeds]))
    parcels = [{calls: size.parcels for calls, size in one.offload_sizes.items()} for one in told]
    sizes = {
        calls: OffloadSize(parcels=tuple(map(most, zip(*(one[calls] for one in parcels), strict=True))))
        for calls, own in parcels[0].items()
        if all(_which(own) == _which(one.get(calls, ())) for one in parcels)
    }
    return replace(told[0], offload_sizes=sizes, speed=speed, limit_bytes=min(limits, default=None))


def _which(parcels: Sequence[Parcel]) -> list[tuple[int, int | None, bool]]:
    return [(one.place, one.storage, one.leaves) for one in parcels]


def _weighed(
    model: nn.Module, subject: Subject, profile: Profile, store: Store, peers: Peers
) -> tuple[dict[tuple[int, ...], OffloadSize], Payload]:
    """Return the offload sizes of a profile's units, and the payload of the units with most bytes to leave."""
    units = profile.units
    alike: dict[object, list[int]] = {}
    for unit, size in enumerate(profile.sizes):
        if size.has_backward:
            alike.setdefault(units.signature(unit), []).append(unit)
    offload_sizes: dict[tuple[int, ...], OffloadSize] = {}
    most_bytes, payload = 0, Payload(tensors=())
    while any(peers.all(alike.__len__)):  # a forward of sharded modules runs in all processes
        first = {members[0] for members in alike.values()}
        members = [*chain.from_iterable(alike.values())]
        scales, trace = peers.each(lambda own=members, some=first: _forward(model, subject, profile, store, some, own))
        others: dict[object, list[int]] = {}
        for signature, members in alike.items():
            scale, leaving = scales[members[0]], 0
            for unit in members:
                if scales[unit].given != scale.given:
                    # Some of its saved tensors cannot leave, like a leaf among its inputs; or all of them can.
                    others.setdefault((signature, *scales[unit].given), []).append(unit)
                    continue
                offload_size = scale.offload_size(profile, unit, trace)
                if offload_size is not None:
                    offload_sizes[units.units[unit].calls] = offload_size
                    leaving += offload_size.all_bytes
            if leaving > most_bytes:
                most_bytes, payload = leaving, scale.payload
        alike = others
    return offload_sizes, payload


def _forward(
    model: nn.Module, subject: Subject, profile: Profile, store: Store, first: Container[int], members: Sequence[int]
) -> tuple[dict[int, _Scale], AllocationTrace]:
    """Run a forward that measures the units in `first`; of the others it records the payload."""
    units = profile.units
    with subject.untouched(), record_allocations(profile.device) as recorder:
        scales = {
            unit: _Scale(store if unit in first else None, recorder, len(units.saved(unit))) for unit in sorted(members)
        }
        transfers = {
            unit: Transfer(store=number, leaves_after=unit, comes_before=unit) for number, unit in enumerate(scales)
        }
        offload_schedule = OffloadSchedule(
            tuple(scales.values()), transfers, lambda unit, tensor: scales[unit].saw(tensor)
        )
        tree = tuple(KeepNode(unit) for unit in range(len(units.units)))
        with installed(model, calls_of(units), tree, Settings(), offload_schedule=offload_schedule):
            subject.run()
    return scales, recorder.trace


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One tensor: the place of its storage among those that the unit saves, and the marks around its transfers."""

    place: int
    size_bytes: int
    dtype: torch.dtype
    marks: tuple[int, int, int, int, int]


@dataclass(eq=False)
class _Scale:
    """A measuring store, for one unit; without a store to try it only records its tensors."""

    store: Store | None
    recorder: AllocationRecorder
    most: int
    tried: list[_Tried] = field(default_factory=list[_Tried])
    places: dict[int, int] = field(default_factory=dict[int, int])  # by the address of a storage
    seen: int = 0
    given: list[int] = field(default_factory=list[int])  # the places of the tensors put into it

    def saw(self, tensor: Tensor) -> None:
        """Record the place of a tensor that the unit saves; of a wrapper the place of its largest part."""
        for memory in memories_of(tensor)[:1]:
            self.places[address_of(memory)] = self.seen
        self.seen += 1

    def put(self, tensor: Tensor) -> _EmptyHandle:
        """Put a tensor into the store and take it back."""
        place = self.places.get(address_of(tensor.untyped_storage()), self.most)
        self.given.append(place)
        if self.store is None:
            return _EmptyHandle()
        mark = self.recorder.mark
        before = mark("before")
        read: list[object] = []
        try:
            with held_in(read):
                handle: Handle | None = self.store.put(tensor)
        except StoreError:
            handle = None  # a strict store has no room
        if handle is None:
            return _EmptyHandle()  # in a later step it may have room for another
        put = mark("put")
        settle(handle)
        read.clear()
        left = mark("left")
        handle.prefetch()
        begun = mark("begun")
        back = handle.get()
        there = mark("there")
        del back
        if place < self.most:
            marks = before, put, left, begun, there
            self.tried.append(_Tried(place=place, size_bytes=tensor.nbytes, dtype=tensor.dtype, marks=marks))
        return _EmptyHandle()

    @property
    def payload(self) -> Payload:
        """The payload of the unit."""
        tensors = tuple((one.size_bytes, one.dtype) for one in self.tried)
        return Payload(tensors=tensors, times=max(1, round(self.seen / max(1, len(tensors)))))

    def offload_size(self, profile: Profile, unit: int, trace: AllocationTrace) -> OffloadSize | None:
        """Return the offload size of a unit with the calls of the measured one; None if nothing leaves."""
        saved, size, dropped = profile.units.saved(unit), profile.sizes[unit], profile.units.dropped(unit)
        parcels: list[Parcel] = []
        for one in self.tried:
            storage = saved[one.place]
            before, put, left, begun, there = map(trace.live_bytes_at, one.marks)
            goes = one.place in dropped  # with its graph, and so does the store's copy of it
            # Memory that something else references stays, and a store that keeps the tensor itself frees nothing.
            leaves = not goes and storage not in size.left and there - left >= one.size_bytes
            parcels.append(
                Parcel(
                    place=one.place,
                    storage=storage if storage in size.saved and storage not in size.left and not goes else None,
                    leaves=leaves,
                    bytes=there - left,
                    held_bytes=0 if goes else left - before,
                    passing_bytes=0 if goes else put - left,
                    ahead_bytes=begun - left,
                    put_peak_bytes=trace.rise_bytes_between(one.marks[0], one.marks[1]),
                    get_peak_bytes=trace.rise_bytes_between(one.marks[2], one.marks[4]),
                )
            )
        offload_size = OffloadSize(parcels=tuple(parcels))
        return offload_size if offload_size.all_bytes else None


class _EmptyHandle:
    """The handle of a tensor that is never asked for."""

    __slots__ = ("__weakref__",)

    stored_bytes = 0

    def get(self) -> Tensor:
        """Raise: the measured tensor is gone."""
        raise UnsupportedError("the step runs a backward of its own; a plan needs one that returns the loss.")

    def prefetch(self) -> None:
        """Do nothing."""
