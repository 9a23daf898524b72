"""Loops whose steps are recomputed in backward, within a number of slots or a budget; what their body may return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter, ne
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from torchremat._compat.dynamo import outside_graphs
from torchremat.errors import MutationError, UnsupportedError
from torchremat.loops.first_run import Body
from torchremat.loops.requests import LoopRequest
from torchremat.loops.step_inputs import Slices
from torchremat.loops.ways import way_of
from torchremat.regions.decisions import AnyPolicy
from torchremat.regions.settings import Check, Settings
from torchremat.regions.threads import makes_regions, thread
from torchremat.schedules.loop_schedules import LoopSchedule
from torchremat.tensors.handles import Store
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import Leaf, join, leaves_of, place_of, same_structure, split

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")


@outside_graphs
def loop(
    body: Callable[[C, X], tuple[C, Y]],
    carry: C,
    xs: X | None = None,
    *,
    length: int | None = None,
    condition: Callable[[C], object] | None = None,
    max_length: int | None = None,
    slots: int | None = None,
    budget: int | str | None = None,
    stores: Sequence[Store] = (),
    transfer_steps: float | Sequence[float] | None = None,
    step_costs: Sequence[float] | None = None,
    check: Check = "metadata",
    check_every: int = 1,
    guard: Sequence[object] = (),
    policy: AnyPolicy | None = None,
    on_schedule: Callable[[LoopSchedule], object] | None = None,
) -> tuple[C, Y]:
    """Run `carry, y = body(carry, x)` for each slice `x` of `xs`; return the last carry and the stacked outputs.

    The backward recomputes the steps, from carries that are kept in `slots`, with the fewest steps run again; gradients
    are those of the plain loop, bit for bit. The body is any function; modules and tensors that it uses are found as by
    `checkpoint`. Without grad mode it is the plain loop.

    >>> import torch
    >>> w = torch.tensor(0.5, requires_grad=True)
    >>> last, partial = loop(lambda h, x: (h * w + x, h), torch.zeros(()), torch.ones(3), slots=2)
    >>> last
    tensor(1.7500, grad_fn=<AddBackward0>)
    >>> partial
    tensor([0.0000, 1.0000, 1.5000], grad_fn=<StackBackward0>)
    >>> last.backward()
    >>> w.grad  # the derivative of w² + w + 1
    tensor(2.)

    Args:
        body: From a carry and a slice to the next carry, of the same structure, shapes and dtypes, and an output.
        carry: Any nesting of tensors.
        xs: Any nesting of tensors, which are sliced along their first dimension; None if nothing is scanned.
        length: The number of steps, if `xs` does not say it.
        condition: Of the carry: whether another step runs. The length is then not known before the loop ends, and
            carries are kept or dropped as it goes on. Takes the place of `xs` and `length`.
        max_length: How many steps a loop with a `condition` may run.
        slots: How many carries are in memory at a time, the first one included.
        budget: Instead of slots: bytes for the carries and for the saved tensors of the steps that are recorded at
            once, as an int or like `"2GiB"`. Both are measured in the first step.
        stores: Where carries wait beyond the slots, the fastest first: `[Host("1GiB"), Disk()]`. Their limits are kept.
        transfer_steps: How long it takes to write a carry to a store and to read it, in steps; or a time for each
            store. With a longer time fewer carries go there. Measured if not given, in the first step that runs.
        step_costs: How long each step takes, in any unit, if they differ. Neither with `stores` nor with a `condition`.
        check: As for `checkpointed`. On the CPU the values of the first step are compared in any case but `"none"`.
        check_every: As for `checkpointed`.
        guard: As for `checkpointed`.
        policy: As for `checkpointed`: what is kept of every step.
        on_schedule: Is told the schedule when it is known.

    Returns:
        The last carry, and the outputs with a first dimension for the steps; None if there are none.

    Raises:
        BudgetError: The budget is below one step.
        MutationError: The body wrote to its carry in place; in backward: it read what was written since.
        UnsupportedError: The body returns a carry of another form, or the loop has no step, none that is its last, or
            options that contradict each other.
    """
    request = LoopRequest(
        length=length,
        condition=condition,
        max_length=max_length,
        slots=slots,
        budget=budget,
        stores=tuple(stores),
        transfer_steps=tuple(transfer_steps) if isinstance(transfer_steps, Sequence) else transfer_steps,
        step_costs=None if step_costs is None else tuple(step_costs),
        on_schedule=on_schedule,
    )
    settings = Settings(check=check, check_every=check_every, guard=guard, policy=policy)
    # The types of the arguments are those of the results.
    return cast("tuple[C, Y]", _run(body, carry, xs, request, settings))


def _run(body: Body, carry: object, xs: object, request: LoopRequest, settings: Settings) -> tuple[object, object]:
    if not callable(body):
        raise UnsupportedError(f"loop: the body has to be a function, got {type(body).__name__}.")
    checks, slices = CarryCheck(carry), Slices(xs)
    steps = request.steps(slices.length)

    def run_plainly(index: int, carry: object, _: list[Tensor]) -> object:
        return body(carry, slices.at(index))

    run, around = run_plainly, None
    if makes_regions():
        run, around = way_of(body, slices, checks.tensors, steps, request, settings).run, thread.around_loop
    outputs: list[object] = []
    with nullcontext() if around is None else around():
        while request.goes_on(len(outputs), steps, carry):
            carry, output = checks.check(len(outputs), run(len(outputs), carry, checks.tensors))
            outputs.append(output)
        return carry, stack_outputs(outputs)


class CarryCheck:
    """The form of the carry that a loop is given, which every step has to return.

    Attributes:
        tensors: The tensors of the carry that was checked last.

    Raises:
        UnsupportedError: Something in it is not a tensor, or it has none.
    """

    def __init__(self, carry: object) -> None:
        self.tensors: list[Tensor] = []
        self._template = split(carry, self.tensors, [])
        for place, leaf in leaves_of(self._template, "carry"):
            if not isinstance(leaf, Leaf) and leaf is not None:
                raise UnsupportedError(
                    f"loop: {place} is {leaf!r}; a carry has tensors, or None. Make a number a tensor, and let the "
                    "body close over all that does not change."
                )
        if not self.tensors:
            raise UnsupportedError("loop: the carry has no tensor.")
        self._form = [_form(tensor) for tensor in self.tensors]
        self._versions = [version_of(tensor) for tensor in self.tensors]

    def check(self, index: int, output: object) -> tuple[object, object]:
        """Return the next carry and the output of a step.

        Raises:
            UnsupportedError: The body did not return both, or the carry has another form.
            MutationError: The step wrote to its carry in place.
        """
        where = f"loop, step {index}"
        if not isinstance(output, tuple) or len(cast("tuple[object, ...]", output)) != 2:
            raise UnsupportedError(
                f"{where}: the body has to return the next carry and an output (or None), a tuple of two; it returned "
                f"{type(cast('object', output)).__name__}."
            )
        carry, y = cast("tuple[object, object]", output)
        now = [*map(version_of, self.tensors)]
        if now != self._versions:
            place = [*map(ne, now, self._versions)].index(True)
            raise MutationError(
                f"{where}: the body wrote `{self._name(place)}` in place. A recompute would begin with what it "
                "wrote. Write out of place, or to a clone."
            )
        tensors: list[Tensor] = []
        template = split(carry, tensors, [])
        if not same_structure(self._template, template):
            raise UnsupportedError(
                f"{where}: the body returned a carry of another structure: {_places(template)}, where the loop was "
                f"given {_places(self._template)}."
            )
        form = [*map(_form, tensors)]
        if form != self._form:
            place = [*map(ne, form, self._form)].index(True)
            raise UnsupportedError(
                f"{where}: the body changed `{self._name(place)}`: {_words(form[place])}, where the loop was given "
                f"{_words(self._form[place])}. A carry keeps its shapes, dtypes and devices."
            )
        self.tensors = tensors
        self._versions = [version_of(tensor) for tensor in tensors]
        return carry, y

    def _name(self, place: int) -> str:
        return f"carry{place_of(self._template, place)}"


# Of a tensor that every step has to return alike.
Form: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


_form = cast("Callable[[Tensor], Form]", attrgetter("shape", "dtype", "device"))


def _words(form: Form) -> str:
    return f"shape {tuple(form[0])}, {form[1]}, {form[2]}"


def _places(template: object) -> str:
    places = [place for place, leaf in leaves_of(template, "carry") if isinstance(leaf, Leaf)]
    return ", ".join(places) or "no tensor"


def stack_outputs(outputs: list[object]) -> object:
    """Return the outputs as one, whose tensors have a first dimension for the steps; None if there are none.

    Raises:
        UnsupportedError: An output has something that is not a tensor, or another structure or shape than the first.
    """
    columns: list[list[Tensor]] = []
    first: object = None
    for index, output in enumerate(outputs):
        tensors: list[Tensor] = []
        template = split(output, tensors, [])
        if index == 0:
            first = template
            for place, leaf in leaves_of(template, "output"):
                if not isinstance(leaf, Leaf) and leaf is not None:
                    raise UnsupportedError(f"loop: {place} is {leaf!r}; the output of a step has tensors, or None.")
            columns = [[] for _ in tensors]
        elif not same_structure(first, template):
            raise UnsupportedError(f"loop: the output of step {index} has another structure than that of step 0.")
        for column, tensor in zip(columns, tensors, strict=True):
            if column and tensor.shape != column[0].shape:
                raise UnsupportedError(
                    f"loop: an output of step {index} has the shape {tuple(tensor.shape)}, and that of step 0 "
                    f"{tuple(column[0].shape)}."
                )
            column.append(tensor)
    return join(first, [torch.stack(column) for column in columns])
