"""What the body of a loop may return, and may not do to its carry; and the outputs of all steps, stacked."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, ne
from typing import TypeAlias, cast

import torch
from torch import Tensor

from torchremat.errors import MutationError, UnsupportedError
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import Leaf, join, leaves_of, place_of, same_structure, split


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
        self._form = [_form(one) for one in self.tensors]
        self._versions = [version_of(one) for one in self.tensors]

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
        self._versions = [version_of(one) for one in tensors]
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


def stacked(outputs: list[object]) -> object:
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
