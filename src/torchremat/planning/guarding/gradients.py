"""Gradients that were there before a step, and what a failed attempt has added to them."""

# NOTE [ Gradients of a step that is run again ]
#
# A step that is run again must not add its gradients twice. A copy of them from before each step would need as many
# bytes as the gradients have, on a device that is about to be full, and be taken for steps that do not fail. So none is
# taken; the next attempt leaves out what the failed one has done already, which is the same gradient bit for bit.
#
#     before the step       a failed attempt               the next attempt
#     no gradient           made one                       it is dropped; made again
#     a gradient            did not get to it              added to it
#     a gradient            added to it n times            the first n additions are left out
#     a gradient            another object in its place    the object from before is put back
#
# Autograd adds in one operator that writes nothing if it has no room for its result, so an addition is done or not. A
# hook after each counts them, on leaves that have a gradient only: after `zero_grad()` there are none. To leave one
# out, a hook takes the gradient away before, so that autograd sets a new one, and a hook after it puts the old one in
# its place. Who else writes to a gradient during the step moves its version by more than was counted, and the step is
# not run again.

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
        """Return whether somebody else has written to the gradient from before."""
        return self.before is not None and version_of(self.before) not in (-1, self.version + self._done)

    def put_back(self) -> None:
        """Let the leaf have the gradient from before, with what was added to it."""
        self.leaf.grad = self.before

    def watch(self) -> list[RemovableHandle]:
        """Count what is added, and leave out what was added in earlier attempts, until the hooks are removed."""
        self._seen, skipped = 0, self._done

        def take_away(gradient: Tensor | None) -> None:
            if gradient is not None and self._seen < skipped and self.leaf.grad is self.before:
                self.leaf.grad, self._is_aside = None, True

        def count(leaf: Tensor) -> None:
            if self._is_aside:
                leaf.grad, self._is_aside = self.before, False
            elif leaf.grad is self.before:
                self._done += 1
            else:
                return
            self._seen += 1

        counted = self.leaf.register_post_accumulate_grad_hook(count)
        return [self.leaf.register_hook(take_away), counted] if skipped else [counted]

    def come_back(self) -> None:
        """Put the gradient back where an error, or Ctrl-C, came between the two hooks."""
        if self._is_aside:
            self.leaf.grad, self._is_aside = self.before, False


class Gradients:
    """The gradients of leaves before a step. See NOTE [ Gradients of a step that is run again ].

    Args:
        leaves: All that the step's backward gives gradients to, each once.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._all = [Gradient(leaf) for leaf in leaves]
        self._there = [one for one in self._all if one.before is not None]

    @contextmanager
    def watched(self) -> Generator[None]:
        """Count what one attempt adds."""
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
        """Return the leaves to whose gradient a part of the step has been added."""
        return [one.leaf for one in self._there if one.is_begun]

    def written(self) -> list[Tensor]:
        """Return the leaves to whose gradient something else has written."""
        return [one.leaf for one in self._there if one.is_written()]

    def put_back(self) -> None:
        """Let every leaf have the gradient object that it had, or none."""
        for one in self._all:
            one.put_back()


@contextmanager
def lent(leaves: Iterable[Tensor]) -> Generator[None]:
    """Give the memory of gradients back for the block; meanwhile their values lie in host memory.

    For planning, which makes gradients of its own. The tensors stay the same objects, at the same versions. Those on
    the host, and those that share their memory with others, keep it.
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
    """Return the leaves with hooks that run after a gradient was added, such as an optimizer's within backward."""
    found: Callable[[Tensor], object] = lambda leaf: getattr(leaf, "_post_accumulate_grad_hooks", None)  # noqa: E731
    return [leaf for leaf in leaves if found(leaf)]
