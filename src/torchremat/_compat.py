"""What exists only because of one torch version or of `torch.compile`.

Every private name of torch that the library uses is bound here, once, so that a torch that lacks one says so when the
part that needs it is imported, by name, and not in the middle of a training step.

Supported: torch 2.11 and newer; developed and tested on 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.utils import _device, _pytree

from torchremat.errors import VersionError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    Pack = Callable[[Tensor], object]
    Unpack = Callable[[Any], Tensor]

T = TypeVar("T")
P = ParamSpec("P")


def private(path: str, *, needed_for: str) -> object:
    """Return the object at `path` below `torch`.

    Args:
        path: Attribute path without the leading `torch.`, for example `"_C._current_graph_task_id"`.
        needed_for: What fails without it, in the words of a user.

    Raises:
        VersionError: This torch has no such name.
    """
    found: object = torch
    for name in path.split("."):
        if not hasattr(found, name):
            raise VersionError(
                f"torch {torch.__version__} has no `torch.{path}`, which {needed_for} needs. torchremat supports "
                "torch 2.11 to 2.13; install one of these."
            )
        found = getattr(found, name)
    return found


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
current_node = cast("Callable[[], Node | None]", private("_C._current_autograd_node", needed_for=_REGIONS))
set_grad_mode = cast("Callable[[bool], None]", private("_C._set_grad_enabled", needed_for=_REGIONS))
stash_in_tls = cast("Callable[[str, object], None]", private("_C._stash_obj_in_tls", needed_for="a session"))
get_from_tls = cast("Callable[[str], object]", private("_C._get_obj_in_tls", needed_for="a session"))
is_in_tls = cast("Callable[[str], bool]", private("_C._is_key_in_tls", needed_for="a session"))
python_node = cast("type", private("autograd.function.BackwardCFunction", needed_for=_REGIONS))


class Registration(Protocol):
    """How torch's pytree takes a container apart."""

    flatten_fn: Callable[[object], tuple[list[object], object]]
    unflatten_fn: Callable[[list[object], object], object]


registered_containers = cast("dict[type, Registration]", _pytree.SUPPORTED_NODES)

_DEFAULT_DEVICE = "a default device"

_function_modes = cast("Callable[[], int]", private("_C._len_torch_function_stack", needed_for=_DEFAULT_DEVICE))
_function_mode = cast("Callable[[int], object]", private("_C._get_function_stack_at", needed_for=_DEFAULT_DEVICE))
private("utils._device.DeviceContext", needed_for=_DEFAULT_DEVICE)


def default_device() -> torch.device | None:
    """Return the device that a `with torch.device(...)` or `torch.set_default_device` made the default, or None.

    It is a mode of the thread that set it: a thread of autograd's has none.
    """
    for index in reversed(range(_function_modes())):
        mode = _function_mode(index)
        if isinstance(mode, _device.DeviceContext):
            return mode.device
    return None


class _Engine(NamedTuple):
    queue_callback: Callable[[Callable[[], None]], None]


_engine = cast("_Engine", private("autograd.Variable._execution_engine", needed_for=_REGIONS))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now has ended. Autograd drops it if the backward raises."""
    _engine.queue_callback(callback)


def is_hook_of_torch_checkpoint(pack: object) -> bool:
    """Return whether a pack hook was put up by `torch.utils.checkpoint`, in its forward or its recompute."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


_disable = cast("Callable[[Callable[..., object]], object]", private("_disable_dynamo", needed_for=_REGIONS))


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Keep dynamo out of `function`: inside `torch.compile` a call breaks the graph instead of being traced wrongly."""
    return cast("Callable[P, T]", _disable(function))
