"""`GraphExecGroup`: one recompute for several backward calls that share no node."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from torch.utils import checkpoint as torch_checkpoint

from torchremat.regions.sessions import Session


class GraphExecGroup(torch_checkpoint.GraphExecGroup):
    """A region that several backward calls reach inside of one group is recomputed once.

    The contract is torch's: each saved tensor can be unpacked in one backward call of a group, a group that is entered
    again continues, and groups do not nest. `torchremat.session` requires less. Recomputed tensors that are never
    unpacked are dropped with the group.

    Both sides see the group: torch's own regions in the same model see it too.
    """

    def __init__(self) -> None:
        self._session = Session(1, unpacks_once=True)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            super().__enter__()
            stack.callback(super().__exit__)
            stack.enter_context(self._session.active())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        self._open.close()

    def __del__(self) -> None:
        self._session.close()
