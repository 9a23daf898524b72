"""Gradients from before a step, and the additions of a failed attempt to them."""

# NOTE [ Gradients of a step that is run again ]
#
# A step that is run again must not add its gradients twice. A copy of the gradients before each step would double their
# bytes on a device that is about to be full, also for steps that do not fail. So no copy is made; the next attempt
# skips the additions that the failed one has made, since it computes the same gradient bit for bit.
#
#     before the step       a failed attempt               the next attempt
#     no gradient           made one                       it is dropped; made again
#     a gradient            did not get to it              added to it
#     a gradient            added to it n times            the first n additions are left out
#     a gradient            another object in its place    the object from before is restored
#
# Autograd adds in one operator that writes nothing if its result does not fit, so an addition is done or not. A hook
# after each addition counts it, only on leaves that have a gradient: after `zero_grad()` none has. To skip an addition,
# a hook removes the gradient before it, so that autograd sets a new one, and a hook after it restores the old one. Any
# other write to a gradient during the step raises its version above the count, and the step is not run again.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchremat.measuring.interrupts import uninterrupted
from torchremat.tensors.metadata import version_of


class Gradient:
    """The gradient of one leaf, as it was before the step."""

    __slots__ = ("_done", "_is_aside", "_seen", "before", "leaf", "version")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.before = leaf.grad
        self.version = 0 if self.before is None else version_of(self.before)
        self._done = 0
        self._seen = 0
        self._is_aside = False

    @property
    def is_begun(self) -> bool:
        """Whether a part of the step has been added to the gradient from before."""
        return self._done > 0

    def is_written(self) -> bool:
        """Return whether other code has written to the gradient from before."""
        return self.before is not None and version_of(self.before) not in (-1, self.version + self._done)

    def put_back(self) -> None:
        """Restore the gradient from before, including the additions to it."""
        self.leaf.grad = self.before

    def watch(self) -> list[RemovableHandle]:
        """Count additions, and skip the ones made in earlier attempts, until the hooks are removed."""
        self._seen, skipped = 0, self._done

        def take_away(gradient: Tensor | None) -> None:
            if gradient is not None and self._seen < skipped and self.leaf.grad is self.before:
                self.leaf.grad, self._is_aside = None, True

        def count(leaf: Tensor) -> None:
            if self._is_aside:
                self.come_back()
            elif leaf.grad is self.before:
                self._done += 1
            else:
                return
            self._seen += 1

        counted = self.leaf.register_post_accumulate_grad_hook(count)
        return [self.leaf.register_hook(take_away), counted] if skipped else [counted]

    def come_back(self) -> None:
        """Restore the gradient after an addition was skipped, also if an error or Ctrl-C came between the two hooks."""
        if self._is_aside:
            self.leaf.grad, self._is_aside = self.before, False


class Gradients:
    """The gradients of leaves before a step. See NOTE [ Gradients of a step that is run again ].

    Args:
        leaves: All leaves that the step's backward gives gradients to, each once.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._all = [Gradient(leaf) for leaf in leaves]
        self._there = [one for one in self._all if one.before is not None]

    @contextmanager
    def watched(self) -> Generator[None]:
        """Count the additions of one attempt."""
        hooks: list[RemovableHandle] = []
        try:
            for one in self._there:
                hooks += one.watch()
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for one in self._there:
                one.come_back()

    def begun(self) -> list[Tensor]:
        """Return the leaves whose gradient already includes a part of the step."""
        return [one.leaf for one in self._there if one.is_begun]

    def written(self) -> list[Tensor]:
        """Return the leaves whose gradient other code has written to."""
        return [one.leaf for one in self._there if one.is_written()]

    def put_back(self) -> None:
        """Restore the gradient object of every leaf, or none."""
        for one in self._all:
            one.put_back()


@contextmanager
def lent(leaves: Iterable[Tensor]) -> Generator[None]:
    """Free the memory of gradients for the block; meanwhile their values are in host memory.

    For planning, which makes its own gradients. The tensors stay the same objects, at the same versions. Gradients on
    the host, and gradients that share their memory with other tensors, keep it.
    """
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    alone = [one for one in gradients if type(one) is Tensor and one.device.type != "cpu" and _is_alone(one)]
    aside = [(one, one.detach().to("cpu", copy=True), one.untyped_storage().nbytes()) for one in alone]
    for one, _, _ in aside:
        one.untyped_storage().resize_(0)
    try:
        yield
    finally:
        with uninterrupted():
            for one, copy, size in aside:
                one.untyped_storage().resize_(size)
                one.data.copy_(copy)


def _is_alone(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.nbytes


def hooked_after(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves with hooks that run after a gradient was added, for example an optimizer's in backward."""
    found: Callable[[Tensor], object] = lambda leaf: getattr(leaf, "_post_accumulate_grad_hooks", None)  # noqa: E731
    return [leaf for leaf in leaves if found(leaf)]
