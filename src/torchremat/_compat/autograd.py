"""Private parts of autograd: hooks for saved tensors, nodes, backward calls, the custom Function that saves.

Also the objects that torch hands over from the thread that calls a backward to the threads in which it runs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import ReferenceType, ref

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from torchremat._compat.binding import private
from torchremat.errors import VersionError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    Pack = Callable[[Tensor], object]
    Unpack = Callable[[Any], Tensor]

    class RawSavedTensor(Protocol):
        """Torch's own saved tensor: the value of `grad_fn._raw_saved_*`."""

        @property
        def data(self) -> Any:
            """The tensor; the pack hook's result if hooks are set; None if it is None or freed."""
            ...

        @property
        def unpack_hook(self) -> Unpack | None: ...

        def register_hooks(self, pack: Pack, unpack: Unpack, /) -> None: ...

        def unpack(self) -> Tensor:
            """Torch 2.11 lacks this method."""
            ...


_bind = partial(private, needed_for="recomputing regions")

push_saved_tensor_hooks: Callable[[Pack, Unpack], None] = _bind("_C._autograd._push_saved_tensors_default_hooks")
pop_saved_tensor_hooks: Callable[[], None] = _bind("_C._autograd._pop_saved_tensors_default_hooks")
top_saved_tensor_hooks: Callable[[bool], tuple[Pack, Unpack] | None] = _bind(
    "_C._autograd._top_saved_tensors_default_hooks"
)
current_graph_task: Callable[[], int] = _bind("_C._current_graph_task_id")
retains_graph: Callable[[], bool] = _bind("_C._autograd._get_current_graph_task_keep_graph")
current_node: Callable[[], Node | None] = _bind("_C._current_autograd_node")
_is_run: Callable[[Node], bool] = private("_C._will_engine_execute_node", needed_for="a session")
set_grad_mode: Callable[[bool], None] = _bind("_C._set_grad_enabled")
sequence_number: Callable[[], int] = _bind("_C._autograd._get_sequence_nr")
python_node: type = _bind("autograd.function.BackwardCFunction")


# Runs a function when the running backward has ended. Autograd drops the function if the backward raises.
at_end_of_backward: Callable[[Callable[[], None]], None] = _bind("autograd.Variable._execution_engine.queue_callback")


def enter_backward(entered: set[int], at_end: Callable[[int], object] | None = None) -> None:
    """Add the backward that runs, if one does, to those that were `entered`, until it ends.

    Args:
        entered: The graph tasks of backwards that were entered. One that raises stays.
        at_end: Is called with the graph task when it is no longer among them.
    """
    task = current_graph_task()
    if task >= 0 and task not in entered:
        entered.add(task)
        at_end_of_backward(partial(_leave_backward, entered, task, at_end))


def _leave_backward(entered: set[int], task: int, at_end: Callable[[int], object] | None) -> None:
    entered.discard(task)
    if at_end is not None:
        at_end(task)


_leaf = torch.ones((), device="cpu", requires_grad=True)


def drop_left_nodes() -> None:
    """Free the nodes that a failed backward has left in this thread's queue, with all that their graphs have saved.

    The engine frees them in the thread's next backward, so this runs the smallest one, without any operator.
    """
    torch.autograd.grad(_leaf, _leaf, _leaf)


# A view of the negative of a tensor, made by setting a bit.
negated: Callable[[Tensor], Tensor] = private("_neg_view", needed_for="stores")


# A context in which writes to tensors leave their versions as they are.
preserved_versions: Callable[[tuple[Tensor, ...]], AbstractContextManager[None]] = private(
    "autograd._unsafe_preserve_version_counter", needed_for="measuring released gradients"
)


def is_accumulating(around: Node | None) -> bool:
    """Return whether a backward is now adding a gradient to a leaf's gradient.

    Args:
        around: The node that ran already where the code in question began, as with code in a hook of a leaf; it adds
            its gradient after that code.
    """
    node = current_node()
    return node is not None and node is not around and node.name().endswith("AccumulateGrad")


def leads_elsewhere() -> bool:
    """Return whether the running node has an edge which its backward does not follow; True if unknown."""
    node = current_node()
    return node is None or any(
        next_node is not None and not is_followed(next_node) for next_node, _ in node.next_functions
    )


def is_followed(node: Node) -> bool:
    """Return whether the running backward computes a gradient for a node."""
    try:
        return _is_run(node)
    except RuntimeError:  # the backward was asked for the gradient of this leaf
        return True


def notes_of(node: Node) -> dict[str, object]:
    """Return notes that stay with a node, also while no Python code refers to it."""
    return cast("dict[str, object]", node.metadata)  # a property, and a method for type checkers


def packed_in(node: Node, slot: str) -> object:
    """Return the object that a saved-tensor hook has packed into a slot of a node; a tensor or None without hooks."""
    return getattr(node, f"_raw_saved_{slot}").data


def make_saved_tensor(tensor: Tensor, is_output: bool, is_inplace_on_view: bool) -> RawSavedTensor:
    """Return a saved tensor of torch's own, which belongs to no node.

    Raises:
        VersionError: This torch cannot make one.
    """
    return _maker()(tensor, is_output, is_inplace_on_view)


