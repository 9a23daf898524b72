"""A part of a model that holds several microbatches at a time: the bytes of one, and the trees worth choosing.

While one microbatch runs, each other microbatch of the part holds the bytes that it keeps from its forward to its
backward. So a tree has three sizes instead of one peak:

    live  =  (other microbatches held) x kept  +  peak of the forward or the backward that runs

The best tree for one microbatch is not the best for many: kept bytes count once for each microbatch, the peak of a
recompute counts once. In a chain that is a tail. Raised by T bytes, a limit M for the peak is a limit of M - T for the
kept bytes, so chains with tails of several heights have the trees for few microbatches, and for many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np

from torchremat.planning.searches.search import Search
from torchremat.planning.searches.solver import Solver
from torchremat.planning.simulator.prediction import Candidate, walk_of
from torchremat.planning.simulator.split_backward import SplitPrediction, after_lookahead
from torchremat.schedules.persistent import Persistent

# Tails, as shares of the plain peak, and the number of trees taken from each chain.
_TAILS = (0.125, 0.25, 0.5, 1.0)
_TREES = 12


@dataclass(frozen=True, kw_only=True)
class Share:
    """Bytes and cost of one microbatch under a tree; bytes are over those live before it, which include its input.

    Attributes:
        candidate: The tree.
        kept_bytes: Live bytes from the end of its forward to the beginning of its backward.
        forward_bytes: Peak of its forward.
        backward_bytes: Peak of its backward.
        ahead_bytes: If it may be recomputed before its gradient arrives: the peak of that. The peaks of its backward
            then assume that everything is recomputed.
        sums: The peaks with other microbatches in the same backward.
        split: The bytes if its backward is split.
        cost: Cost of its recomputes, in the unit of the planner's cost.
    """

    candidate: Candidate
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    cost: float
    sums: SumsPrediction
    split: SplitPrediction
    ahead_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SumsPrediction:
    """The backward peaks of a microbatch that shares one backward with others.

    One backward runs them all, and autograd sums the gradients of a weight before it adds them to the existing
    gradient. So sums exist from the first microbatch to the last, and peaks are over the live bytes before, with all
    sums.

    Attributes:
        first_bytes: Peak of the first microbatch: the gradients that it makes stay. No sums exist before it.
        second_bytes: Peak of the second: it may add out of place.
        last_bytes: Peak of the last: each sum is freed once it has been added to.
    """

    first_bytes: int = 0
    second_bytes: int = 0
    last_bytes: int = 0


SumsPredictor = Callable[[Candidate], SumsPrediction]
SplitPredictor = Callable[[Candidate, bool], SplitPrediction]


def shares(
    search: Search, split: SplitPredictor | None = None, sums: SumsPredictor | None = None, *, ahead: bool = False
) -> tuple[Share, ...]:
    """Return the trees worth choosing for a part of a model, whatever its budget and number of microbatches.

    If one of two trees is no better in anything, it is dropped. The first tree keeps everything.

    Args:
        search: The search for one microbatch.
        split: Predicts a split backward, if the schedule has such; the flag is `ahead`.
        sums: Predicts a backward shared by several microbatches, if the schedule has such.
        ahead: Whether microbatches may be recomputed before their gradient arrives.
    """
    found = {id(candidate): candidate for solver in search.solvers for candidate in _candidates(solver)}
    found.pop(id(search.plain), None)
    others = _undominated(_share(candidate, split, sums, ahead) for candidate in found.values())
    if search.dividing is not None and split is None and not ahead:  # which recompute whole units
        trees = [one.candidate.tree for one in others if one.candidate.profile is search.blocks.profile]
        finer = [_share(candidate, split, sums, ahead) for candidate in search.dividing.finer(trees)]
        others = _undominated([*others, *finer])
    return (_share(search.plain, split, sums, ahead), *others)


def _share(candidate: Candidate, split: SplitPredictor | None, sums: SumsPredictor | None, ahead: bool) -> Share:
    prediction = candidate.prediction
    recomputing, backward = 0, 0
    if ahead:
        recomputing, backward = after_lookahead(
            candidate.profile, walk_of(candidate.profile, candidate.tree), kept_bytes=prediction.kept_bytes
        )
    return Share(
        candidate=candidate,
        kept_bytes=max(0, prediction.kept_bytes),
        forward_bytes=max(0, prediction.forward_bytes),
        backward_bytes=max(0, prediction.backward_bytes, backward),
        cost=candidate.cost,
        sums=SumsPrediction() if sums is None else sums(candidate),
        split=SplitPrediction() if split is None else split(candidate, ahead),
        ahead_bytes=recomputing,
    )


def _candidates(solver: Solver) -> Iterator[Candidate]:
    yield from map(solver.judged, solver.uniform)
    yield from _of_table(solver, solver.tables.whole)
    plain_bytes = solver.plain.prediction.peak_bytes
    for tail in _TAILS:
        raised = replace(solver.chain, tail_bytes=solver.chain.tail_bytes + int(tail * plain_bytes))
        yield from _of_table(solver, Persistent(raised, max(1, int((1.1 + tail) * plain_bytes))))


def _of_table(solver: Solver, table: Persistent) -> Iterator[Candidate]:
    """Yield trees of a table, close to each other where the limit is low."""
    lowest, most = table.lowest_slots, table.most_slots
    if lowest > most:
        return
    asked = lowest + (most - lowest) * np.linspace(0.0, 1.0, _TREES) ** 2
    for slots in sorted({round(one) for one in asked.tolist()}):
        yield solver.scheduled(table, slots)


def _undominated(found: Iterable[Share]) -> list[Share]:
    kept: list[Share] = []
    sizes = np.zeros((0, 11))
    for share in sorted(found, key=_sizes):
        row = np.array(_sizes(share))
        if not (sizes <= row).all(axis=1).any():
            kept.append(share)
            sizes = np.vstack([sizes, row])
    return kept


def _sizes(share: Share) -> tuple[float, ...]:
    return (
        share.cost,
        share.kept_bytes,
        share.ahead_bytes,
        share.backward_bytes,
        *astuple(share.sums),
        share.forward_bytes,
        *astuple(share.split),
    )
