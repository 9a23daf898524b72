"""What exists only because of one torch version or of `torch.compile`.

Every private name of torch that the library uses is bound here, once, so that a torch that lacks one says so when the
part that needs it is imported, by name, and not in the middle of a training step.

Supported: torch 2.11 and newer; developed and tested on 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils import checkpoint as _checkpoint

from torchremat.errors import VersionError

if TYPE_CHECKING:
    from types import CodeType, FunctionType

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
retains_graph = cast(
    "Callable[[], bool]", private("_C._autograd._get_current_graph_task_keep_graph", needed_for=_REGIONS)
)
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

_AMBIENT = "restoring what surrounds a recompute"


class _GlobalState(Protocol):
    def check(self) -> bool: ...


# Autocast, default dtype, determinism and more, as they are in the thread that makes it; `check()` tells whether they
# still are, at a tenth of the price of asking for each.
GlobalState = cast("type[_GlobalState]", private("_C._dynamo.guards.GlobalStateGuard", needed_for=_AMBIENT))


class NumericFlag(NamedTuple):
    """A setting of the whole process, or of a thread, that decides by which kernel a number is computed."""

    read: Callable[[], object]
    write: Callable[[Any], None]


def _flag(name: str, setter: str | None = None) -> NumericFlag:
    getter = cast("Callable[[], object]", private(f"_C._get_{name}", needed_for=_AMBIENT))
    return NumericFlag(getter, cast("Callable[[Any], None]", private(f"_C._set_{setter or name}", needed_for=_AMBIENT)))


def _precision(backend: str, operation: str) -> NumericFlag:
    getter = cast("Callable[[str, str], object]", private("_C._get_fp32_precision_getter", needed_for=_AMBIENT))
    setter = cast("Callable[[str, str, Any], None]", private("_C._set_fp32_precision_setter", needed_for=_AMBIENT))
    return NumericFlag(partial(getter, backend, operation), partial(setter, backend, operation))


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value)


_BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)
_CUDA_FLAGS = (
    ("cudnn_enabled", None),
    ("cudnn_benchmark", None),
    ("cudnn_deterministic", None),
    ("cublas_allow_fp16_reduced_precision_reduction", None),
    ("cublas_allow_bf16_reduced_precision_reduction", None),
    ("cublas_allow_fp16_accumulation", None),
    ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    ("cudnn_sdp_enabled", "sdp_use_cudnn"),
    ("sdp_priority_order", None),
)

# Those that `GlobalState` knows of.
known_flags = (
    NumericFlag(torch.get_default_dtype, torch.set_default_dtype),
    NumericFlag(torch.are_deterministic_algorithms_enabled, _set_deterministic),
    NumericFlag(torch.is_deterministic_algorithms_warn_only_enabled, _set_warn_only),
)
# The others that this build of torch can make use of.
other_flags = (
    _flag("deterministic_fill_uninitialized_memory"),
    _flag("mkldnn_enabled"),
    _flag("mkldnn_deterministic"),
    _flag("flash_sdp_enabled", "sdp_use_flash"),
    _flag("math_sdp_enabled", "sdp_use_math"),
    _flag("overrideable_sdp_enabled", "sdp_use_overrideable"),
    _flag("math_sdp_allow_fp16_bf16_reduction"),
    *(_precision(backend, operation) for backend in _BACKENDS for operation in ("matmul", "conv", "rnn")),
    *(_flag(name, setter) for name, setter in (_CUDA_FLAGS if torch.backends.cuda.is_built() else ())),
)

_count_function_modes = cast("Callable[[], int]", private("_C._len_torch_function_stack", needed_for=_AMBIENT))
_function_mode = cast("Callable[[int], object]", private("_C._get_function_stack_at", needed_for=_AMBIENT))
push_function_mode = cast("Callable[[object], None]", private("_C._push_on_torch_function_stack", needed_for=_AMBIENT))
pop_function_mode = cast("Callable[[], object]", private("_C._pop_torch_function_stack", needed_for=_AMBIENT))
_count_dispatch_modes = cast("Callable[[], int]", private("_C._len_torch_dispatch_stack", needed_for=_AMBIENT))
_dispatch_mode = cast("Callable[[int], object]", private("_C._get_dispatch_stack_at", needed_for=_AMBIENT))
push_dispatch_mode = cast("Callable[[object], None]", private("_C._push_on_torch_dispatch_stack", needed_for=_AMBIENT))
_pop_dispatch_mode = cast("Callable[[object], object]", private("_C._pop_torch_dispatch_stack", needed_for=_AMBIENT))
_mode_of_key = cast("Callable[[Any], object]", private("_C._get_dispatch_mode", needed_for=_AMBIENT))
set_infrastructure_mode = cast("Callable[[object], None]", private("_C._set_dispatch_mode", needed_for=_AMBIENT))
unset_infrastructure_mode = cast("Callable[[object], object]", private("_C._unset_dispatch_mode", needed_for=_AMBIENT))
_KEYS = tuple(cast("dict[str, object]", private("_C._TorchDispatchModeKey.__members__", needed_for=_AMBIENT)).values())


def has_modes() -> bool:
    """Return whether any function or dispatch mode is on."""
    return _count_function_modes() > 0 or _count_dispatch_modes() > 0


def function_modes() -> list[object]:
    """Return the function modes that are on in this thread, outermost first; a default device is one."""
    return [_function_mode(index) for index in range(_count_function_modes())]


def infrastructure_modes() -> dict[object, object]:
    """Return the dispatch modes that torch keeps apart, by key: those that fake, trace and functionalize."""
    return {key: mode for key in _KEYS if (mode := _mode_of_key(key)) is not None}


def dispatch_modes() -> list[object]:
    """Return the other dispatch modes that are on in this thread, outermost first."""
    kept_apart = list(map(id, infrastructure_modes().values()))
    modes = [_dispatch_mode(index) for index in range(_count_dispatch_modes())]
    return [mode for mode in modes if id(mode) not in kept_apart]


def pop_dispatch_mode() -> object:
    """Take the innermost dispatch mode off, not one that torch keeps apart."""
    return _pop_dispatch_mode(None)


_PROXY = cast("dict[str, object]", private("_C._TorchDispatchModeKey.__members__", needed_for=_AMBIENT))["PROXY"]


def is_recording() -> bool:
    """Return whether a mode records what runs as a graph: that of AOTAutograd, of `make_fx` or of an export."""
    return _mode_of_key(_PROXY) is not None


_OPERATORS = "watching operators"

if TYPE_CHECKING:

    class DispatchMode:
        """A mode that sees every operator below autograd: torch's TorchDispatchMode, whose own types say little."""

        def __enter__(self) -> Self: ...
        def __exit__(self, *error: object) -> None: ...
        def __torch_dispatch__(
            self,
            func: Callable[..., object],
            types: tuple[type, ...],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object: ...

else:
    DispatchMode = private("utils._python_dispatch.TorchDispatchMode", needed_for=_OPERATORS)

sequence_number = cast("Callable[[], int]", private("autograd._get_sequence_nr", needed_for=_OPERATORS))
set_versions = cast(
    "Callable[[tuple[Tensor, ...], tuple[int, ...]], None]",
    private("_C._autograd._unsafe_set_version_counter", needed_for=_OPERATORS),
)


class _Engine(NamedTuple):
    queue_callback: Callable[[Callable[[], None]], None]


_engine = cast("_Engine", private("autograd.Variable._execution_engine", needed_for=_REGIONS))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now has ended. Autograd drops it if the backward raises."""
    _engine.queue_callback(callback)


_DROP_IN = "torchremat.interop.torch_checkpoint"

# Whether the backward that runs was called by `.backward()` without `inputs`.
is_plain_backward = cast("Callable[[], bool]", private("autograd._is_checkpoint_valid", needed_for=_DROP_IN))
private("utils.checkpoint._enable_checkpoint_early_stop", needed_for=_DROP_IN)
private("utils.checkpoint._checkpoint_debug_enabled", needed_for=_DROP_IN)


class CheckpointSwitches(NamedTuple):
    """What torch's own context managers have switched, None if they have not.

    Attributes:
        early_stop: By `set_checkpoint_early_stop`.
        debug: By `set_checkpoint_debug_enabled`.
    """

    early_stop: bool | None
    debug: bool | None


def checkpoint_switches() -> CheckpointSwitches:
    """Return them as they are now."""
    names = vars(_checkpoint)
    return CheckpointSwitches(names["_enable_checkpoint_early_stop"], names["_checkpoint_debug_enabled"])


def is_hook_of_torch_checkpoint(pack: object) -> bool:
    """Return whether a pack hook was put up by `torch.utils.checkpoint`, in its forward or its recompute."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


_GRAPHS = "staying out of compiled graphs"
_set_strategy = cast(
    "Callable[[CodeType, object], None]", private("_C._dynamo.eval_frame.set_code_exec_strategy", needed_for=_GRAPHS)
)
_Strategy = cast(
    "Callable[[object, object], object]", private("_C._dynamo.eval_frame._FrameExecStrategy", needed_for=_GRAPHS)
)
_SKIP = private("_C._dynamo.eval_frame._FrameAction.SKIP", needed_for=_GRAPHS)
_DEFAULT = private("_C._dynamo.eval_frame._FrameAction.DEFAULT", needed_for=_GRAPHS)


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Keep dynamo out of `function` and what it calls: inside `torch.compile` a call of it breaks the graph.

    As `torch.compiler.disable` does, but without a wrapper, which takes longer than all else that a region does before
    its forward.
    """
    _set_strategy(cast("FunctionType", function).__code__, _Strategy(_SKIP, _SKIP))
    cast("Any", function)._torchdynamo_disable = True
    return function


# NOTE [ What FSDP2 does to a parameter ]
#
# `fully_shard` makes of each parameter a sharded one, a DTensor, which the optimizer writes, and a gathered one, whose
# storage comes and goes. The modules that use the parameter have the one or the other:
#
#     before the forward of the sharded module        the sharded one
#     from its pre-forward hook to its forward hook   the gathered one
#     after it                                        the sharded one if `reshard_after_forward`, else the gathered one
#     from the hook on the gradient of its outputs    the gathered one
#     when its backward is done                       the sharded one
#
# The gathered one is the same object each time, and gathering does not move its version: what has been written shows
# in the sharded one alone.

_FSDP = "a region in a module that `fully_shard` has sharded"
_MANAGED = "_is_fsdp_managed_module"
_FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"  # imported by whoever has used `fully_shard`


class _Info(Protocol):
    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module]
    shared_param_names: list[str]


class _Param(Protocol):
    sharded_param: nn.Parameter
    _sharded_local_tensor: Tensor
    _module_info: _Info
    _param_fqn: str | None


class _Group(Protocol):
    fsdp_params: list[_Param]
    _training_state: object


class _State(Protocol):
    _fsdp_param_groups: list[_Group]


class Shard:
    """A parameter that FSDP2 has sharded. See NOTE [ What FSDP2 does to a parameter ]."""

    __slots__ = ("_group", "_param")

    def __init__(self, group: _Group, param: _Param) -> None:
        # Weak: it is kept by the module that it leads to.
        self._group = ref(group)
        self._param = ref(param)

    @property
    def sharded(self) -> nn.Parameter | None:
        """The parameter that the optimizer writes; None if the module is gone."""
        param = self._param()
        return None if param is None else param.sharded_param

    @property
    def local(self) -> Tensor | None:
        """This process's part of it."""
        param = self._param()
        return None if param is None else param._sharded_local_tensor

    @property
    def name(self) -> str | None:
        """Its name below the outermost sharded module, once that has run."""
        param = self._param()
        return None if param is None else param._param_fqn

    @property
    def is_in_forward(self) -> bool:
        """Whether the forward of the sharded module runs now: its pre-forward hook has, its forward hook has not."""
        group = self._group()
        return group is not None and getattr(group._training_state, "name", "") == "FORWARD"


def has_fsdp() -> bool:
    """Return whether anybody has imported FSDP2, without which no module is sharded."""
    return _FSDP_MODULE in sys.modules


def is_managed(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the module or on one that it is in."""
    return _MANAGED in module.__dict__


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the module itself, so that FSDP2's hooks surround each call of it."""
    return is_managed(module) and isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule)


def is_hook_of_fsdp(hook: object) -> bool:
    """Return whether a forward pre-hook is FSDP2's own."""
    return getattr(hook, "__module__", None) == _FSDP_MODULE


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def _groups_of(state: _State | None) -> list[_Group]:
    if hasattr(state, "_fsdp_param_groups"):
        return cast("_State", state)._fsdp_param_groups
    one = getattr(state, "_fsdp_param_group", None)  # torch 2.12 and older; the states of others have neither
    return [] if one is None else [one]


def all_shards() -> Iterator[tuple[nn.Module, str, Shard]]:
    """Yield each parameter that FSDP2 has sharded in this process, with each module and name that it has."""
    states = private("distributed._composable_state._module_state_mapping", needed_for=_FSDP)
    for reference in list(cast("Mapping[nn.Module, Callable[[], _State | None]]", states).values()):
        for group in _groups_of(reference()):
            for param in group.fsdp_params:
                shard = Shard(group, param)
                info = param._module_info
                yield info.module, info.param_name, shard
                for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    yield module, name, shard


class _Interpreter(Protocol):
    """A transform of torch.func that is running."""

    def key(self) -> object: ...
    def level(self) -> int: ...


_TRANSFORMS = "regions under torch.func"

innermost_transform = cast(
    "Callable[[], _Interpreter | None]", private("_C._functorch.peek_interpreter_stack", needed_for=_TRANSFORMS)
)
running_transforms = cast(
    "Callable[[], list[_Interpreter] | None]", private("_C._functorch.get_interpreter_stack", needed_for=_TRANSFORMS)
)
pop_transform = cast("Callable[[], object]", private("_C._functorch.pop_dynamic_layer_stack", needed_for=_TRANSFORMS))
push_transform = cast(
    "Callable[[object], None]", private("_C._functorch.push_dynamic_layer_stack", needed_for=_TRANSFORMS)
)
REVERSE = private("_C._functorch.TransformType.Grad", needed_for=_TRANSFORMS)
transform_level_of = cast("Callable[[Tensor], int]", private("_C._functorch.maybe_get_level", needed_for=_TRANSFORMS))
unwrapped = cast("Callable[[Tensor], Tensor]", private("_C._functorch.get_unwrapped", needed_for=_TRANSFORMS))
is_dead = cast("Callable[[Tensor], bool]", private("_C._functorch.is_dead_tensor_wrapper", needed_for=_TRANSFORMS))
wrap_for_grad = cast("Callable[[Tensor, int], Tensor]", private("_C._functorch._wrap_for_grad", needed_for=_TRANSFORMS))
push_grad = cast("Callable[[], int]", private("_C._functorch._grad_increment_nesting", needed_for=_TRANSFORMS))
pop_grad = cast("Callable[[], int]", private("_C._functorch._grad_decrement_nesting", needed_for=_TRANSFORMS))
_may_require_grad = cast(
    "Callable[[], bool]", private("_C._functorch.get_inplace_requires_grad_allowed", needed_for=_TRANSFORMS)
)
_let_require_grad = cast(
    "Callable[[bool], None]", private("_C._functorch.set_inplace_requires_grad_allowed", needed_for=_TRANSFORMS)
)
_why_no_hooks = cast(
    "Callable[[], str | None]",
    private("_C._autograd._saved_tensors_hooks_get_disabled_error_message", needed_for=_TRANSFORMS),
)
_enable_hooks = cast("Callable[[], None]", private("_C._autograd._saved_tensors_hooks_enable", needed_for=_TRANSFORMS))
_disable_hooks = cast(
    "Callable[[str, bool], None]", private("_C._autograd._saved_tensors_hooks_disable", needed_for=_TRANSFORMS)
)
private("autograd.forward_ad._current_level", needed_for="regions under forward-mode differentiation")


def is_transformed() -> bool:
    """Return whether a transform of torch.func or a level of forward-mode differentiation is running."""
    return innermost_transform() is not None or forward_ad._current_level >= 0


def has_dual_level() -> bool:
    """Return whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def require_grad(tensor: Tensor) -> Tensor:
    """Let a tensor that was wrapped for a transform require grad, which torch allows its own transforms alone."""
    before = _may_require_grad()
    _let_require_grad(True)
    try:
        return tensor.requires_grad_()
    finally:
        _let_require_grad(before)


_enter_batch = cast("Callable[[], int]", private("_C._vmapmode_increment_nesting", needed_for=_TRANSFORMS))
_leave_batch = cast("Callable[[], int]", private("_C._vmapmode_decrement_nesting", needed_for=_TRANSFORMS))


@contextmanager
def outside_batches() -> Generator[None]:
    """Let random numbers be drawn in a backward for several gradients at once (`is_grads_batched`)."""
    depth = _enter_batch()  # one more than it was
    for _ in range(depth):
        _leave_batch()
    try:
        yield
    finally:
        for _ in range(depth - 1):
            _enter_batch()


_NO_HOOKS = "torch.func."  # what the message begins with if it was a transform that has disabled hooks


def is_of_transform(message: str | None) -> bool:
    """Return whether it is a transform of torch.func that says that saved-tensor hooks do not work."""
    return message is not None and message.startswith(_NO_HOOKS)


@contextmanager
def hooks_under_transforms() -> Generator[None]:
    """Let saved-tensor hooks be set where a transform of torch.func has disabled them, and nobody else."""
    message = _why_no_hooks()
    if not is_of_transform(message):
        yield
        return
    _enable_hooks()
    try:
        yield
    finally:
        _disable_hooks(cast("str", message), False)  # though hooks of an outer region may be set


if TYPE_CHECKING:

    class DispatchMode:
        """A mode that sees every operator below autograd: torch's TorchDispatchMode, whose own types say little."""

        def __enter__(self) -> DispatchMode: ...
        def __exit__(self, *_: object) -> None: ...
else:
    DispatchMode = private("utils._python_dispatch.TorchDispatchMode", needed_for=_GRAPHS)

_FAKE = private("_C._TorchDispatchModeKey.FAKE", needed_for=_GRAPHS)


def only_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Let dynamo trace `function` where a graph calls it, and leave it alone where it is called after a break."""
    code = cast("FunctionType", function).__code__
    _set_strategy(code, _Strategy(_SKIP, _DEFAULT))
    return function


def _backend() -> str:
    dynamo = sys.modules["torch._dynamo"]  # it asks, so it is there
    backend = dynamo.symbolic_convert.InstructionTranslator.current_tx().output.compiler_fn
    return str(getattr(getattr(backend, "_torchdynamo_orig_backend", backend), "compiler_name", ""))


def uses_partitioner() -> bool:
    """Return whether the backend that the running trace is made for is known to split off a backward graph.

    Others may run the traced graph as it is.
    """
    return _backend() == "inductor" or _backend().startswith("aot_")


# Dynamo runs it while it traces, and takes its result for a constant.
uses_partitioner._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def is_traced_with_fakes() -> bool:
    """Return whether operations see tensors without data, as when a graph is made for a compiler."""
    return _mode_of_key(_FAKE) is not None
