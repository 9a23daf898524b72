"""`EagerMode`: the base of our dispatch modes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Self

import torch

from torchremat._compat.modes import DispatchMode


class EagerMode(DispatchMode):
    """A dispatch mode under which compiled code runs eagerly.

    dynamo does not trace under a mode. It would not just run the code eagerly for once either: it notes for good that
    this code is not to be compiled, so a model that was watched once would stay slow. Told beforehand to run eagerly,
    it notes nothing.
    """

    # Without this torch refuses to run a higher-order operator below a mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._entered: list[ExitStack] = []  # a mode may be entered again while it is entered

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Nothing is compiled where dynamo is not even loaded, and to load it takes seconds.
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            super().__enter__()
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._entered.pop().close()
