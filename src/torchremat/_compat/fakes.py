"""Tensors without data: torch's fake tensors, and where its autograd treats them differently from real ones."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from importlib import import_module
from threading import Thread
from typing import cast

import torch
from torch import Tensor

from torchremat._compat.autograd import current_node
from torchremat._compat.binding import overridden, private
from torchremat._compat.modes import (
    Args,
    EagerMode,
    Kwargs,
    Operation,
    Types,
    set_infrastructure_mode,
    unset_infrastructure_mode,
)
from torchremat._compat.tensors import is_dense, storage_uses, tensor_uses

_bind = partial(private, needed_for="planning without running")

_FAKE = _bind("_C._TorchDispatchModeKey.FAKE")
_FakeTensorMode: Callable[..., AbstractContextManager[object]] = _bind("_subclasses.fake_tensor.FakeTensorMode")
FakeTensor: type[Tensor] = _bind("_subclasses.fake_tensor.FakeTensor")
#: The errors that torch raises where the result of an operator depends on the values of a tensor.
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    _bind("_subclasses.fake_tensor.DataDependentOutputException"),
    _bind("_subclasses.fake_tensor.DynamicOutputShapeException"),
)
_NO_FAKE_KERNEL: tuple[type[Exception], ...] = (
    _bind("_subclasses.fake_tensor.UnsupportedOperatorException"),
    _bind("_subclasses.fake_tensor.UnsupportedFakeTensorException"),
)


def fake_mode(*, allow_non_fake_inputs: bool) -> AbstractContextManager[object]:
    """Return a mode that makes tensors without data."""
    _import_alone()
    return _FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)


@cache
def _import_alone() -> None:
    """Import the modules that the first mode imports, with no callers on the stack.

    When torch._dynamo is imported it calls `torch.fx.wrap`, whose frame is part of a reference cycle, which keeps all
    its callers alive: a planner, and the model.
    """
    thread = Thread(target=import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


def lacks_fake_kernel(error: Exception) -> bool:
    """Return whether an error says that an operator has no kernel for fakes; custom operators raise a plain error."""
    return isinstance(error, _NO_FAKE_KERNEL) or "no fake impl" in str(error)


#: Lets operators in the block run as if below autograd, and those that it decomposes as they are.
below_autograd: Callable[[], AbstractContextManager[object]] = _bind("_C._AutoDispatchBelowAutograd")


def autocast_of_cuda() -> AbstractContextManager[None]:
    """Return a context in which `torch.autocast("cuda")` acts as the CPU's, for fakes.

    Without CUDA torch would switch it off. One that was made earlier, by a decorator for example, is unchanged.
    """
    own = torch.autocast.__init__

    @wraps(own)
    def made(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        own(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return overridden([torch.autocast], __init__=made)


@contextmanager
def without_fakes() -> Generator[None]:
    """Let operators compute real values in the block, where otherwise they would make fakes."""
    mode = unset_infrastructure_mode(_FAKE)
    try:
        yield
    finally:
        if mode is not None:
            set_infrastructure_mode(mode)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake."""
    return isinstance(tensor, FakeTensor)


# NOTE [ Gradients that are added in place ]
# Where two gradients meet, autograd adds the second to the first in place if it is the only owner of the first, of both
# the tensor and its storage. Under a dispatch mode, and with subclasses, it never does. So a sum that a mode sees is
# classified by exactly these two counts, and is taken for what it would be without the mode.


def adds_in_place(func: object, args: tuple[object, ...]) -> bool:
    """Return whether autograd would run an operator in place on its first argument, if no mode were active."""
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or current_node() is None:
        return False
    first = args[0]
    if not isinstance(first, torch.Tensor) or not is_dense(first):
        return False
    del first
    return _counts(args) == counts_of_one()


def _counts(args: tuple[object, ...]) -> tuple[int, int]:
    tensor = cast("Tensor", args[0])
    return tensor_uses(tensor), storage_uses(tensor.untyped_storage()._cdata)


@cache
def counts_of_one() -> tuple[int, int]:
    """Return the counts of a gradient that only autograd owns, observed in a backward with one such sum.

    Ask once before a mode is entered: inside of a mode autograd cannot be observed.
    """
    found: list[tuple[int, int]] = []

    class Probe(EagerMode):
        def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                found.append(_counts(args))
            return func(*args, **(kwargs or {}))

    with without_fakes(), torch.enable_grad(), Probe():
        leaf = torch.zeros(2, requires_grad=True)
        middle = leaf * 1
        (middle.sin() + middle.cos()).sum().backward()  # pyright: ignore[reportUnknownMemberType]  as torch's own
    return found[0]
