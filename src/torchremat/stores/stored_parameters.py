"""A parameter whose values a store has.

NOTE [ A parameter that is not in memory ]
It is the same object, with the same gradient, hooks, version and options. What is different:

    its class     `StoredParameter`. Whatever reads it in Python, an operator, a method, an attribute, brings the values
                  back first, and finds a plain parameter
    its memory    one NaN, of its shape by strides of 0: what code in C++ reads that does not ask Python. Without memory
                  (`resize_(0)`) such a read would end the process

Its values leave only if no other code can see their memory: no other tensor lies in it, and no node has saved it. A
node that saves it while a module of an offload runs, and a region, hold a `SavedView` instead. So values that other
code holds, in an entry of a `state_dict`, say, stay and change with the training, as they do without a store.

NOTE [ What is handed back to autograd ]
The parameter itself is no other tensor in its memory, so its values leave though a list has it, or what stands for a
saved tensor. A node that gets it back reads NaN in C++. So what a region hands back is an alias, of a `SavedView` or of
the parameter, whose memory stays meanwhile; and hooks of others are given one.

NOTE [ Who moves the values of a parameter ]
A thread that holds `_lock`, in this order:

    away     the class says that readers must ask; does other code see the memory? the store takes the values;
             the entry in `_stored` says so, and the memory goes
    back     the memory comes; the entry goes; the class is plain

So a thread that reads between any two lines waits for the lock, and after an interrupt at any line the values are
found: in the store if there is an entry, else in memory. Not seen are a thread that began to read before the class
changed, unless it holds the memory (`memory_of`), and the handler of a signal, which does not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import outside_traces, without_torch_function
from torchremat._compat.tensors import holders_in_torch, tensors_in
from torchremat._compat.transforms import below_transforms, see_wrapped
from torchremat.ambient.hidden import hiding
from torchremat.errors import UnsupportedError
from torchremat.stores.base import Content, content_of
from torchremat.stores.in_catalog import InCatalog
from torchremat.stores.parameter_moves import moving, watching
from torchremat.tensors.handles import Handle, Store
from torchremat.tensors.metadata import Metadata, metadata_of
from torchremat.tensors.parts import PLAIN_CLASSES, memories_of
from torchremat.tensors.structure import tensors_in as tensors_of
from torchremat.tensors.versioned import Versioned

_lock = threading.RLock()  # a backward has a thread for each device


class Keeper(Protocol):
    """What decides when parameters are in memory.

    Attributes:
        store: Where they are else.
    """

    store: Store

    def in_memory(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a block in which those are in memory for which it decides, and after which they leave."""
        ...

    def taken_back(self, parameter: Tensor) -> Tensor | None:
        """Return the values of a parameter that are on their way out, which then stay; None if they are gone."""
        ...

    def came_back(self, parameter: Tensor, *, is_read: bool) -> None:
        """Take note of a parameter that is in memory again, as code has read it or as `bring_back` was asked to."""
        ...

    def end(self) -> None:
        """Put away what has come back, and wait until all is out."""
        ...


