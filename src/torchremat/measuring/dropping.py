"""Forwards from which autograd keeps nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import except_traced
from torchremat._compat.transforms import left_to_transform, transforms_beside_hooks
from torchremat.errors import StepError


@contextmanager
def nothing_kept() -> Generator[None]:
    """Drop everything that autograd saves in the block: a forward needs about the memory of one without grad."""
    push_saved_tensor_hooks(left_to_transform(except_traced(_dropped)), never)
    try:
        with transforms_beside_hooks(lambda: None):
            yield
    finally:
        pop_saved_tensor_hooks()


@outside_graphs
def _dropped(_: Tensor) -> None:
    """Keep nothing of a tensor."""


def never(packed: object) -> Tensor:
    """Unpack nothing except traced tensors: no backward may run where nothing is kept.

    Raises:
        StepError: The object is no tensor of a trace.
    """
    if isinstance(packed, Tensor):
        return packed  # See NOTE [ What is traced in a region ]
    raise StepError(
        "the step has run backward itself. Return the loss without calling backward: it is run here, and with it the "
        "plan. A gradient on which the loss depends is taken with `torch.autograd.grad`."
    )
