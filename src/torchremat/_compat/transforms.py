"""Transforms of torch.func, forward-mode differentiation, and batched gradients."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Protocol, cast

from torch import Tensor
from torch.autograd import forward_ad

from torchremat._compat.binding import overridden, private
from torchremat.errors import UnsupportedError


class _Interpreter(Protocol):
    """A running transform of torch.func."""

    def key(self) -> object: ...
    def level(self) -> int: ...


_bind = partial(private, needed_for="regions under torch.func")

innermost_transform: Callable[[], _Interpreter | None] = _bind("_C._functorch.peek_interpreter_stack")
running_transforms: Callable[[], list[_Interpreter] | None] = _bind("_C._functorch.get_interpreter_stack")
pop_transform: Callable[[], object] = _bind("_C._functorch.pop_dynamic_layer_stack")
push_transform: Callable[[object], None] = _bind("_C._functorch.push_dynamic_layer_stack")
REVERSE = _bind("_C._functorch.TransformType.Grad")
transform_level_of: Callable[[Tensor], int] = _bind("_C._functorch.maybe_get_level")
unwrapped: Callable[[Tensor], Tensor] = _bind("_C._functorch.get_unwrapped")
is_dead: Callable[[Tensor], bool] = _bind("_C._functorch.is_dead_tensor_wrapper")
wrap_for_grad: Callable[[Tensor, int], Tensor] = _bind("_C._functorch._wrap_for_grad")
push_grad: Callable[[], int] = _bind("_C._functorch._grad_increment_nesting")
pop_grad: Callable[[], int] = _bind("_C._functorch._grad_decrement_nesting")
_may_require_grad: Callable[[], bool] = _bind("_C._functorch.get_inplace_requires_grad_allowed")
_let_require_grad: Callable[[bool], None] = _bind("_C._functorch.set_inplace_requires_grad_allowed")
_why_no_hooks: Callable[[], str | None] = _bind("_C._autograd._saved_tensors_hooks_get_disabled_error_message")
_enable_hooks: Callable[[], None] = _bind("_C._autograd._saved_tensors_hooks_enable")
_disable_hooks: Callable[[str, bool], None] = _bind("_C._autograd._saved_tensors_hooks_disable")
private("autograd.forward_ad._current_level", needed_for="regions under forward-mode differentiation")


def is_transformed() -> bool:
    """Return whether a transform of torch.func or a level of forward-mode differentiation is running."""
    return innermost_transform() is not None or forward_ad._current_level >= 0


def has_dual_level() -> bool:
    """Return whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def without_wrappers(tensor: Tensor) -> Tensor:
    """Return the tensor beneath all transform wrappers, ended or not: a batched tensor comes with its batch."""
    while is_dead(tensor) or transform_level_of(tensor) >= 0:
        tensor = unwrapped(tensor)
    return tensor


_exclude: Callable[[object], AbstractContextManager[None]] = _bind("_C._ExcludeDispatchKeyGuard")
_keys: Callable[[object], object] = _bind("_C.DispatchKeySet")
_OF_TRANSFORMS = [_bind(f"_C.DispatchKey.FuncTorchDynamicLayer{end}Mode") for end in ("Front", "Back")]


@contextmanager
def below_transforms() -> Generator[None]:
    """Let operators on plain tensors bypass the running transforms, also in the middle of an operation."""
    with ExitStack() as stack:
        if innermost_transform() is not None:
            for key in _OF_TRANSFORMS:
                stack.enter_context(_exclude(_keys(key)))
        yield


@cache
def see_wrapped(seen: Callable[[object], None]) -> None:
    """Call `seen` with each argument of a transform from now on, before code in C++ wraps it."""
    for module, name in (
        ("eager_transforms", "_wrap_for_grad"),
        ("eager_transforms", "_wrap_functional_tensor"),
        ("vmap", "_add_batch_dim"),
    ):
        owner = _bind(f"_functorch.{module}")
        setattr(owner, name, partial(_wrapped, seen, _bind(f"_functorch.{module}.{name}")))


def _wrapped(seen: Callable[[object], None], wrap: Callable[..., object], tensor: object, *args: object) -> object:
    seen(tensor)
    return wrap(tensor, *args)


def require_grad(tensor: Tensor) -> Tensor:
    """Let a tensor that was wrapped for a transform require grad, which torch allows only its own transforms."""
    before = _may_require_grad()
    _let_require_grad(True)
    try:
        return tensor.requires_grad_()
    finally:
        _let_require_grad(before)


