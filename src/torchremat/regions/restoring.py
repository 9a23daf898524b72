"""The state that a call saw, shown to its recompute, and the call's second run in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from operator import is_not
from types import CellType

from torch import Tensor

from torchremat._compat.dynamo import is_compilers
from torchremat._compat.transforms import is_in_batch, outside_batches
from torchremat.ambient.generators import restore
from torchremat.ambient.global_state import EXCHANGING, AmbientState, ambient_state
from torchremat.regions.calls import Call
from torchremat.regions.threads import thread
from torchremat.state.containers import COPIED, ContainerCopies
from torchremat.state.exchange import Exchange
from torchremat.state.holders import contents_of
from torchremat.state.reading import Reading, WrittenTensors
from torchremat.state.snapshot import NOTHING, Snapshot


def run_again(
    call: Call, copies: ContainerCopies, written: WrittenTensors | None, /, *args: object, **kwargs: object
) -> object:
    """Run a call in a recompute: it sets no context variable and freezes no value again.

    Args:
        call: The call.
        copies: Of the containers in context variables, see NOTE [ What a recompute leaves behind ].
        written: Tensors that were written since, which the call must not read.
        args: As the forward's.
        kwargs: As the forward's.

    Raises:
        WrittenError: It reads one of them.
    """
    if written:
        reading = Reading(written)
        try:
            return reading.run(run_again, call, copies, None, *args, **kwargs)
        finally:
            if reading.found is not None:
                raise reading.found
    context = call.context.copy()  # a context can be entered once at a time
    if context:
        for variable, value in call.context.items():
            if type(value) in COPIED and value is not _EMPTY and not is_compilers(variable):
                own = copies.of(value, call.world.restores)
                if own is not value:
                    context.run(variable.set, own)
    now = thread.now
    if call.frozen_values is None and not now.frozen:
        return context.run(call.body, *args, **kwargs)
    had = now.frozen
    now.frozen = {name: iter(kept) for name, kept in call.frozen_values.items()} if call.frozen_values else {}
    try:
        return context.run(call.body, *args, **kwargs)
    finally:
        now.frozen = had


_EMPTY = ()


class Restored:
    """The state that a call saw in addition to its arguments, shown to a recompute until closed.

    See NOTE [ The world of a call ].

    Args:
        call: The call.
        without_gradients: Whether the gradients of leaves are put aside meanwhile.

    Attributes:
        written: Tensors that were written since the forward, which the call must not read.
        wrote: Once it is closed, tensors that the call has written in place and that cannot be restored.

    Raises:
        UnsupportedError: A parameter is sharded now, and was not.
    """

    __slots__ = ("_exchange", "_here", "_stack", "written", "wrote")

    def __init__(self, call: Call, *, without_gradients: bool = False) -> None:
        self.written: WrittenTensors | None = None
        self.wrote: Sequence[Tensor] = ()
        self._exchange: Exchange | None = None
        self._stack: ExitStack | None = None
        # The ambient state of the backward now; None if the call cannot change it.
        self._here: AmbientState | None = None
        then = call.ambient_state
        is_here = then.are_here()
        if not (is_here and call.is_pure):
            self._here = then if is_here else ambient_state()
        try:
            if not is_here or call.generators or call.captured is not None:
                self._stack = ExitStack()
                self._enter(self._stack, call, is_here)
            self._exchange = exchange_of(call, without_gradients=without_gradients)
            if self._exchange is not None:
                self.written = self._exchange.written or None
        except BaseException:
            self.close()
            raise

    def _enter(self, stack: ExitStack, call: Call, is_here: bool) -> None:
        if call.generators or call.captured is not None:
            stack.enter_context(EXCHANGING)
        if not is_here:
            call.ambient_state.restore(stack, self._here)
        if call.generators:
            if is_in_batch():
                stack.enter_context(outside_batches())
            restore(call.generators, stack)
        if call.captured is not None:
            call.captured.restore(stack)

    def close(self) -> None:
        """Put everything back, in reverse order."""
        try:
            if self._exchange is not None:
                self._exchange.close()
                self.wrote = self._exchange.wrote
        finally:
            if self._stack is not None:
                self._stack.close()
            if self._here is not None and not self._here.are_the_same():
                self._here.put_back()


def exchange_of(call: Call, *, without_gradients: bool = False) -> Exchange | None:
    """Show what a call could reach, as it was, until the exchange is closed; None if nothing needs to be shown."""
    world = call.world if call.cells is None else _of_cells(*call.cells)
    return None if world is NOTHING else Exchange(world, without_gradients=without_gradients)


def _of_cells(cells: tuple[CellType, ...], contents: list[object]) -> Snapshot:
    """Return a world in which cells held other contents than now, `NOTHING` if the contents are the same."""
    return Snapshot.of_cells(cells, contents) if any(map(is_not, contents_of(cells), contents)) else NOTHING
