"""Autograd's saved tensor as a value in Python.

An operation keeps each tensor for its backward as a `SavedVariable` of C++: a tensor at a version, or the object that a
pair of hooks has made of it. A `SavedTensor` is one that Python code can own, with everything that the C++ one can do.
It wraps a real one: versions, edges, hooks and error texts are torch's own, of the installed torch.

NOTE [ An output knows its node weakly ]
A node that saves its own output must not own that output's `grad_fn`, which is the node: a cycle through C++ that no
collector sees. Autograd keeps only the data and is told the node when it unpacks. Python cannot set the node of a
tensor, but a `SavedVariable` made for an in-place operation on a view knows its node weakly and need not be told. So an
output is saved as if it were one of those, and the node that the caller names is compared with the one it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchremat._compat.autograd import make_saved_tensor
from torchremat.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from torchremat._compat.autograd import RawSavedTensor

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
_HOOKS_ON_FREED = (
    "Calling register_hooks on a saved tensor after it has been freed. Saved intermediate values of the graph are "
    "freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved variables after calling backward."
)
_HOOKS_ON_NONE = "Calling register_hooks on a saved tensor with value None is forbidden"
_HOOKS_TWICE = (
    "Calling register_hooks on a saved tensor whose hooks have already been set. Hint: only one pair of hooks is "
    "allowed at a time."
)
_DETACHED = (
    "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_().This is not supported, please "
    "use out-of-place `.detach()` instead"
)
_PACK_WRITES = (
    "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack hook cannot be "
    "modified by in-place operations as this can lead to unexpected side-effects. Please open an issue if you need to "
    "perform in-place operations on the input to a pack hook."
)


class SavedTensor:
    """A tensor at a version, as autograd saves it: to be unpacked as it was, or an error.

    Hooks that are active when it is made (`torch.autograd.graph.saved_tensors_hooks`, regions, stores) pack it, only
    the innermost pair; without active hooks, hooks can be registered later. Without hooks the tensor itself is kept,
    and a write to it makes `unpack` raise. Errors are autograd's own: `RuntimeError` and `TypeError` in its words.

    >>> import torch
    >>> from torchremat import SavedTensor
    >>> h = torch.ones(2, requires_grad=True) * 3
    >>> saved = SavedTensor(h)
    >>> saved.unpack() is h
    True
    >>> saved.register_hooks(torch.Tensor.tolist, torch.tensor)
    >>> sum(saved.retrieve_unpack_hook_data()[1])
    6.0
    >>> saved.unpack().grad_fn is h.grad_fn
    True

    Args:
        tensor: The tensor to save; any shape, dtype and layout, or None.
        is_output: Whether its owner is an object that its own `grad_fn` owns. Then the node is not kept alive, and
            `unpack` must be given the node.
        is_inplace_on_view: Whether it is an output that an in-place operation has written into a view; its node is not
            kept alive either, and `unpack` finds the node as long as other code keeps it alive.

    Raises:
        RuntimeError: It is an inference tensor, or a pack hook writes to it.
        UnsupportedError: `is_inplace_on_view` for a tensor that is no output, or for a leaf.
    """

    __slots__ = ("__weakref__", "_is_leaf", "_is_none", "_is_own", "_needs_node", "_raw", "_version")

    def __init__(self, tensor: Tensor | None, *, is_output: bool = False, is_inplace_on_view: bool = False) -> None:
        self._raw: RawSavedTensor | None = None
        self._is_none = tensor is None
        if tensor is None:
            return
        self._is_leaf = tensor.is_leaf
        if is_inplace_on_view and (self._is_leaf or not is_output):
            raise UnsupportedError(
                "is_inplace_on_view=True: the tensor must be the output of an in-place operation on a view, with "
                f"is_output=True and a grad_fn. Here is_output={is_output}, grad_fn={tensor.grad_fn}."
            )
        self._is_own = is_output and not self._is_leaf  # a leaf has no node to make a cycle with
        # See NOTE [ An output knows its node weakly ]
        self._raw = make_saved_tensor(tensor, is_output, self._is_own)
        self._needs_node = self._is_own and not is_inplace_on_view
        self._version = tensor._version

    def unpack(self, saved_for: Node | None = None) -> Tensor | None:
        """Return the tensor: the one that was saved, or with hooks or for an output an alias with the same `grad_fn`.

        Args:
            saved_for: The node that owns this, whose output the tensor is; without effect for other tensors.

        Raises:
            RuntimeError: The tensor was written in place since, detached in place, or freed.
            TypeError: An unpack hook has returned no tensor.
            UnsupportedError: The tensor is not an output of the node `saved_for`.
        """
        if self._is_none:
            return None
        raw = self._raw
        if raw is None:
            raise RuntimeError(_FREED)
        if self._needs_node:
            return self._attached(raw, saved_for)
        if saved_for is not None and not self._is_leaf and raw.unpack_hook is None:
            data: Tensor = raw.data
            if data.grad_fn is None and data._version == self._version:
                return data  # detached in place, which matters only to a caller that cannot name a node
        return raw.unpack()

    def _attached(self, raw: RawSavedTensor, node: Node | None) -> Tensor:
        if node is None:
            raise RuntimeError(_DETACHED)
        tensor = raw.unpack()
        if tensor.grad_fn is not node:
            raise UnsupportedError(
                f"saved_for={node.name()}: the saved tensor is an output of another node, {tensor.grad_fn}, and can be "
                "unpacked for that one alone. Save it with is_output=False to unpack it anywhere."
            )
        return tensor

    def register_hooks(self, pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]) -> None:
        """Let `pack` convert the tensor now, and `unpack` convert the result back each time the tensor is asked for.

        If `pack` raises, the state is as before. (Autograd's own saved tensor is lost then.)

        Args:
            pack: Gets the tensor without its graph, and must not write to it.
            unpack: Gets the result of `pack`.

        Raises:
            RuntimeError: Hooks are set already, the tensor is None or freed, or `pack` has written to it.
            TypeError: A hook is not callable.
        """
        for hook in (pack, unpack):
            if not callable(hook):
                raise TypeError(f"register_hooks: a hook must be callable, got {type(hook).__name__}.")
        if self._is_none:
            raise RuntimeError(_HOOKS_ON_NONE)
        raw = self._raw
        if raw is None:
            raise RuntimeError(_HOOKS_ON_FREED)
        if raw.unpack_hook is not None:
            raise RuntimeError(_HOOKS_TWICE)
        data: Tensor = raw.data
        _ = data.grad_fn  # raises if a write has left the tensor without a graph; `pack` must not be called then
        version = data._version
        with torch.no_grad():
            packed = pack(data if self._is_own else data.detach())  # the kept alias of an output has no graph
        if data._version != version:
            raise RuntimeError(_PACK_WRITES)
        raw.register_hooks(lambda _: packed, unpack)

    def retrieve_unpack_hook_data(self) -> tuple[Callable[[Any], Tensor], object] | None:
        """Return the unpack hook and its future argument, or None without hooks."""
        raw = self._raw
        if raw is None or raw.unpack_hook is None:
            return None
        return raw.unpack_hook, raw.data

    def reset_data(self) -> None:
        """Free the tensor and the hooks; `unpack` raises from now on."""
        self._raw = None
