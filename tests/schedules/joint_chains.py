"""Chains with a backward, as joint lists, and the best of all their splits."""

import itertools
import math

from torchremat.schedules.dataflow import Operator
from torchremat.schedules.joint import Joint, is_possible, split


def chain(sizes, costs, *, skips=(), workspaces=None):
    """A chain of operators, and a backward that reads the values in the opposite order.

    Value 0 is the input, i + 1 the result of operator i; each backward operator reads one, and the gradient before.
    `skips` are (from, to): operator `to` reads value `from` as well. `workspaces` are of the operators of the forward.
    """
    steps = len(sizes)
    beside = workspaces or [0] * steps
    forward = [
        Operator(
            name=f"f{i}",
            inputs=(i, *(value for value, to in skips if to == i)),
            outputs=(i + 1,),
            cost=float(costs[i]),
            workspace_bytes=beside[i],
        )
        for i in range(steps)
    ]
    incoming = steps + 1
    backward = [
        Operator(name=f"b{i}", inputs=(incoming + steps - 1 - i, i + 1), outputs=(incoming + steps - i,), cost=1.0)
        for i in reversed(range(steps))
    ]
    return Joint(
        operators=(*forward, *backward),
        size_bytes=(0, *sizes, *[1] * (steps + 1)),
        outputs=(steps,),
        gradients=(incoming + steps,),
        incoming=(incoming,),
        begins=steps,
    )


def order(joint, indices):
    return " ".join(joint.operators[index].name for index in indices)


def best(joint, limit):
    """The least cost of all splits within a limit, found by trying each."""
    candidates = [value for value in joint.maker if joint.maker[value] not in joint.of_backward]
    costs = [
        found.cost
        for count in range(len(candidates) + 1)
        for saved in itertools.combinations(candidates, count)
        if (found := split(joint, saved)).peak_bytes <= limit and is_possible(found)
    ]
    return min(costs, default=math.inf)
