"""The objects that autograd holds in place of saved tensors, and how compiled autograd unpacks them.

The autograd engine calls an unpack hook when a node runs, and drops the packed object once the node has run. Compiled
autograd instead traces a whole backward into one graph, hooks included, and holds all packed objects to its end, so the
owner of the packed object no longer determines the tensor's lifetime (see NOTE [ Who owns a stored tensor ]).
To still keep each tensor only while a node needs it:

    unpack(packed)                     the hook: what the engine calls
        traced as  operator(packed)    one call in the graph; the packed object is an input of the graph, a black box
            runs   packed.hand_out(last=...)    recomputes, or reads from a store; keeps nothing after the last time

The compiler knows only the metadata of the tensor, which is part of the graph's guards.

NOTE [ What an operator may return ]
Inductor reuses the memory of an operator's result as soon as the result has no more readers. A saved tensor may be a
view of a parameter, or of a tensor that another node has yet to read: then the operator returns a copy. Backends that
never reuse such memory get the tensor.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat._compat.autograd import at_end_of_backward, current_graph_task, retains_graph
from torchremat._compat.compiled_autograd import (
    BlackBoxMeta,
    as_outside_of_operators,
    empty_stand_ins,
    is_shared,
    operator,
    register_black_box,
    remember_stand_in,
    reuses_memory,
)
from torchremat._compat.dynamo import traced_as
from torchremat.errors import UnsupportedError
from torchremat.tensors.metadata import Metadata, empty_of, metadata_of, without_repeats

Hook = TypeVar("Hook", bound=Callable[[Any], Tensor])


class Owner(Protocol):
    """The owner of tensors that are kept for a backward."""

    def forget(self, key: int, /) -> None:
        """Release everything that is kept for the backward of that number."""
        ...


class Packed(metaclass=BlackBoxMeta):
    """The object that autograd holds in place of a saved tensor."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register_black_box(cls, guarded="metadata")

    @property
    @abstractmethod
    def metadata(self) -> Metadata:
        """The metadata of the tensor; the same before and after it is handed out."""

    @property
    @abstractmethod
    def owners(self) -> Iterable[Owner]:
        """The owners that may keep tensors to the end of a backward on behalf of this object."""

    @abstractmethod
    def hand_out(self, *, last: bool) -> Tensor:
        """Return the tensor, without graph, to a node of a compiled backward.

        Args:
            last: Whether no further request follows, so that nothing need be kept. The object itself lives on.
        """

    @abstractmethod
    def emptied(self) -> Packed:
        """Return an object with the same metadata and nothing else, of a class that the same operator takes."""

    def __deepcopy__(self, memo: object) -> Packed:
        # Compilers copy the inputs of a trace.
        return self.emptied()


def unpacked_in_graphs(packed: type[Packed], name: str) -> Callable[[Hook], Hook]:
    """Let compiled autograd unpack objects of a class by an operator, when a node needs the tensor.

    Decorates the unpack hook, which must be a plain function; for the engine it stays unchanged.

    Args:
        packed: The class; its subclasses are included.
        name: The name of the operator.
    """
    unpack = operator(name, "bool reuses_memory, bool is_differentiated", _unpack, _shapes, packed)

    def traced(packed: Packed) -> Tensor:
        return unpack(packed, reuses_memory(), torch.is_grad_enabled())

    return traced_as(traced)


def _unpack(packed: Packed, reuses_memory: bool, is_differentiated: bool) -> Tensor:
    if is_differentiated:
        raise UnsupportedError(DIFFERENTIATED)
    empty_stand_ins(lambda one: one.emptied())
    task = current_graph_task()
    last = task >= 0 and not retains_graph()
    metadata = packed.metadata
    if task >= 0:
        _end_of(task).add(packed.owners)
    with as_outside_of_operators():
        tensor = packed.hand_out(last=last)
        if tensor.layout is not torch.strided:
            raise UnsupportedError(_is_no_plain_tensor(f"tensor of layout {tensor.layout}"))
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            raise UnsupportedError(_is_no_plain_tensor(type(tensor).__name__))
        # A copy of a lazily conjugated tensor has the memory that the graph expects.
        tensor = tensor.detach().resolve_conj().resolve_neg()
    is_not_ours = is_shared(tensor) or tensor.data_ptr() % _ALIGNMENT != 0
    if metadata_of(tensor) != metadata or (reuses_memory and is_not_ours):
        # See NOTE [ What an operator may return ]
        copy = empty_of(metadata)
        single = without_repeats(copy.shape, copy.stride())
        copy[single].copy_(tensor[single])
        return copy
    return tensor


# The alignment that generated kernels for devices expect of an address.
_ALIGNMENT = 16


def _shapes(packed: Packed, reuses_memory: bool, is_differentiated: bool) -> Tensor:
    remember_stand_in(packed)
    strides = packed.metadata[3]
    if not isinstance(strides, tuple):
        raise UnsupportedError(_is_no_plain_tensor(f"tensor of layout {strides}"))
    return empty_of(packed.metadata)


class _End:
    """Lets owners forget at the end of a backward.

    Compiled autograd never calls callbacks that wait for the end of a backward, but drops them, as the engine does
    after a backward that raised.
    """

    __slots__ = ("__weakref__", "_owners", "_task")

    def __init__(self, task: int) -> None:
        self._task = task
        self._owners: dict[int, ReferenceType[Owner]] = {}

    def add(self, owners: Iterable[Owner]) -> None:
        for owner in owners:
            self._owners[id(owner)] = ref(owner)

    def __call__(self) -> None:
        """Do nothing yet: it is dropped right after."""

    def __del__(self) -> None:
        for alive in self._owners.values():
            owner = alive()
            if owner is not None:
                owner.forget(self._task)


class _LastBackward(threading.local):
    """The end of the last backward in a thread that has unpacked a tensor."""

    task = -1
    end: ReferenceType[_End] | None = None


_ends = _LastBackward()


def _end_of(task: int) -> _End:
    end = _ends.end() if _ends.end is not None and _ends.task == task else None
    if end is None:
        end = _End(task)
        at_end_of_backward(end)  # the queue of callbacks owns it
        _ends.task, _ends.end = task, ref(end)
    return end


DIFFERENTIATED = (
    "compiled autograd: create_graph=True would lose what flows through saved tensors that are recomputed or come back "
    "from a store, and second derivatives would be wrong. Run this backward under "
    "`torch._dynamo.compiled_autograd._disable()`, or outside of compiled autograd."
)


def _is_no_plain_tensor(what: str) -> str:
    return (
        f"compiled autograd: a saved tensor is a {what}, and graphs are made for plain tensors with strides. Run this "
        "backward outside of compiled autograd."
    )
