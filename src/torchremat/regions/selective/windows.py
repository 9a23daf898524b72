"""A watcher of a call's operators between its windows: when it sees, and when the mode that shows them is on.

See NOTE [ Selective recompute ], 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchremat._compat.modes import Operation
from torchremat._compat.sharding import shards_anything
from torchremat.regions.decisions import Window
from torchremat.regions.selective.cache import SeenWindow, Selection, written_by
from torchremat.regions.selective.op_info import known_op_info, op_info_of

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Switch(Protocol):
    """Switches the mode that shows the operators, where that is possible."""

    @property
    def is_on(self) -> bool:
        """Whether it is on."""
        ...

    def off(self) -> None:
        """Take it off."""
        ...

    def on(self) -> None:
        """Put it on again."""
        ...


class Watching:
    """A watcher of the operators of a call.

    Attributes:
        selection: The outputs that are kept.
        mode: The mode that shows the operators.
        switch: Takes the mode off and puts it on again; None if the mode exists not only for them.
        saves: How many tensors the call has saved so far.
        is_done: Whether the operators that run now are in no window.
        is_blind: Whether they need not be seen either.
        beside_fsdp: Whether some of the operators may be FSDP2's own. See NOTE [ Operators of FSDP2 ].
        began_in: The code object of the frame that contains the block, if one does.
        around: The node of a backward that the block is run by, if one is.
        moved: The generators that kept draws have moved in the running recompute, with their earlier states.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._looks_on = selection.asked is None or selection.asked.looks_on
        self.mode: object = None
        self.switch: Switch | None = None
        self.saves = 0
        self.is_done = True
        self.is_blind = False
        self._place = 0  # how many windows have begun
        self.beside_fsdp = shards_anything()
        self.began_in: CodeType | None = None
        self.around: Node | None = None
        self.moved: dict[torch.Generator | torch.device, Tensor] | None = None

    def begin(self) -> None:
        """Begin with the window that the call begins with, if there is one, when its block is entered."""
        if self._place or self.saves:
            return  # again
        window = self._window(0)
        if window is not None and not window.sees:
            self._open(window)
        else:
            self._rest()

    def saved(self) -> None:
        """Note that a tensor was saved: windows begin here, and the mode is switched off after them."""
        # See NOTE [ Selective recompute ], 9
        self.saves += 1
        if not self.is_done:
            return
        window = self._window(self._place)
        while window is not None and window.sees < self.saves:
            self._place += 1  # it could not begin
            window = self._window(self._place)
        if window is None or self.saves < window.on:
            self._rest()
        elif self.saves == window.sees:
            if self.switch is None or self.switch.is_on:
                self._open(window)
        elif self.saves == window.on:
            self.is_blind = not self._looks_on
            if self.switch is not None:
                self.switch.on()

    def _rest(self) -> None:
        if self.switch is not None and self.switch.is_on and not self._looks_on:
            self.switch.off()

    def _window(self, place: int) -> Window | SeenWindow | None:
        """Return a window, None if there is no other."""
        raise NotImplementedError

    def _open(self, window: Any) -> None:
        """Begin a window."""
        self._place += 1
        self.is_done = self.is_blind = False

    def _close(self) -> None:
        """End the window. Until the mode is off, views of what was kept are still looked for."""
        self.is_done = True

    def unasked(self, operator: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run an operator that the policy is not asked about: it may write to kept memory."""
        op_info = known_op_info.get(id(operator)) or op_info_of(operator)
        if op_info.writes:
            self.selection.protect(written_by(op_info.writes, args, kwargs))
        output = op_info.run(*args, **kwargs)
        if op_info.says_fresh:
            self.selection.watch(output)
        return output