class StoredParameter(nn.Parameter):
    """A parameter that is not in memory. See NOTE [ A parameter that is not in memory ]."""

    @classmethod
    @outside_graphs
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Bring back all values among the arguments, unless the call reads none; then run it."""
        kwargs = kwargs or {}
        if func in _READ_NO_VALUES:
            with without_torch_function():
                return func(*args, **kwargs)
        own = [one for one in tensors_of((args, kwargs)) if type(one) in (StoredParameter, nn.Parameter)]
        # If all are plain, another thread has brought one back since, or the one that waits is where we do not find it:
        # then the call comes here again, though none of `own` has left.
        again = (func, *map(id, own)) if all(type(one) is nn.Parameter for one in own) else None
        if not own or (again is not None and again in _plain_calls.open):
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)}: somewhere in its arguments is a parameter that "
                "torchremat.offload_parameters keeps in a store. Pass it by itself, or in a list or dict."
            )
        held = [memory_of(one) for one in own]  # none may leave during the call, for another one or in another thread
        _plain_calls.open.append(again)
        try:
            return func(*args, **kwargs)
        finally:
            _plain_calls.open.pop()
            del held

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        held = memory_of(self)
        copied = nn.Parameter.__deepcopy__(self, memo)
        del held
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        held = memory_of(self)
        reduced = nn.Parameter.__reduce_ex__(self, proto)
        del held
        return reduced


class _PlainCalls(threading.local):
    """Calls in this thread that were handed here, innermost last; None for those with a parameter that was away."""

    def __init__(self) -> None:
        self.open: list[tuple[object, ...] | None] = []


_plain_calls = _PlainCalls()


_READ_NO_VALUES = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "_version", "grad", "grad_fn"),
            *("requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"),
            *("_backward_hooks", "_post_accumulate_grad_hooks"),
        )
    ),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_post_accumulate_grad_hooks")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(torch.zeros_like, torch.empty_like),
}


class _StoredValues(NamedTuple):
    """Where the values of a parameter are."""

    handle: Handle
    content: Content
    keeper: Keeper
    parameter: ReferenceType[Tensor]


# By the id of the parameter. Not an attribute of it: a recompute gives a parameter the attributes that it had.
_stored: dict[int, _StoredValues] = {}


def bring_back(parameter: Tensor, *, is_read: bool = False) -> None:
    """Bring the values of a parameter back, if a store has them.

    Args:
        parameter: The parameter.
        is_read: Whether code reads it that will not say when it is done.

    Raises:
        StoreError: They cannot be brought back. The parameter is as before.
    """
    if type(parameter) is not StoredParameter:
        return
    with moving():
        with _lock:  # See NOTE [ Who moves the values of a parameter ]
            stored = _stored.get(id(parameter))
            if stored is not None:
                with plainly():
                    left = stored.keeper.taken_back(parameter)
                    parameter.data = stored.content.back(stored.handle.get()) if left is None else left
                    for one in watching:
                        one.comes(parameter)
                del _stored[id(parameter)]
            cast("Any", parameter).__class__ = nn.Parameter
        if stored is not None:
            stored.keeper.came_back(parameter, is_read=is_read)


def _read(argument: object) -> None:
    if type(argument) is StoredParameter:
        bring_back(argument, is_read=True)


def memory_of(parameter: Tensor) -> torch.UntypedStorage:
    """Bring the values of a parameter back, and return their memory: while it is held they do not leave.

    Raises:
        StoreError: They cannot be brought back.
    """
    while True:
        bring_back(parameter, is_read=True)
        with _lock:  # another thread may have put them away again
            if type(parameter) is not StoredParameter:
                return parameter.untyped_storage()


def handle_of(parameter: Tensor) -> Handle | None:
    """Return a store's claim on the values of a parameter; None if they are in memory."""
    stored = _stored.get(id(parameter))
    return None if stored is None else stored.handle


def keeper_of(parameter: Tensor) -> Keeper | None:
    """Return what decides when a parameter that is not in memory comes back; None if it is in memory."""
    stored = _stored.get(id(parameter))
    return None if stored is None else stored.keeper


def put_away(parameter: Tensor, store: Store, keeper: Keeper) -> list[tuple[Handle, Tensor]]:
    """Put the values of a parameter into a store, unless other code sees their memory or the store has no room.

    Returns:
        The store's claim and the values, which the store may go on reading; nothing if they have stayed.

    Raises:
        StoreError: The store is strict, and has no room. The parameter is in memory.
    """
    see_wrapped(_read)
    with _lock:  # See NOTE [ Who moves the values of a parameter ]
        if not can_leave(parameter):
            return []
        if parameter.device.type != "cpu" and accelerator_of(parameter.device).is_capturing():
            raise UnsupportedError("offload_parameters: a graph that is captured would read memory that is freed.")
        try:
            cast("Any", parameter).__class__ = StoredParameter
            with plainly():
                if not _is_alone(parameter):
                    return []
                values = parameter.detach()
                content = content_of(values)
                handle = store.put(content.line(values))
                if handle is None:
                    return []
                for one in watching:
                    one.leaves(parameter)
                gone = ref(parameter, partial(_forget, id(parameter)))
                _stored[id(parameter)] = _StoredValues(handle, content, keeper, gone)
                went_out(values)
                parameter.data = stand_in(parameter.dtype, parameter.device).expand(parameter.shape)
            return [(handle, values)]
        finally:
            if id(parameter) not in _stored:
                cast("Any", parameter).__class__ = nn.Parameter


