"""The reentrant region: a forward without any graph, and a backward that makes a graph and runs through it.

The older of torch's two variants, with its contract: only tensors among the positional arguments are inputs, and at
least one of them has to require grad; only `.backward()` without `inputs` works; everything is recomputed, and nothing
is compared.

    forward     under no_grad: nothing is saved but the inputs
    backward    inputs detached, the function run again with grad, `torch.autograd.backward` through its graph

`Call` captures and restores the state that a call sees in addition to its arguments, as for every region.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchremat._compat.checkpoints import is_plain_backward
from torchremat.errors import MutationError, UnsupportedError, warn
from torchremat.regions.calls import Call, CallArguments
from torchremat.regions.restoring import Restored, run_again
from torchremat.regions.threads import Now, thread
from torchremat.state.containers import ContainerCopies
from torchremat.state.reading import WrittenError
from torchremat.tensors.structure import join, place_of, split
from torchremat.tensors.versioned import Versioned, changed_input

_Inputs = tuple[object, ...]


class CheckpointFunction(torch.autograd.Function):
    """A reentrant region as a node of the graph: `CheckpointFunction.apply(function, preserve_rng_state, *args)`."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function without keeping any saved tensor."""
        if not callable(run_function):
            raise TypeError(f"function: expected a callable, got {type(run_function).__name__}.")
        inputs = _HeldArguments(args)
        call = Call(run_function, None, [])
        given = CallArguments(None, inputs.tensors, [], [], objects=inputs.objects)
        call.look(given, (run_function,), guard=(), preserve_rng=bool(preserve_rng_state))
        _warn_without_inputs(args, call.world.modules)
        ctx.save_for_backward(*inputs.own)
        now = thread.now
        shared = now.share()
        now.calls.append(call)
        try:
            with _forwards:
                outputs = run_function(*args)
        finally:
            now.calls.pop()
            if shared:
                now.unshare()
        call.settle()
        inputs.settle()
        ctx.call, ctx.inputs, ctx.function_name = call, inputs, _name_of(run_function)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the function again, with a graph, and send the gradients through it."""
        if not is_plain_backward():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). To resolve this error, you can either set use_reentrant=False, or call "
                ".backward() without passing the `inputs` argument."
            )
        is_differentiated_again = torch.is_grad_enabled()
        inputs = cast("_HeldArguments", ctx.inputs)
        saved = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        inputs.check(ctx.function_name)
        detached = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved]
        outputs = _run_again(ctx.call, inputs.filled(detached), ctx.function_name)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        attached = [
            (output, grad)
            for output, grad in zip(cast("tuple[object, ...]", outputs), grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if not attached:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward([output for output, _ in attached], [grad for _, grad in attached])
        found = [tensor.grad for tensor in detached]
        if is_differentiated_again:
            found = [None if grad is None else _refuse_second(grad) for grad in found]
        return (None, None, *inputs.in_their_places(found))


class _HeldArguments:
    """The arguments of a reentrant call, and the recorded facts about the tensors among them."""

    __slots__ = ("_count", "_nested", "_places", "_seen", "_template", "_written", "objects", "own", "tensors")

    def __init__(self, args: _Inputs) -> None:
        self._places = [place for place, one in enumerate(args) if isinstance(one, Tensor)]
        self._count = len(args)
        rest = tuple([None if isinstance(one, Tensor) else one for one in args])
        self.objects: list[object] = []
        self._nested: list[Tensor] = []
        self._template = split(rest, self._nested, self.objects)
        self.own = [one for one in args if isinstance(one, Tensor)]
        self.tensors = [*self.own, *self._nested]
        self._seen = [Versioned(tensor) for tensor in self.tensors]
        self._written: tuple[str, int, int] | None = None

    def settle(self) -> None:
        """Record which of the tensors the forward has written, and drop the tensors that autograd keeps."""
        own, self._seen = self._seen[: len(self.own)], self._seen[len(self.own) :]
        for place, seen in zip(self._places, own, strict=True):
            self._compare(f"args[{place}]", seen)
        self.own, self.tensors, self.objects = [], [], []

    def _compare(self, name: str, seen: Versioned) -> None:
        if seen.is_written:
            self._written = self._written or (name, seen.version, seen.now)

    def check(self, function: str) -> None:
        """Raise if a tensor is not as the forward got it; autograd itself watches the inputs after the forward.

        Raises:
            MutationError: A tensor was changed.
        """
        for index, seen in enumerate(self._seen):
            self._compare(f"args{place_of(self._template, index)}", seen)
        if self._written is not None:
            name, then, now = self._written
            raise changed_input(f"reentrant region of {function}: its input {name}", then, now)

    def filled(self, tensors: list[Tensor]) -> _Inputs:
        """Return the arguments, with `tensors` as the inputs."""
        # Containers as the forward got them, without later additions of the forward.
        args = list(cast("_Inputs", join(self._template, self._nested)))
        for place, tensor in zip(self._places, tensors, strict=True):
            args[place] = tensor
        return tuple(args)

    def in_their_places(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return a gradient for each argument."""
        found: list[Tensor | None] = [None] * self._count
        for place, grad in zip(self._places, grads, strict=True):
            found[place] = grad
        return found


def _run_again(call: Call, args: _Inputs, function: str) -> object:
    name = f"reentrant region of {function}"
    had = thread.begin(Now(thread.now.recomputing + 1))  # See Rule 3
    try:
        restored = Restored(call)
        try:
            with torch.enable_grad():
                return run_again(call, ContainerCopies(), restored.written, *args)
        finally:
            restored.close()
    except WrittenError as error:
        error.__traceback__ = None  # its frames have the region
        raise MutationError(call.words(error, name)) from None
    finally:
        thread.end(had)


class _Forwards(threading.local):
    """Counts the reentrant forwards that run in a thread, one inside the other."""

    running = 0

    def __enter__(self) -> None:
        self.running += 1

    def __exit__(self, *_: object) -> None:
        self.running -= 1


_forwards = _Forwards()


def is_in_reentrant_forward() -> bool:
    """Return whether the caller runs in the forward of a reentrant region. Other threads are not asked."""
    return _forwards.running > 0


def _warn_without_inputs(args: _Inputs, modules: list[nn.Module]) -> None:
    if any(one.requires_grad for one in args if isinstance(one, Tensor)):
        return
    words = "None of the inputs have requires_grad=True. Gradients will be None"
    lost: dict[int, str] = {}
    for module in modules:  # a module comes before its submodules
        for name, one in module.named_parameters():
            if one.requires_grad:
                lost.setdefault(id(one), name)
    if lost and not _forwards.running:  # in a forward without grad this is expected
        first = next(iter(lost.values()))
        words += (
            f", also those of {len(lost)} parameters of the checkpointed function (`{first}`, ...), which do require "
            "grad. Pass use_reentrant=False, or let an input require grad"
        )
    warn(words)


class _Second(torch.autograd.Function):
    """Hands a gradient on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            "the gradient of a reentrant region (use_reentrant=True) cannot be differentiated again: what the region "
            "contributes would be missing. Pass use_reentrant=False."
        )


def _refuse_second(grad: Tensor) -> Tensor:
    return cast("Tensor", _Second.apply(grad.detach().requires_grad_()))


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
