"""Private parts of autograd: hooks for saved tensors, nodes, backward calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from torchremat._compat.binding import private

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


_REGIONS = "recomputing regions"

push_saved_tensor_hooks = cast(
    "Callable[[Pack, Unpack], None]", private("_C._autograd._push_saved_tensors_default_hooks", needed_for=_REGIONS)
)
pop_saved_tensor_hooks = cast(
    "Callable[[], None]", private("_C._autograd._pop_saved_tensors_default_hooks", needed_for=_REGIONS)
)
top_saved_tensor_hooks = cast(
    "Callable[[bool], tuple[Pack, Unpack] | None]",
    private("_C._autograd._top_saved_tensors_default_hooks", needed_for=_REGIONS),
)
current_graph_task = cast("Callable[[], int]", private("_C._current_graph_task_id", needed_for=_REGIONS))
retains_graph = cast(
    "Callable[[], bool]", private("_C._autograd._get_current_graph_task_keep_graph", needed_for=_REGIONS)
)
current_node = cast("Callable[[], Node | None]", private("_C._current_autograd_node", needed_for=_REGIONS))
_is_run = cast("Callable[[Node], bool]", private("_C._will_engine_execute_node", needed_for="a session"))
set_grad_mode = cast("Callable[[bool], None]", private("_C._set_grad_enabled", needed_for=_REGIONS))
python_node = cast("type", private("autograd.function.BackwardCFunction", needed_for=_REGIONS))


# Runs a function when the running backward has ended. Autograd drops the function if the backward raises.
at_end_of_backward = cast(
    "Callable[[Callable[[], None]], None]",
    private("autograd.Variable._execution_engine.queue_callback", needed_for=_REGIONS),
)

# A view of the negative of a tensor, made by setting a bit.
negated = cast("Callable[[Tensor], Tensor]", private("_neg_view", needed_for="stores"))


# A context in which writes to tensors leave their versions as they are.
preserved_versions = cast(
    "Callable[[tuple[Tensor, ...]], AbstractContextManager[None]]",
    private("autograd._unsafe_preserve_version_counter", needed_for="measuring released gradients"),
)


def is_accumulating() -> bool:
    """Return whether a backward is now adding a gradient to a leaf's gradient."""
    node = current_node()
    return node is not None and node.name().endswith("AccumulateGrad")


def leads_elsewhere() -> bool:
    """Return whether the running node has an edge which its backward does not follow; True if unknown."""
    node = current_node()
    return node is None or any(
        next_node is not None and not _is_followed(next_node) for next_node, _ in node.next_functions
    )


def _is_followed(node: Node) -> bool:
    try:
        return _is_run(node)
    except RuntimeError:  # the backward was asked for the gradient of this leaf
        return True


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
