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
from contextlib import ExitStack, contextmanager

from torch import Tensor

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

    def watch(self, stack: ExitStack) -> None:
        """Count what is added until `stack` is closed, and leave out what was added in earlier attempts."""
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

        if skipped:
            stack.callback(self.leaf.register_hook(take_away).remove)
        stack.callback(self.leaf.register_post_accumulate_grad_hook(count).remove)
        stack.callback(self._come_back)

    def _come_back(self) -> None:
        if self._is_aside:  # an error, or Ctrl-C, between the two hooks
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
        if not self._there:
            yield
            return
        with ExitStack() as stack:
            for one in self._there:
                one.watch(stack)
            yield

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


def hooked_after(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves with hooks that run after a gradient was added, such as an optimizer's within backward."""
    found: Callable[[Tensor], object] = lambda leaf: getattr(leaf, "_post_accumulate_grad_hooks", None)  # noqa: E731
    return [leaf for leaf in leaves if found(leaf)]
