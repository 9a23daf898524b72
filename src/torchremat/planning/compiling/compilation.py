"""`compiled`: `torch.compile` with a budget for the peak of the step.

A partitioner sees one graph only; each call checks for the other cases and warns:

    no hook         a backend or a torch that takes no partitioner compiles as it does without a budget
    nothing         dynamo gave up on the function, and ran it uncompiled
    several graphs  each is held to the budget, but tensors saved by the first ones are live while the later ones run

If dynamo has compiled too many versions of a function, it runs the next one uncompiled: that is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import nn

from torchremat._compat.inductor import compile_arguments, graphs_compiled, never_uncompiled, own_error
from torchremat._compat.modes import has_modes
from torchremat.errors import CompileWarning, UnsupportedError, VersionError, check_flags, warn
from torchremat.planning.compiling.partitioning import Partition, PeakPartitioner
from torchremat.planning.searches.chains import Cost

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A compiled model or function. Called like the original, which stays unchanged and owns the parameters.

    Attributes:
        original: The model or function.
        reason: Why the budget does not apply, or "" if it applies.
    """

    original: Callable[P, R]
    _function: Callable[P, R]

    def __init__(
        self, original: Callable[P, R], function: Callable[P, R], partitioner: PeakPartitioner, reason: str
    ) -> None:
        # Not by assignment: a module would take modules among these for parts of it.
        vars(self).update(original=original, _function=function)
        self.reason = reason
        self._partitioner = partitioner
        partitioner.was_used = bool(reason)  # then no further warning is needed

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """How each graph with a backward was split, in the order in which they were compiled.

        Empty before the first call, and if the compiler took all graphs from its cache.
        """
        return tuple(self._partitioner.partitions)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it, after compiling it if needed.

        Raises:
            BudgetError: It was compiled, and no split of a graph fits the budget; or it was compiled for so many kinds
                of inputs that dynamo would not compile it again.
        """
        splits, graphs = len(self.partitions), graphs_compiled()
        try:
            with never_uncompiled():
                result = self._function(*args, **kwargs)
        except Exception as error:  # the compiler wraps every error of a partitioner
            own = own_error(error)
            if own is None or own is error:
                raise
            raise own from None
        self._check(self.partitions[splits:], has_compiled=graphs_compiled() != graphs)
        return result

    def _check(self, made: tuple[Partition, ...], *, has_compiled: bool) -> None:
        """Warn if the graphs compiled by a call cannot keep the budget. Under a mode compiled code runs eagerly."""
        if len(made) > 1:
            warn(
                f"{self._name} broke into {len(made)} graphs with a backward. Each keeps to the budget by itself, "
                "but tensors saved by the first ones stay while the later ones run, so together they may need more. "
                "fullgraph=True shows where it breaks.",
                CompileWarning,
            )
        if not (self._partitioner.was_used or has_compiled or has_modes()):
            warn(
                f"no part of {self._name} was compiled: dynamo runs it as it is, without a budget. A graph break "
                "inside a loop causes this; fullgraph=True shows where.",
                CompileWarning,
            )
        self._partitioner.was_used |= has_compiled or not has_modes()

    @property
    def _name(self) -> str:
        return getattr(self.original, "__qualname__", type(self.original).__qualname__)

    def __str__(self) -> str:
        if self.reason:
            return f"no budget: {self.reason}"
        if not self.partitions:
            return "not compiled yet"
        many = len(self.partitions) > 1
        return "\n".join(
            (f"graph {number}\n" if many else "") + str(partition) for number, partition in enumerate(self.partitions)
        )


class CompiledModule(Compiled[P, R], nn.Module):
    """A compiled module, which is a module itself: it has the original as `_orig_mod`, as what `torch.compile` returns.

    All attributes that it lacks are the original's.
    """

    def __init__(
        self, original: Callable[P, R], function: Callable[P, R], partitioner: PeakPartitioner, reason: str
    ) -> None:
        nn.Module.__init__(self)
        Compiled.__init__(self, original, function, partitioner, reason)
        self._orig_mod = cast("nn.Module", original)
        self.training = self._orig_mod.training

    __call__ = nn.Module.__call__
    forward = Compiled.__call__

    def __getattr__(self, name: str) -> Any:
        modules = vars(self).get("_modules", {})
        if name in modules or "_orig_mod" not in modules:
            return super().__getattr__(name)
        return getattr(modules["_orig_mod"], name)


def compiled(
    model: Callable[P, R],
    *,
    budget: int | str,
    backend: object = "inductor",
    margin: int | str = 0,
    cost: Cost = "seconds",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Compiled[P, R]:
    """Return a model or function compiled so that the peak of a training step stays within a budget.

    The peak of forward and backward decides which values are saved between them, and which the backward recomputes. If
    a function breaks into several graphs, each is held to the budget by itself.

    Args:
        model: A module, or a function. Its results are held while its backward runs.
        budget: Peak bytes of forward and backward, with parameters, inputs, and the gradients that the backward makes:
            an int, `"6GiB"`, `"60%"` of the peak without any recompute, or `"min"` for the lowest that is found.
        backend: `"inductor"`, `"aot_eager"`, or a backend made by `aot_autograd` of `torch._dynamo.backends.common`.
            With another one, or if this torch has no hook, the backend splits as it does without a budget, with a
            warning.
        margin: Bytes of the budget to leave free for memory outside of any graph, such as an optimizer's state.
        cost: The recompute cost to minimise: estimated `"seconds"`, or `"flops"`.
        dynamic: As for `torch.compile`. A graph is used for the sizes with which it was made, and for smaller ones.
        fullgraph: As for `torch.compile`.
        mode: As for `torch.compile`, with Inductor.
        options: As for `torch.compile`, with Inductor; those of a `mode` as well.

    Returns:
        A module if `model` is one: parameters, buffers, submodules and the state dict are those of what `torch.compile`
        returns, which has the model under the name `_orig_mod`.

    Raises:
        BudgetError: The budget or the margin is not a size, or the margin leaves nothing of it. The first call raises
            it if no split fits, with the smallest budget that works.
        UnsupportedError: `model` is neither a module nor a function; `cost`, `fullgraph`, `dynamic` or `mode` has an
            invalid value; or there are options or a mode for another backend than Inductor.
    """
    if not callable(model):  # pyright: ignore[reportUnnecessaryComparison]: users are not type-checked
        raise UnsupportedError(f"model: expected a torch.nn.Module or a function, got {type(model).__name__}.")
    check_flags(fullgraph=fullgraph)
    check_flags(may_be_none=True, dynamic=dynamic)
    if backend != "inductor" and (mode is not None or options is not None):
        raise UnsupportedError(f"mode= and options= are Inductor's, and the backend is {backend!r}.")
    partitioner = PeakPartitioner(budget, margin=margin, cost=cost)
    reason = ""
    try:
        arguments = compile_arguments(backend, partitioner, partitioner.uuid, mode, options)
    except VersionError as error:
        reason = str(error)
        arguments = {"backend": backend, "mode": mode, "options": options}
        warn(
            f"budget={budget!r} cannot be kept: {reason} The backend splits the step as it does without a budget.",
            CompileWarning,
        )
    compile_ = cast("Callable[..., Callable[P, R]]", torch.compile)
    function = compile_(model, dynamic=dynamic, fullgraph=fullgraph, **arguments)
    kind = CompiledModule if isinstance(model, nn.Module) else Compiled
    return kind(model, function, partitioner, reason)