_enter_batch: Callable[[], int] = _bind("_C._vmapmode_increment_nesting")
_leave_batch: Callable[[], int] = _bind("_C._vmapmode_decrement_nesting")


is_batched: Callable[[Tensor], bool] = _bind("_C._functorch.is_legacy_batchedtensor")


def is_in_batch() -> bool:
    """Return whether a backward for several gradients at once is running (`is_grads_batched`)."""
    depth = _enter_batch()  # one more than before
    _leave_batch()
    return depth > 1


@contextmanager
def outside_batches() -> Generator[None]:
    """Allow random draws in a backward for several gradients at once (`is_grads_batched`)."""
    depth = _enter_batch()  # one more than before
    for _ in range(depth):
        _leave_batch()
    try:
        yield
    finally:
        for _ in range(depth - 1):
            _enter_batch()


_NO_HOOKS = "torch.func."  # the beginning of the message if a transform has disabled hooks


def is_of_transform(message: str | None) -> bool:
    """Return whether a message that saved-tensor hooks do not work comes from a transform of torch.func."""
    return message is not None and message.startswith(_NO_HOOKS)


def check_transform_inside(error: BaseException) -> None:
    """Raise an UnsupportedError in place of a transform's own error, if it ran inside a region.

    Raises:
        UnsupportedError: The transform ran inside a region.
    """
    if type(error) is RuntimeError and is_of_transform(str(error)):
        raise UnsupportedError(
            "torch.func.grad, vjp, jacrev and hessian do not run inside a region: they refuse saved-tensor hooks, "
            "which regions are made of. Put the region inside the transformed function, or use torch.autograd.grad "
            "or torch.func.jvp in the region."
        ) from None


def check_transform_around(where: str) -> None:
    """Raise an UnsupportedError if a reverse-mode transform runs, around a module in a step that is traced for a plan.

    Raises:
        UnsupportedError: A transform runs; the message names the module.
    """
    if any(one.key() == REVERSE for one in running_transforms() or ()):
        raise UnsupportedError(
            f"{where} is called inside of a reverse-mode transform of torch.func (grad, vjp, jacrev, hessian), which "
            "runs its backward itself, out of a plan's reach. `wrap` the blocks by hand, and `verify`; or call it "
            "outside, or let a module call it inside of `jvp`, `jacfwd` or `vmap`: that module can be planned."
        )


_HOOKS: Any = sys.modules["torch._C._autograd"]


@contextmanager
def transforms_beside_hooks(seen: Callable[[], None] = lambda: None) -> Generator[None]:
    """Let reverse-mode transforms run in this thread though saved-tensor hooks are set, which torch refuses.

    These hooks are called inside of the transforms as well, and must return each tensor unchanged there: see
    `left_to_transform` and `beside_transforms`.

    Args:
        seen: Called when a transform begins.
    """
    here, disable = threading.get_ident(), _HOOKS._saved_tensors_hooks_disable

    def disabled(message: str, fail_if_non_empty: bool = True) -> None:
        if threading.get_ident() == here and is_of_transform(message):
            fail_if_non_empty = False
            seen()
        disable(message, fail_if_non_empty)

    with overridden([_HOOKS], _saved_tensors_hooks_disable=disabled):
        yield


def left_to_transform(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Return a pack hook that leaves alone the tensors of a reverse-mode transform, which will unpack them itself."""

    def packed(tensor: Tensor) -> object:
        return tensor if is_of_transform(_why_no_hooks()) else pack(tensor)

    return packed


def beside_transforms(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Return a pack hook that leaves alone the tensors that reverse-mode transforms save for their own backward.

    Tensors that autograd saves around the transforms, for the same operators, are packed: they are saved after the
    transform has passed the call on.
    """

    def packed(tensor: Tensor) -> object:
        is_its_own = any(one.key() == REVERSE for one in running_transforms() or ())
        return tensor if is_its_own else pack(tensor)

    return packed


@contextmanager
def hooks_under_transforms() -> Generator[None]:
    """Let saved-tensor hooks be set where a transform of torch.func has disabled them, but not for other reasons."""
    message = _why_no_hooks()
    if not is_of_transform(message):
        yield
        return
    _enable_hooks()
    try:
        yield
    finally:
        _disable_hooks(cast("str", message), False)  # though hooks of an outer region may be set
