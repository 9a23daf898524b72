"""The state of parameters, of which a store has the tensors, and when it comes and goes.

NOTE [ State that is not in memory ]
`optimizer.state[parameter]` is a dict, in every optimizer. It becomes a dict that brings a tensor back when it
is asked for it, so any code that reads the state finds all of it: the optimizer, a trainer, `copy.deepcopy`. What has
been read is in memory again, until the parameter has made its next step.

A tensor that other code holds (an entry of a `state_dict`, a view) stays: its memory would not become free, and what
that code writes to it would be lost. So code that holds a part of the state sees it change, as without a store. The
same holds for a list or dict among the values, as of SOAP's statistics: it comes back as another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchremat._compat.tensors import holders_in_python, holders_in_torch, holders_of, tensors_in
from torchremat.stores.base import Content, content_of, land, settle
from torchremat.tensors.handles import Handle, Store
from torchremat.tensors.parts import Rebuild, inner_of, is_wrapper, rebuilding

Holder: TypeAlias = list[Any] | dict[Any, Any]


class StoredEntry:
    """A tensor that a store has, or a list or dict whose tensors it has.

    Of a tensor that wraps others, such as a DTensor, the store has the inner ones.

    Args:
        handles: The store's claims.
        bring: Returns the tensor, or a list or dict with its tensors.
    """

    __slots__ = ("_bring", "handles")

    def __init__(self, handles: list[Handle], bring: Callable[[], object]) -> None:
        self.handles = handles
        self._bring = bring

    def get(self) -> Any:
        """Return the entry, with tensors in fresh memory."""
        return self._bring()


class StateEntries(dict[object, object]):
    """The state of one parameter. See NOTE [ State that is not in memory ].

    Every way of reading a value brings it back; `dict`'s own methods show what lies here.
    """

    def __init__(self, entries: Mapping[object, object]) -> None:
        super().__init__(entries)

    # ------------------------------------------------------------------------------------------------------ the store

    @property
    def handles(self) -> list[Handle]:
        """The store's claims on the tensors that are not in memory."""
        return [handle for one in dict.values(self) if isinstance(one, StoredEntry) for handle in one.handles]

    def put_away(self, store: Store, min_bytes: int) -> list[tuple[Handle, Tensor]]:
        """Put the tensors that no other code holds into a store; return its claims, and what each may go on reading.

        Args:
            store: The store; a tensor for which it has no room stays.
            min_bytes: Smaller tensors stay.

        Raises:
            StoreError: The store is strict, and has no room. The tensor that it refused is in memory.
        """
        left: list[tuple[Handle, Tensor]] = []
        _put_away(self, store, min_bytes, left)
        return left

    def bring_back(self) -> None:
        """Bring all tensors back.

        Raises:
            StoreError: One cannot be brought back. Those before it are in memory, the others still in the store.
        """
        for key in list(dict.keys(self)):
            self._read(key, dict.__getitem__(self, key))

    def let_go(self) -> None:
        """Forget what the store does not have."""
        for key, value in list(dict.items(self)):
            if not isinstance(value, StoredEntry):
                dict.__delitem__(self, key)

    def _read(self, key: object, value: object) -> object:
        if isinstance(value, StoredEntry):
            value = value.get()
            dict.__setitem__(self, key, value)
        return value

    # ---------------------------------------------------------------------------------------------------- as any dict

    def __getitem__(self, key: object, /) -> object:
        return self._read(key, dict.__getitem__(self, key))

    def get(self, key: object, default: object = None, /) -> object:
        """Return the value of a key, or `default`."""
        return self._read(key, super().get(key, default))

    def __iter__(self) -> Iterator[object]:
        # `dict(entries)` and `{**entries}` read past `__getitem__`, unless this is defined.
        return super().__iter__()

    def values(self) -> Any:
        """Return a view of all values, which are brought back."""
        self.bring_back()
        return super().values()

    def items(self) -> Any:
        """Return a view of all items, which are brought back."""
        self.bring_back()
        return super().items()

    def pop(self, key: object, /, *default: object) -> Any:
        """Remove a key and return its value."""
        self.get(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[object, object]:
        """Remove and return the last item."""
        self.bring_back()
        return super().popitem()

    def setdefault(self, key: object, default: object = None, /) -> object:
        """Return the value of a key, set to `default` if it is missing."""
        self.get(key)
        return super().setdefault(key, default)

    def copy(self) -> dict[object, object]:
        """Return a plain dict of all values."""
        self.bring_back()
        return dict(super().items())

    def __or__(self, other: Any, /) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any, /) -> Any:
        return dict(other) | self.copy()

    def __eq__(self, other: object, /) -> bool:
        self.bring_back()
        return super().__eq__(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  as of any dict

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Callable[..., object], tuple[object, ...]]:
        # A copy, or what another process reads, is a plain dict.
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        return dict.__repr__(self.copy())


