"""`PeakPartitioner`: splits a compiler's joint graph of a forward and its backward, for a peak.

torch's own partitioner bounds the bytes saved between the two, and when few are saved, the backward begins by
recomputing all of the forward. Ours chooses the saved values by the peak of both graphs, in the order in which they
run.

    1  torch splits the graph as it does without a budget, and the graph is cleaned up; torch splits copies under
       some budgets of its own; all of these splits are candidates
    2  `Saver` chooses, on the graph read as data
    3  torch's own functions make the two graphs for the saved values, with recomputes as late as possible
    4  the peak of these graphs is the prediction; where Inductor makes kernels of them, the peak of its programs, and
       steps 2 to 4 repeat a few times until that comes close to the budget

Missing on purpose: values that are recomputed twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from torch.fx import GraphModule

from torchremat._compat.inductor import (
    copied,
    never_larger,
    optimizes_kernels,
    torch_partition,
    torch_partition_of_share,
)
from torchremat.errors import BudgetError, CompileWarning, warn
from torchremat.planning.budgets import bytes_of, check_budget, margin_of, relative_of
from torchremat.planning.compiling.graphs import JointReading, read_graph
from torchremat.planning.compiling.halves import Halver, Halves, aimed
from torchremat.planning.searches.chains import Cost, check_cost
from torchremat.schedules.joint import split
from torchremat.schedules.prices import Prices
from torchremat.schedules.saved_values import Saver
from torchremat.tensors.sizes import format_bytes, format_flops

# Shares of the bytes that torch saves without a budget: its splits under these are candidates.
_SHARES = (0.75, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How one joint graph was split.

    Attributes:
        budget_bytes: The most that its forward and backward may need together with parameters and inputs.
        peak_bytes: Their predicted peak.
        plain_peak_bytes: Their predicted peak if nothing runs twice.
        saved_bytes: Bytes that the forward leaves for the backward, without parameters and inputs.
        fixed_bytes: Parameters and inputs.
        recomputed_operators: How many operators run in both.
        recomputed_flops: The flops of these operators.
        flops: Of the forward.
        excess: Upper bound on the recompute cost above the least that any schedule needs within the budget: as a share
            of the forward's cost.
        is_torchs: Whether torch's own split without a budget was the best.
    """

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    saved_bytes: int
    fixed_bytes: int
    recomputed_operators: int
    recomputed_flops: int
    flops: int
    excess: float
    is_torchs: bool

    def __str__(self) -> str:
        share = f", {100 * self.recomputed_flops / self.flops:.0f}% of the forward's" if self.flops else ""
        return "\n".join(
            [
                f"peak        {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
                f"(plain: {format_bytes(self.plain_peak_bytes)})",
                f"saved       {format_bytes(self.saved_bytes)}, plus {format_bytes(self.fixed_bytes)} of parameters "
                "and inputs",
                f"recomputed  {self.recomputed_operators} operators, {format_flops(self.recomputed_flops)}{share}"
                + ("; torch's own split" if self.is_torchs else ""),
                f"excess      at most {100 * self.excess:.1f}% of the forward over what any schedule needs",
            ]
        )