def _forget(key: int, _: object) -> None:
    _stored.pop(key, None)


def can_leave(parameter: Tensor) -> bool:
    """Return whether a parameter is one whose values can be put away and brought back as they were."""
    return (
        type(parameter) is nn.Parameter
        and parameter.is_leaf
        and (parameter.is_floating_point() or parameter.is_complex())
        and parameter.layout is torch.strided
        and parameter.is_contiguous()  # a gradient is laid out by the strides of its parameter
        and parameter.device.type != "meta"
        and not parameter.is_inference()
        and not (parameter.device.type == "cpu" and parameter.is_shared())
    )


def _is_alone(parameter: Tensor) -> bool:
    # The node that adds up gradients owns the parameter as long as a graph leads to it; `edge` owns the node.
    edge = get_gradient_edge(parameter) if parameter.requires_grad else None
    storage = [parameter.untyped_storage()]
    return holders_in_torch(parameter) == (edge is not None) and tensors_in(storage) == 1


@contextmanager
def plainly() -> Generator[None]:
    """Run our own operators on the values themselves, in whatever context a parameter is read."""
    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
        below_transforms(),
        outside_traces(),
        hiding(),
        without_torch_function(),
    ):
        yield


@cache
def stand_in(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one NaN that is the memory of parameters that are away."""
    return torch.full((), float("nan"), dtype=dtype, device=device)


class SavedView(InCatalog):
    """The object that autograd holds in place of a parameter, or of a view of one, that a node has saved."""

    __slots__ = ("_offset", "_parameter", "_size", "_stride", "_version")

    def __init__(self, parameter: Tensor, tensor: Tensor) -> None:
        self._parameter = parameter
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._version = tensor._version

    @property
    def metadata(self) -> Metadata:
        """The metadata of the view."""
        return metadata_of(self.get())

    def get(self) -> Tensor:
        """Return the view.

        Raises:
            MutationError: The parameter was written in place since.
            StoreError: It cannot be brought back.
        """
        held = memory_of(self._parameter)
        values = Versioned(self._parameter, self._version).get().detach()
        del held
        return values.as_strided(self._size, self._stride, self._offset)


# By the address of their memory: the parameters of offloads that are in memory.
parameters_in_memory: dict[int, ReferenceType[Tensor]] = {}


def came_in(parameter: Tensor) -> None:
    """Take note that a parameter is in memory for a while. A node that saves it should hold a `SavedView` of it."""
    address = parameter.untyped_storage()._cdata
    parameters_in_memory[address] = ref(parameter, partial(_is_gone, address))


def _is_gone(address: int, parameter: ReferenceType[Tensor]) -> None:
    if parameters_in_memory.get(address) is parameter:
        del parameters_in_memory[address]


def went_out(parameter: Tensor) -> None:
    """Take note that the memory of a parameter is that of any tensor from now on."""
    parameters_in_memory.pop(parameter.untyped_storage()._cdata, None)


def parameter_in(memory: torch.UntypedStorage) -> Tensor | None:
    """Return the parameter of an offload whose values lie in some memory now; None if none does."""
    found = parameters_in_memory.get(memory._cdata)
    parameter = None if found is None else found()
    is_there = type(parameter) is nn.Parameter and parameter.untyped_storage()._cdata == memory._cdata
    return parameter if is_there else None  # else it is one that got the address of its earlier memory


def put_away_all(parameters: Iterable[Tensor]) -> None:
    """Let the offloads of some parameters put away what code has read, so that a run of a step begins as others do."""
    found = [keeper for parameter in parameters if (keeper := keeper_of(parameter)) is not None]
    for keeper in {id(one): one for one in found}.values():
        keeper.end()


def saved_view_of(tensor: Tensor) -> SavedView | None:
    """Return what to hold in place of a tensor, if it lies in the memory of such a parameter, else None."""
    memories = memories_of(tensor) if type(tensor) in PLAIN_CLASSES else ()
    if not memories:
        return None
    parameter = parameter_in(memories[0])
    if parameter is None:
        return None
    is_read_alike = parameter.dtype == tensor.dtype and not tensor.is_conj() and not tensor.is_neg()
    return SavedView(parameter, tensor) if is_read_alike else None
