"""What it takes to move a carry to a store and back, in steps: measured where the caller does not say it.

The step is the first one of the loop, timed as it runs; no step runs for that alone. The store is timed as for a plan,
once for carries of a size, in a thread of its own: hooks, modes and autocast of the caller's are not those of a store.
Times are rounded to powers of two, so that a loop has the same schedule in most training steps, and its table is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import log2
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchremat._compat.fakes import is_fake
from torchremat._compat.transforms import is_transformed
from torchremat.measuring.store_speeds import Payload, Speed, measured_speed
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.stores.base import statistics_of
from torchremat.tensors.handles import Store

# Less of a step than this is nothing.
_LEAST_STEPS = 2.0**-10

_speeds: WeakKeyDictionary[Store, dict[tuple[torch.device, Payload], Speed]] = WeakKeyDictionary()


def may_be_timed(tensors: Sequence[Tensor]) -> bool:
    """Return whether steps with such a carry have times: not so while the library itself measures, or plans."""
    return not (is_rehearsing() or is_transformed() or any(map(is_fake, tensors)))


def move_steps(store: Store, tensors: Sequence[Tensor], step_s: float | None) -> tuple[float, float]:
    """Return how many steps it takes to write a carry to a store, and to read it.

    Args:
        store: The store.
        tensors: The tensors of the carry.
        step_s: The seconds of a step; without, each move takes half a step.
    """
    if step_s is None:
        return 0.5, 0.5
    speed = _speed_of(store, tensors)
    count, size_bytes = len(tensors), sum(one.nbytes for one in tensors)
    write, read = (_rounded(one.seconds(count, size_bytes) / step_s) for one in (speed.out, speed.back))
    return write, read


def _speed_of(store: Store, tensors: Sequence[Tensor]) -> Speed:
    known = _speeds.setdefault(store, {})
    key = tensors[0].device, Payload(tensors=tuple((one.nbytes, one.dtype) for one in tensors))
    if key not in known:
        statistics = statistics_of(store)
        limit_bytes = None if statistics is None else statistics.limit_bytes
        with ThreadPoolExecutor(1) as pool:
            known[key] = pool.submit(measured_speed, store, *key, limit_bytes).result()
    return known[key]


def _rounded(steps: float) -> float:
    return 2.0 ** round(log2(steps)) if steps >= _LEAST_STEPS else 0.0