def unpacks_alone(raw: RawSavedTensor) -> bool:
    """Return whether a slot of a node can be unpacked without the others of the same name; torch 2.11 cannot do it."""
    return hasattr(raw, "unpack")


@cache
def _maker() -> Callable[[Tensor, bool, bool], RawSavedTensor]:
    private("_C._autograd.SavedTensor.unpack_hook", needed_for="a SavedTensor")
    found = private("_C._autograd._make_saved_tensor", needed_for="a SavedTensor", since=(2, 13))
    return cast("Callable[[Tensor, bool, bool], RawSavedTensor]", found)


# NOTE [ A Function that saves ]
# Up to torch 2.13 the `apply` of a Function had a Python frame, from 2.14 on it has none, so a Function is identified
# by a call that every version makes: `ctx.save_for_backward`.
#
# The tensors that a Function passes to `save_for_backward` are saved when its forward has returned. Until then the
# context has them in `to_save`; from then on the node holds them. A Function without grad saves nothing, and its
# context is gone. So the Function that saves is the last one that has called, is alive, has nothing in `to_save`, and
# has not saved all of it yet. Contexts are held weakly, so that nothing lives longer for it.


@dataclass(slots=True)
class _Called:
    """A call of `save_for_backward`: its Function, and how many of its tensors have not been saved yet."""

    context: ReferenceType[Any]
    name: str
    left: int


@dataclass  # slots would be the same in all threads
class _RunningCalls(threading.local):
    """The calls of this thread whose tensors are not all saved, innermost last."""

    open: list[_Called] = field(default_factory=list[_Called])

    def settle(self) -> None:
        """Forget the innermost calls that are done."""
        while self.open and (self.open[-1].context() is None or not self.open[-1].left):
            self.open.pop()


_calls = _RunningCalls()
_watchers = 0
_lock = threading.Lock()
_save_for_backward = FunctionCtx.save_for_backward


def _noting(self: FunctionCtx, *tensors: object) -> None:
    cast("Any", _save_for_backward)(self, *tensors)
    if isinstance(self, BackwardCFunction):  # not the stand-in for a context while code is traced
        _calls.settle()
        name = cast("type", cast("Any", self)._forward_cls).__name__
        _calls.open.append(_Called(ref(self), name, sum(one is not None for one in tensors)))


@contextmanager
def noted_functions() -> Generator[None]:
    """Let `saving_function` track the custom Functions that are called in the block, in any thread."""
    global _watchers
    with _lock:
        _watchers += 1
        FunctionCtx.save_for_backward = _noting
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if not _watchers:
                FunctionCtx.save_for_backward = _save_for_backward
        _calls.settle()


def saving_function() -> str | None:
    """Return the name of the custom Function that is saving a tensor now, None if none is.

    Call it in `noted_functions()`, once for each tensor that is saved.
    """
    _calls.settle()  # See NOTE [ A Function that saves ]
    called = _calls.open[-1] if _calls.open else None
    context = called.context() if called is not None else None
    if called is None or context is None or context.to_save is not None:
        return None
    called.left -= 1
    return called.name


# NOTE [ What torch holds of a stashed object ]
#
# Torch 2.11 releases one reference when another object is stored under the same key, but has taken none: the object is
# freed while in use, and the process crashes or continues with whatever lies there now. So on that torch the object
# gets one extra reference for torch to release. Whether torch takes one itself is tested on an unused object; this goes
# with the last torch that takes none.
#
# When a thread ends, torch releases the object that the thread has under a key, None as well, and needs the GIL for it:
# if the interpreter is shutting down meanwhile, the process is aborted. So a key is removed. A torch that cannot do so
# (before https://github.com/pytorch/pytorch/pull/182083) gets None in its place.

_SESSION = "a session"

_stash: Callable[[str, object], None] = private("_C._stash_obj_in_tls", needed_for=_SESSION)
get_from_tls: Callable[[str], object] = private("_C._get_obj_in_tls", needed_for=_SESSION)
is_in_tls: Callable[[str], bool] = private("_C._is_key_in_tls", needed_for=_SESSION)


def _stash_referenced(key: str, value: object, /) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _stash(key, value)


def _stash_none(key: str, /) -> None:
    stash_in_tls(key, None)


def _bound() -> tuple[Callable[[str, object], None], Callable[[str], None]]:
    """Return the functions that store an object under a key and that remove it."""
    # See NOTE [ What torch holds of a stashed object ]
    key, probe = "torchremat.probe", object()
    before = sys.getrefcount(probe)
    _stash(key, probe)
    stash = _stash
    if sys.getrefcount(probe) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
        stash = _stash_referenced
    try:
        remove: Callable[[str], None] = private("_C._remove_obj_from_tls", needed_for=_SESSION)
    except VersionError:
        remove = _stash_none
        stash(key, None)
    else:
        remove(key)
    return stash, remove


stash_in_tls, remove_from_tls = _bound()

_active = cast("dict[int, threading.Thread]", threading._active)  # pyright: ignore[reportAttributeAccessIssue]


def is_pythons_thread() -> bool:
    """Return whether Python started this thread, and not torch, whose threads serve all callers of a backward."""
    # Asking for the current thread would create a dummy object for a thread that is not Python's.
    known = _active.get(threading.get_ident())
    return known is not None and not isinstance(known, threading._DummyThread)
