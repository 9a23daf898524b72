"""What the executor takes by itself: a region, and a region whose operators are seen by a policy.

Measured once in a process, on a body of operators that compute next to nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from torchremat.policies.ordinals import save_ordinals
from torchremat.regions.calls import Body
from torchremat.regions.region import Region
from torchremat.regions.settings import Settings

_OPERATORS = 64
_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds that the executor takes beside what it runs.

    Attributes:
        region_s: Of a region: its forward and its recompute.
        collected_s: Of an operator in a forward whose policy is asked about it.
        replayed_s: Of an operator in a recompute that may have been held.
    """

    region_s: float
    collected_s: float
    replayed_s: float

    def seconds(self, operators: int, passed: int) -> float:
        """Return the seconds for a region of some operators, of which a recompute passes the first ones."""
        return self.region_s + operators * self.collected_s + passed * self.replayed_s


# Those of a device of no name, see `operators.nominal_seconds`.
NOMINAL = Overheads(region_s=2e-4, collected_s=1e-5, replayed_s=1e-5)


@cache
def overheads() -> Overheads:
    """Return what the executor takes by itself, in this process."""
    plain = _measured(None)
    region = _measured(Settings())
    policy = save_ordinals(("aten.mul.Tensor",) * _OPERATORS, frozenset())
    selective = _measured(Settings(policy=policy))
    # A recompute runs the operators once more, and that is no overhead.
    return Overheads(
        region_s=max(0.0, sum(region) - sum(plain) - plain[0]),
        collected_s=max(0.0, selective[0] - region[0]) / _OPERATORS,
        replayed_s=max(0.0, selective[1] - region[1]) / _OPERATORS,
    )


def _measured(settings: Settings | None) -> tuple[float, float]:
    """Return the least seconds of a forward and of its backward."""
    forwards: list[float] = []
    backwards: list[float] = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(_RUNS):
        start_s = time.perf_counter()
        output = _body((x,), {}) if settings is None else _in_region(settings, _body, x)
        middle_s = time.perf_counter()
        torch.autograd.grad(output, x)
        forwards.append(middle_s - start_s)
        backwards.append(time.perf_counter() - middle_s)
    return min(forwards), min(backwards)


def _in_region(settings: Settings, body: Body, x: Tensor) -> Tensor:
    output = Region(settings).call(body, (x,), {}, [])
    assert isinstance(output, Tensor)
    return output


def _body(args: tuple[object, ...], _: dict[str, object]) -> Tensor:
    (x,) = args
    assert isinstance(x, Tensor)
    for _number in range(_OPERATORS):
        x = x * x
    return x