class PeakPartitioner:
    """A partition function for AOTAutograd and Inductor that bounds the peak of a step.

    `compiled` installs it if the backend has a hook for it. A custom backend takes it as
    `aot_autograd(partition_fn=PeakPartitioner("2GiB"), ...)`.

    Args:
        budget: Peak bytes of forward and backward, parameters, inputs and gradients included: an int, `"6GiB"`,
            `"60%"` of their peak without any recompute, or `"min"` for the lowest that a split is found for. Each graph
            is held to it by itself.
        margin: Bytes of the budget to leave free for memory outside of any graph, for example an optimizer's state.
        cost: The recompute cost to minimise: estimated `"seconds"`, or `"flops"`.

    Attributes:
        budget: The budget, as given.
        margin_bytes: The part of the budget that stays free.
        cost: The recompute cost to minimise.
        partitions: The result for each graph that was split, in order.
        was_used: Whether something has been compiled with it.

    Raises:
        BudgetError: The budget or the margin is not a size, or the margin leaves nothing of it; when a graph is split,
            also if no split fits.
        UnsupportedError: `cost` is not a cost.
    """

    def __init__(self, budget: int | str, *, margin: int | str = 0, cost: Cost = "seconds") -> None:
        check_budget(budget, "the device", margin=margin)  # its size in bytes is known when a graph is split
        check_cost(cost)
        self.budget = budget
        self.cost: Cost = cost
        self.margin_bytes = margin_of(margin)
        self.partitions: list[Partition] = []
        self.was_used = False

    def __call__(
        self, joint: GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **options: object
    ) -> tuple[GraphModule, GraphModule]:
        """Split a joint graph into a forward and a backward.

        Args:
            joint: The joint graph, which is cleaned up in place.
            inputs: Its inputs.
            num_fwd_outputs: How many of its outputs are the forward's.
            options: Further arguments of torch's own partitioner.

        Raises:
            BudgetError: No split fits the budget.
        """
        untidied = copied(joint)
        graphs = torch_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        reading = read_graph(joint.graph, num_fwd_outputs, self.cost, fuses=optimizes_kernels(options))
        never_larger(joint)
        if reading.workspaces.unknown:
            warn(_not_counted(reading.workspaces.unknown), CompileWarning)
        halver = Halver(joint, reading, num_fwd_outputs)
        prices = Prices(reading.joint)
        theirs = halver.given(*graphs)
        plain = halver.of(split(reading.joint, reading.joint.asked))

        @cache
        def saver() -> Saver:
            tight = _torchs(untidied, reading, inputs, num_fwd_outputs=num_fwd_outputs, **options)
            return Saver(reading.joint, [theirs.split.saved, *tight], prices=prices)

        @cache
        def lowest() -> Halves:
            return min(theirs, plain, halver.of(saver().floor), key=lambda one: one.peak_bytes)

        budget = self._bytes(reading, plain.peak_bytes, lambda: lowest().peak_bytes + self.margin_bytes)
        limit = budget - self.margin_bytes
        # Inductor fuses recomputed values with their readers, and its own split is made for that.
        is_torchs = reading.fuses and theirs.peak_bytes <= limit
        if is_torchs:
            found = theirs
        elif plain.peak_bytes <= limit:
            found = plain
        elif reading.fuses:
            found = aimed(saver(), limit, plain, halver.of)
        else:
            found = halver.of(saver().solve(limit) or saver().floor)
        if found.peak_bytes > limit:
            found = min(found, lowest(), key=lambda one: one.peak_bytes)
        if found.peak_bytes > limit:
            raise BudgetError(self._nothing_fits(budget, found.peak_bytes, reading.joint.fixed_bytes))
        self._note(reading, prices, found, budget, plain.peak_bytes, is_torchs=is_torchs)
        return found.forward, found.backward

    def __reduce__(self) -> tuple[Callable[[int | str], PeakPartitioner], tuple[int | str]]:
        """Return a constructor of an equal one without any splits: caches of compilers pickle it as a key."""
        return partial(PeakPartitioner, margin=self.margin_bytes, cost=self.cost), (self.budget,)

    def uuid(self) -> object:
        """Return the identity of this partitioner, for the caches of compilers."""
        code = hashlib.sha256(b"".join(path.read_bytes() for path in _code())).hexdigest()
        return f"torchremat {code} {self.budget} {self.margin_bytes} {self.cost}"

    def _bytes(self, reading: JointReading, plain_bytes: int, smallest: Callable[[], int]) -> int:
        relative = relative_of(self.budget)
        if relative is None:
            return bytes_of(self.budget, reading.device)
        return relative.bytes(plain_bytes=plain_bytes, before_bytes=reading.joint.fixed_bytes, smallest=smallest)

    def _nothing_fits(self, budget: int, floor: int, fixed: int) -> str:
        least = floor + self.margin_bytes
        reserved = f", of which {format_bytes(self.margin_bytes)} are set aside" if self.margin_bytes else ""
        return (
            f"no split of the compiled graph fits the budget of {format_bytes(budget)} ({self.budget}){reserved}. "
            f"Smallest budget that works: {least} bytes ({format_bytes(least)}). {format_bytes(fixed)} of it are "
            "parameters and inputs; a smaller batch lowers the rest."
        )

    def _note(
        self, reading: JointReading, prices: Prices, found: Halves, budget: int, plain_bytes: int, *, is_torchs: bool
    ) -> None:
        joint, chosen = reading.joint, found.split
        costs = (joint.operators[index].cost for index in joint.of_forward)
        forward_cost = sum(cost for cost in costs if math.isfinite(cost))
        more = chosen.cost - prices.bound(budget - self.margin_bytes)
        again = [index for index in set(chosen.forward) & set(chosen.backward) if joint.operators[index].cost > 0]
        self.partitions.append(
            Partition(
                budget_bytes=budget,
                peak_bytes=found.peak_bytes,
                plain_peak_bytes=plain_bytes,
                saved_bytes=sum(joint.size_bytes[value] for value in chosen.saved),
                fixed_bytes=joint.fixed_bytes,
                recomputed_operators=len(again),
                recomputed_flops=sum(reading.flops[index] for index in again),
                flops=sum(reading.flops[index] for index in joint.of_forward),
                excess=max(0.0, more / forward_cost) if forward_cost else 0.0,
                is_torchs=is_torchs,
            )
        )


def _torchs(
    untidied: GraphModule, reading: JointReading, inputs: Sequence[object], *, num_fwd_outputs: int, **options: object
) -> Iterator[frozenset[int]]:
    """Yield the values that torch saves under its own budgets."""
    for share in _SHARES:
        tried = copied(untidied)
        forward, _ = torch_partition_of_share(share, tried, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        yield reading.saved(forward.graph, num_fwd_outputs)


def _code() -> list[Path]:
    """The files that decide how a graph is split: ours, and the files that count flops and bytes for them."""
    package = Path(__file__).parents[2]
    folders = ("_compat", "measuring", "planning/compiling", "schedules", "tensors")
    paths = [path for folder in folders for path in sorted((package / folder).glob("*.py"))]
    return [*paths, package / "planning" / "budgets.py"]


def _not_counted(unknown: Mapping[str, str]) -> str:
    operators = "; ".join(f"{name}: {reason}" for name, reason in sorted(unknown.items()))
    return (
        f"the workspaces of some kernels are not known and not counted ({operators}). The real peak may be above the "
        "predicted one: leave a margin."
    )
