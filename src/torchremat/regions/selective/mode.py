"""The mode that shows a region's operators to their watcher.

See NOTE [ Selective recompute ].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from types import CodeType
from typing import TypeVar

from torch import Tensor
from torch.overrides import has_torch_function

from torchremat._compat.autograd import current_node
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import (
    Args,
    EagerMode,
    Kwargs,
    Operation,
    Types,
    alias_past_modes,
    count_dispatch_modes,
    innermost_dispatch_mode,
    past_torch_function,
    push_dispatch_mode,
    take_dispatch_mode,
)
from torchremat._compat.sharding import is_run_by_fsdp
from torchremat._compat.transforms import innermost_transform
from torchremat.ambient.global_state import only_watches
from torchremat.ambient.hidden import hidden
from torchremat.regions.selective.watching import Collecting, Replaying
from torchremat.regions.threads import thread

T = TypeVar("T")
A = TypeVar("A")


# NOTE [ Modes and policies ]
#
# A mode of the user may run other operators in place of one, like torch's flop counter. Such a mode around the forward
# alone, or in a region and around an inner one, would let the forward of a region see other operators than its
# recompute, which restores the modes that act and not the modes that watch. So the mode of a region sees operators
# first: it is the innermost mode where the region begins, and the modes of outer regions are off meanwhile. Modes that
# the user enters inside the region come before it, in a recompute as in the forward.


@only_watches
class _Mode(EagerMode):
    """The mode that shows each operator to the active watcher. See NOTE [ Modes and policies ]."""

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        run = thread.now.selecting
        if (
            run is None
            or run.is_blind
            or run.mode is not self
            or hidden.now
            or (run.beside_fsdp and is_run_by_fsdp(run.began_in))
        ):
            see = _run
        else:
            see = run.operator
        if not has_torch_function(args):
            return see(func, args, kwargs or _NO_KWARGS)
        # The call came from C++, as in a backward, which bypasses subclasses and function modes; they are bypassed here
        # too.
        with past_torch_function():
            return see(func, args, kwargs or _NO_KWARGS)


_NO_KWARGS: Mapping[str, object] = {}


def _run(operator: Operation, args: Args, kwargs: Mapping[str, object]) -> object:
    return operator(*args, **kwargs)


class SeenBy(AbstractContextManager[Collecting | Replaying | None]):
    """A block whose operators are seen by `run`; None hides them from all watchers. It returns the watcher before.

    Args:
        run: The watcher that sees them.
        began_in: The code of the function that contains the block; None if another function may leave the block.
    """

    __slots__ = ("_began_in", "_depth", "_had", "_is_off", "_mode", "_now", "_run", "_thread")

    def __init__(self, run: Collecting | Replaying | None, began_in: CodeType | None = None) -> None:
        self._run = run
        self._began_in = began_in
        self._mode: _Mode | None = None
        self._is_off = False
        self._depth = 0  # how many modes are on while it is off

    def __enter__(self) -> Collecting | Replaying | None:
        self._now = thread.now
        self._had = self._now.selecting
        self._thread = get_ident()
        if self._run is not None:
            # A backward in a region runs with the region's modes, in any thread.
            mode = innermost_dispatch_mode()
            if type(mode) is not _Mode:
                mode = self._mode = _Mode()
                mode.__enter__()
                self._run.switch = self
            self._run.mode = mode
            self._run.moved = self._now.moved
            self._run.began_in = self._began_in
            self._run.around = current_node()
        thread.now.selecting = self._run
        if self._run is not None:
            self._run.begin()
        return self._had

    @property
    def is_on(self) -> bool:
        """Whether the mode is on."""
        return not self._is_off

    def off(self) -> None:
        """Take the mode off for some of the block, except in another thread and inside a mode of the user."""
        if not self._is_off and self._is_here() and innermost_dispatch_mode() is self._mode:
            take_dispatch_mode(_Mode)
            self._is_off, self._depth = True, count_dispatch_modes()

    def on(self) -> None:
        """Put the mode on again, except there."""
        if self._is_off and self._is_here() and count_dispatch_modes() == self._depth:
            push_dispatch_mode(self._mode)
            self._is_off = False

    def _is_here(self) -> bool:
        return self._thread == get_ident() and self._now is thread.now

    def __exit__(self, *error: object) -> None:
        thread.now.selecting = self._had
        if self._run is not None:
            self._run.around = None
        if self._mode is not None:
            if self._run is not None:
                self._run.switch = None  # else both, and all kept outputs, would wait for the cycle collector
            if self._is_off:
                push_dispatch_mode(self._mode)  # it takes itself off
            self._mode.__exit__(*error)


def alias_unseen(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor without its graph, and hide the operator."""
    modes = count_dispatch_modes()
    if not modes:
        return tensor.detach()
    is_alone = modes == 1 and type(innermost_dispatch_mode()) is _Mode
    if is_alone and type(tensor) is Tensor and innermost_transform() is None:
        return alias_past_modes(tensor)  # as below in half the time
    return unseen(Tensor.detach, tensor)


@outside_graphs  # as a hook: code under dynamo calls it, compiled or not
def unseen(function: Callable[[A], T], argument: A) -> T:
    """Return `function(argument)`, and hide its operators."""
    # Dispatching an operator through a mode takes longer than the rest of a hook.
    mode = take_dispatch_mode(_Mode)
    run, thread.now.selecting = thread.now.selecting, None
    try:
        return function(argument)
    finally:
        thread.now.selecting = run
        if mode is not None:
            push_dispatch_mode(mode)