def _put_away(own: Holder, store: Store, min_bytes: int, left: list[tuple[Handle, Tensor]]) -> None:
    """Put the tensors of a holder into a store, and add them to `left`. See `StateEntries.put_away`."""
    for key in _keys(own):
        held = [_item(own, key)]
        if type(held[0]) in (list, dict):
            if holders_of(held) == 1:
                inner, had = held.pop(), len(left)
                try:
                    _put_away(inner, store, min_bytes, left)
                finally:
                    if len(left) > had:
                        handles = [handle for handle, _ in left[had:]]
                        _set_item(own, key, StoredEntry(handles, partial(_make_from, inner)))
        elif isinstance(held[0], Tensor) and held[0].nbytes >= min_bytes and _is_alone(held):
            tensor = held.pop()
            stored = _store(tensor, store, min_bytes)
            if stored is not None:
                _set_item(own, key, stored)
                left += [(handle, tensor) for handle in stored.handles]


def _make_from(stored: Holder) -> Holder:
    """Return a new list or dict as one was before its tensors were put away, with tensors in fresh memory."""
    items = {key: one.get() if isinstance(one := stored[key], StoredEntry) else one for key in _keys(stored)}
    return list(items.values()) if isinstance(stored, list) else items


def _keys(own: Holder) -> list[Any]:
    return list(range(len(own))) if isinstance(own, list) else list(dict.keys(own))


def _item(own: Holder, key: Any) -> Any:
    return own[key] if isinstance(own, list) else dict.__getitem__(own, key)


def _set_item(own: Holder, key: Any, value: StoredEntry) -> None:
    if isinstance(own, list):
        own[key] = value
    else:
        dict.__setitem__(own, key, value)


def _is_alone(held: list[Tensor]) -> bool:
    """Return whether a tensor, held by this list and by one owner, has no other owner, nor has its memory."""
    if is_wrapper(held[0]):
        parts = inner_of(held[0])
        inner = [[parts.pop(name)] for name in [*parts]]
        return holders_in_python(held) == 1 and all(
            _is_alone(cast("list[Tensor]", one)) for one in inner if isinstance(one[0], Tensor)
        )
    if type(held[0]) is not Tensor or held[0].layout is not torch.strided or held[0].device.type == "meta":
        return False
    if held[0].requires_grad or held[0].is_conj() or held[0].is_neg() or vars(held[0]):
        return False
    storage = [held[0].untyped_storage()]
    return holders_in_torch(held[0]) == 0 and holders_in_python(held) == 1 and tensors_in(storage) == 1


def _store(tensor: Tensor, store: Store, min_bytes: int) -> StoredEntry | None:
    if is_wrapper(tensor):
        inner = inner_of(tensor)
        parts = {name: one for name, one in inner.items() if isinstance(one, Tensor)}
        found = {name: own for name, one in parts.items() if (own := _store(one, store, min_bytes)) is not None}
        if not found or len(found) < len(parts):
            return None
        bring = partial(_rebuild_stored, {**inner, **found}, rebuilding(tensor))
        return StoredEntry([handle for one in found.values() for handle in one.handles], bring)
    if tensor.nbytes < max(min_bytes, 1):
        return None
    content = content_of(tensor)
    handle = store.put(content.line(tensor))
    return None if handle is None else StoredEntry([handle], partial(_back, handle, content))


