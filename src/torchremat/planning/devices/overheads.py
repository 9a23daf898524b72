"""The executor's own overheads: of a region, and of a region whose operators a policy sees.

Measured once in a process, on bodies of a few operators as modules have them, which compute next to nothing: a norm, a
product, an activation. A region takes longer the more is saved in it, so a short body and a long one are measured.
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

# How often the body repeats them, and the counts per repeat: operators, with the view of the weight, and saved tensors.
_SHORT, _LONG = 1, 4
_OPERATORS = ("aten.native_layer_norm.default", "aten.t.default", "aten.addmm.default", "aten.gelu.default")
_SAVES = 8
_WIDTH = 4
_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Overhead of the executor in seconds, without the operators that it runs.

    Attributes:
        region_s: Per region in which nothing is saved: its forward and its recompute.
        saved_s: Per tensor that is saved in a region, in forward and recompute together.
        chosen_s: Additional seconds if the region has a policy.
        collected_s: Per operator in a forward whose policy is asked about it.
        replayed_s: Per operator in a recompute that may have been held.
    """

    region_s: float
    saved_s: float = 0.0
    chosen_s: float = 0.0
    collected_s: float
    replayed_s: float

    def seconds(self, saves: int, operators: int = 0, passed: int = 0) -> float:
        """Return the seconds for a region.

        Args:
            saves: Number of tensors saved in it.
            operators: Number of operators that a policy is asked about.
            passed: Number of these that a recompute passes.
        """
        saved_s = self.saved_s + (self.chosen_s if operators else 0.0)
        return self.region_s + saves * saved_s + operators * self.collected_s + passed * self.replayed_s


# The overheads of a generic device, see `traces.nominal_seconds`.
NOMINAL = Overheads(region_s=2e-4, collected_s=1e-5, replayed_s=1e-5)


@cache
def overheads() -> Overheads:
    """Return the executor's own overheads in this process."""
    # Policies that hold the output of the first operator, and of the last, which no recompute reaches: they see one
    # operator, and all of them.
    counted = tuple(name for name in _OPERATORS if name != "aten.t.default") * _LONG
    one, every = (Settings(policy=save_ordinals(counted, frozenset({held}))) for held in (0, len(counted) - 1))
    took = _measured(
        {
            "short": (_SHORT, None),
            "short region": (_SHORT, Settings()),
            "long": (_LONG, None),
            "region": (_LONG, Settings()),
            "one": (_LONG, one),
            "every": (_LONG, every),
        }
    )
    short, long = took["short region"].over(took["short"]), took["region"].over(took["long"])
    saved_s = max(0.0, long - short) / (_SAVES * (_LONG - _SHORT))
    more = _LONG * len(_OPERATORS) - 1
    collected_s = max(0.0, took["every"].forward_s - took["one"].forward_s) / more
    replayed_s = max(0.0, took["every"].backward_s - took["one"].backward_s) / more
    chosen_s = max(0.0, took["one"].total_s - took["region"].total_s - collected_s - replayed_s) / (_SAVES * _LONG)
    return Overheads(
        region_s=max(0.0, short - _SAVES * _SHORT * saved_s),
        saved_s=saved_s,
        chosen_s=chosen_s,
        collected_s=collected_s,
        replayed_s=replayed_s,
    )


@dataclass(frozen=True)
class _PassSeconds:
    """Seconds of a forward and of its backward."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s

    def over(self, plain: _PassSeconds) -> float:
        """Return the seconds that a region has added to a body."""
        # A recompute runs the operators once more, which is not overhead.
        return self.total_s - plain.total_s - plain.forward_s


def _measured(cases: dict[str, tuple[int, Settings | None]]) -> dict[str, _PassSeconds]:
    """Return the least seconds of each case: a length of the body, and the region that it runs in, if any."""
    weight = torch.eye(_WIDTH, requires_grad=True)
    bias = torch.zeros(_WIDTH, requires_grad=True)
    x = torch.ones(_WIDTH, _WIDTH, requires_grad=True)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    # In turn, since other work on the machine comes and goes.
    for _ in range(_RUNS):
        for name, (times, settings) in cases.items():
            body = partial(_body, weight, bias, times)
            start_s = time.perf_counter()
            output = body(x) if settings is None else _in_region(settings, body, x)
            middle_s = time.perf_counter()
            # Of a scalar: with a gradient that is given torch imports sympy, which takes longer than all of this.
            torch.autograd.grad(output.sum(), (x, weight, bias))
            found[name].append((middle_s - start_s, time.perf_counter() - middle_s))
    return {name: _PassSeconds(*map(min, zip(*runs, strict=True))) for name, runs in found.items()}


def _in_region(settings: Settings, body: Body, x: Tensor) -> Tensor:
    output = Region(settings).call(body, (x,), {}, [])
    assert isinstance(output, Tensor)
    return output


def _body(weight: Tensor, bias: Tensor, times: int, x: Tensor) -> Tensor:
    for _number in range(times):
        x = functional.gelu(functional.linear(functional.layer_norm(x, (_WIDTH,), bias, bias), weight, bias))
    return x
