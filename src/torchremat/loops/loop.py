"""Loops as chains of regions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchremat._compat.graphs import outside_graphs
from torchremat.errors import MutationError, UnsupportedError
from torchremat.loops.forward import Body, Forward
from torchremat.loops.slices import Slices
from torchremat.loops.stretches import Stretches
from torchremat.regions.settings import Settings
from torchremat.regions.threads import makes_regions
from torchremat.schedules.binomial import first_borders
from torchremat.tensors.structure import split, tensors_in, join


def loop(body: Body, carry: Any, xs: Any = None, *, length: int | None = None, slots: int = 2, block: int = 1) -> tuple[Any, Any]:
    slices = Slices(xs)
    n = slices.length if slices.length is not None else length
    tensors: list[Tensor] = []
    split(carry, tensors, [])
    st = Stretches(len(tensors), slots, block)
    fw = Forward(body, slices, st, Settings())
    blocks = -(-n // block)
    borders = {one * block for one in first_borders(blocks, slots)}
    last = (blocks - 1) * block
    ys = []
    for i in range(n):
        if i >= last:
            carry, y = body(carry, slices.at(i))
        else:
            carry, y = fw.run(i, carry, in_slot=i in borders)
        ys.append(y)
    loop.last = st
    return carry, _stacked(ys)


def _stacked(outputs):
    t = []
    template = split(outputs[0], t, [])
    cols = zip(*[tensors_in(o) for o in outputs])
    return join(template, [torch.stack(c) for c in cols])