def _back(handle: Handle, content: Content) -> Tensor:
    return content.back(handle.get()).detach()  # for itself: a view would keep its base alive


def _rebuild_stored(inner: Mapping[str, object], rebuild: Rebuild) -> Tensor:
    return rebuild({name: one.get() if isinstance(one, StoredEntry) else one for name, one in inner.items()})


State = Mapping[Any, Any]


class StateMover:
    """Moves the state of an optimizer to a store and back: in ahead of its part of the step, and out after it.

    The parts of a step come in the same order in each step: that of backward, or that of the optimizer's groups. For
    the parts a, b, c:

        a steps    take a │ step │ put a            │ begin b
        b steps    take b │ step │ put b │ a is out │ begin c
        c steps    take c │ step │ put c │ b is out

    A store may read a tensor, and fill the memory for one, in threads of its own. What it reads is held here until it
    is out, and what it fills is allocated here; so bytes come and go at fixed places of the program, and at most two
    parts' state is in memory, however fast the store is.

    Args:
        min_bytes: Smaller tensors stay in memory.
    """

    def __init__(self, store: Store, min_bytes: int) -> None:
        self.store = store
        self.min_bytes = min_bytes
        self._leaving: list[tuple[Handle, Tensor]] = []
        self._parts: list[tuple[int, list[ReferenceType[StateEntries]]]] = []  # of the open step, in their order
        self._next: dict[int, list[ReferenceType[StateEntries]]] = {}  # by the first parameter of the part before

    def begin(self, state: State) -> None:
        """Put away what was read between two steps, or is new: all that is in memory."""
        for parameter in list(state):
            self.put_away(state, [parameter])

    @property
    def knows_order(self) -> bool:
        """Whether it knows what to bring ahead, from a step before."""
        return bool(self._next)

    def put_away(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Put the state of some parameters into the store, and wait until it is out."""
        self._leave(state, parameters)
        self._settle()

    def take(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Bring the state of some parameters back.

        Raises:
            StoreError: It cannot be brought back.
        """
        for one in parameters:
            entries = state.get(one)
            if isinstance(entries, StateEntries):
                entries.bring_back()

    def give(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Put the state of some parameters, which have stepped, into the store, and begin to bring the next.

        Raises:
            StoreError: The store is strict and has no room, or its medium failed. What it has not taken is in memory.
        """
        before, self._leaving = self._leaving, []
        entries = self._leave(state, parameters)
        for handle, _ in before:
            settle(handle)
        del before
        first = id(parameters[0])
        self._parts.append((first, entries))
        for one in self._next.get(first, ()):
            following = one()
            for handle in () if following is None else following.handles:
                handle.prefetch()

    def end(self) -> None:
        """Wait until all is out, and learn the order of the parts."""
        self._settle()
        parts, self._parts = self._parts, []
        self._next = {first: entries for (first, _), (_, entries) in pairwise(parts)}

    def give_back(self, state: State) -> None:
        """Bring all state back, into plain dicts."""
        self._settle()
        for parameter, entries in list(state.items()):
            if isinstance(entries, StateEntries):
                cast("dict[Any, Any]", state)[parameter] = entries.copy()

    def _leave(self, state: State, parameters: Sequence[Tensor]) -> list[ReferenceType[StateEntries]]:
        found: list[ReferenceType[StateEntries]] = []
        for one in parameters:
            entries = state.get(one)
            if type(entries) is dict:
                entries = StateEntries(cast("dict[object, object]", entries))
                cast("dict[Any, Any]", state)[one] = entries
            if isinstance(entries, StateEntries):
                found.append(ref(entries))
                self._leaving += entries.put_away(self.store, self.min_bytes)
        return found

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, []
        for handle, _ in leaving:
            settle(handle)
        if leaving:
            land(self.store, all_of_it=True)
