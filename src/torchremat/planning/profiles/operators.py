"""What a profile reads out of the operators of a traced forward."""

from __future__ import annotations

from collections.abc import Iterable

from torchremat.measuring.step_record import Run, StepRecord

# The time of an operator without flops: the bytes that it moves, and the call itself.
_BYTES_PER_S = 1e10
_CALL_S = 5e-6


def nominal_seconds(log: StepRecord, run: Run) -> float:
    """Return the seconds of an operator on a generic device, for plans that have to be the same everywhere."""
    moved = sum(log.values[value].size_bytes for value in (*run.reads, *run.makes))
    return moved / _BYTES_PER_S + _CALL_S


# NOTE [ Casts in a recompute ]
# Autocast keeps the casts of leaves until the outermost autocast ends, for further casts of the same leaf. When
# backward recomputes, that autocast has ended, so a recompute makes its own casts, and keeps them until it ends:
#
#   cast in the unit          autocast keeps the cast, and a recompute makes a new one
#   found made by another     likewise: the recompute makes a cast that the traced forward lacks (`recast_bytes`)


def casts_of_leaves(log: StepRecord) -> frozenset[int]:
    """Return the values that autocast keeps."""
    casts = (run for run in log.runs if run.op_info.is_cast and run.reads)
    return frozenset(one for run in casts if all(log.values[v].is_leaf for v in run.reads) for one in run.makes)


def storages_of(log: StepRecord, values: Iterable[int]) -> frozenset[int]:
    """Return the storages of values."""
    return frozenset(log.values[value].storage for value in values)
