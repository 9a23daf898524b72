"""What the executor takes by itself: a region, and a region whose operators are seen by a policy.

Measured once in a process, on bodies of a few operators as modules have them, which compute next to nothing: a norm, a
product, an activation. A region takes longer the more is saved in it, so there is a short body and a long one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from torchremat.policies.ordinals import save_ordinals
from torchremat.regions.calls import Body
from torchremat.regions.region import Region
from torchremat.regions.settings import Settings

# How often the body does them, and what there is each time: operators, with the view of the weight, and saved tensors.
_SHORT, _LONG = 1, 4
_OPERATORS = ("aten.native_layer_norm.default", "aten.t.default", "aten.addmm.default", "aten.gelu.default")
_SAVES = 8
_WIDTH = 4
_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds that the executor takes beside what it runs.

    Attributes:
        region_s: Of a region in which nothing is saved: its forward and its recompute.
        saved_s: Of a tensor that is saved in a region, in both of them.
        collected_s: Of an operator in a forward whose policy is asked about it.
        replayed_s: Of an operator in a recompute that may have been held.
    """

    region_s: float
    saved_s: float = 0.0
    collected_s: float
    replayed_s: float

    def seconds(self, saves: int, operators: int = 0, passed: int = 0) -> float:
        """Return the seconds for a region.

        Args:
            saves: How many tensors are saved in it.
            operators: How many operators a policy is asked about.
            passed: How many of them a recompute passes.
        """
        return self.region_s + saves * self.saved_s + operators * self.collected_s + passed * self.replayed_s


# Those of a device of no name, see `operators.nominal_seconds`.
NOMINAL = Overheads(region_s=2e-4, collected_s=1e-5, replayed_s=1e-5)


@cache
def overheads() -> Overheads:
    """Return what the executor takes by itself, in this process."""
    short, _ = _added(_SHORT)
    long, region = _added(_LONG)
    saved_s = max(0.0, long - short) / (_SAVES * (_LONG - _SHORT))
    counted = tuple(name for name in _OPERATORS if name != "aten.t.default")
    selective = _measured(_LONG, Settings(policy=save_ordinals(counted * _LONG, frozenset())))
    return Overheads(
        region_s=max(0.0, short - _SAVES * _SHORT * saved_s),
        saved_s=saved_s,
        collected_s=max(0.0, selective[0] - region[0]) / (_LONG * len(_OPERATORS)),
        replayed_s=max(0.0, selective[1] - region[1]) / (_LONG * len(_OPERATORS)),
    )


def _added(times: int) -> tuple[float, tuple[float, float]]:
    """Return the seconds that a region adds to a body, and those of its forward and of its backward."""
    plain, region = _measured(times, None), _measured(times, Settings())
    # A recompute runs the operators once more, and that is no overhead.
    return sum(region) - sum(plain) - plain[0], region


def _measured(times: int, settings: Settings | None) -> tuple[float, float]:
    """Return the least seconds of a forward and of its backward."""
    weight = torch.eye(_WIDTH, requires_grad=True)
    bias = torch.zeros(_WIDTH, requires_grad=True)
    body = partial(_body, weight, bias, times)
    forwards: list[float] = []
    backwards: list[float] = []
    x = torch.ones(_WIDTH, _WIDTH, requires_grad=True)
    for _ in range(_RUNS):
        start_s = time.perf_counter()
        output = body(x) if settings is None else _in_region(settings, body, x)
        middle_s = time.perf_counter()
        torch.autograd.grad(output, (x, weight, bias), torch.ones_like(output))
        forwards.append(middle_s - start_s)
        backwards.append(time.perf_counter() - middle_s)
    return min(forwards), min(backwards)


def _in_region(settings: Settings, body: Body, x: Tensor) -> Tensor:
    output = Region(settings).call(body, (x,), {}, [])
    assert isinstance(output, Tensor)
    return output


def _body(weight: Tensor, bias: Tensor, times: int, x: Tensor) -> Tensor:
    for _number in range(times):
        x = functional.gelu(functional.linear(functional.layer_norm(x, (_WIDTH,), bias, bias), weight, bias))
    return x
