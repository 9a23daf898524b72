"""The edges of a step, which give its backward its order.

Autograd has a thread for each device, and takes a node when its gradients are there. Without edges a device that has
much to do gets the gradients of all microbatches from a faster one before it has run one of them.

NOTE [ Backward in reverse ]
A cell, number m of stage s, is tied to the cells that have run before it:

    forward:    Join 1 ---- copy ---- Fork 2 ---- cell ---- Join 2, 3 ---- Fork 1, 3
                (what comes to the stage)                   (what leaves it: value and skips)

    1  Fork of m - 1, s: that backward begins when the gradients of m, s have left the device. So none pile up where
       they are made, and the microbatches of a stage are in order.
    2  Fork of a cell of the same clock, into which stage s passes something: its gradient is copied to stage s when the
       backward of m, s begins there. So none pile up where they go to.
    3  Fork of the last cell of the same device: that backward begins after m, s. So each device goes through its cells
       in the reverse order of the forward.

By 3 alone a backward might begin while another one of its device is at work. It does not: of the nodes that could run
autograd takes the one that the device's thread made last, and the worker makes `Join 2, 3` and `Fork 1, 3` behind the
cell, so all nodes of cells that ran later come first. An edge cannot lead from the end of the cell instead: an input of
the pipe mostly requires no grad.

Edges order what is enqueued, and a stage waits for another one only if it would be ahead by more than a clock. So equal
microbatches lose no time, however fast each stage is. torchgpipe (see `dependency`) has the edges 1 alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchremat.pipeline.dependency import fork_all, join_all

K = TypeVar("K")


class Ordering:
    """The edges of one step.

    Args:
        devices: By stage; the same device by the same name.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._last_of_stage: dict[int, Tensor] = {}
        self._last_of_device: dict[torch.device, Tensor] = {}
        self._copied_from: defaultdict[int, list[Tensor]] = defaultdict(list)

    def next_clock(self) -> None:
        """Begin a clock: what is copied from a stage after this is tied to its next cell."""
        self._copied_from.clear()

    def leaving(self, target: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that go to a stage, before they are copied there."""
        return join_all(tensors, *_phonies_of(self._last_of_stage, target))

    def arrived(self, source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that come from a stage, after they were copied."""
        tensors, phony = fork_all(tensors)
        self._copied_from[source].append(phony)
        return tensors

    def ran(self, stage: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what leaves a cell of a stage. Called by the worker of its device."""
        device = self._devices[stage]
        copied = self._copied_from.get(stage, ())
        tensors, phony = fork_all(join_all(tensors, *copied, *_phonies_of(self._last_of_device, device)))
        self._last_of_stage[stage] = phony
        if phony.requires_grad:  # a cell without grad has no place in backward
            self._last_of_device[device] = phony
        return tensors


def _phonies_of(phonies: Mapping[K, Tensor], key: K) -> tuple[Tensor, ...]:
    return (phonies[key],) if key in phonies else ()
