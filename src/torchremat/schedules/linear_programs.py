"""Linear programs, in which some variables may have to be integers.

SciPy's solvers take a third of the time in which this package would be imported. Most programs that import it solve
nothing, so they are imported here, when something is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult
    from scipy.sparse import csr_array


Numbers = float | Sequence[float] | NDArray[np.float64] | NDArray[np.int64]
"""One for each row or variable, or one for all of them."""


class Entries(NamedTuple):
    """A sparse matrix.

    Attributes:
        values: Of its entries; those of the same place are added up.
        rows: Of its entries.
        columns: Of its entries.
        shape: The number of rows and of columns.
    """

    values: Sequence[float]
    rows: Sequence[int]
    columns: Sequence[int]
    shape: tuple[int, int]


class Rows(NamedTuple):
    """Constraints: `lowest <= matrix @ variables <= highest`.

    Attributes:
        matrix: A row for each constraint, a column for each variable.
        lowest: Of each row.
        highest: Of each row.
    """

    matrix: NDArray[np.float64] | Entries
    lowest: Numbers = -np.inf
    highest: Numbers = np.inf


def minimize(
    cost: NDArray[np.float64],
    *rows: Rows,
    highest: Numbers,
    lowest: Numbers = 0.0,
    integers: Numbers = 0,
    most_s: float = np.inf,
    gap: float = 1e-4,
) -> OptimizeResult:
    """Minimize `cost @ variables`.

    Args:
        cost: Of each variable.
        rows: The constraints.
        highest: The most that each variable may be, or all may be.
        lowest: The least that each variable may be, or all may be.
        integers: For each variable, or for all, 1 if it has to be an integer and 0 if not.
        most_s: The seconds after which the search ends.
        gap: The relative distance from the best bound at which it ends.

    Returns:
        As SciPy's `milp`: `x` is None where nothing was found.

    Source: HiGHS (https://highs.dev), by SciPy.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    constraints = [
        LinearConstraint(_sparse(each.matrix) if isinstance(each.matrix, Entries) else each.matrix, *each[1:])
        for each in rows
    ]
    return milp(
        cost,
        integrality=np.broadcast_to(integers, cost.shape),
        bounds=Bounds(lowest, highest),
        constraints=constraints,
        options={"time_limit": most_s, "mip_rel_gap": gap},
    )


def _sparse(entries: Entries) -> csr_array[np.float64]:
    from scipy.sparse import csr_array

    places = np.array(entries.rows), np.array(entries.columns)
    return csr_array((np.array(entries.values), places), shape=entries.shape)
