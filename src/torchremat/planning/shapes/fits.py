"""Figures at a shape that never ran, from figures at shapes that did.

The bytes of a tensor are a product of dimensions, and so are the flops of an operator; sums and differences of these
are polynomials. So a few shapes determine every figure, all with the same weights:

    figures at x = sum of w_i(x) * figures at point i

Least squares in monomials gives the weights, so they do not depend on the figures. With more points than monomials, the
residual is noise, and its maximum is a margin. With too few points, or if x varies in a dimension that no point varies
in (one that was always 8), no weights exist: the shape must be learned first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]

# Twice the largest error of a point: kernels choose workspace by alignment.
_NOISE_BYTES = 512
# Weights beyond this turn the noise of a point into megabytes.
_MOST_WEIGHT = 10_000.0
# A known shape with a dimension up to this many times larger can stand for a smaller shape.
_STANDS_FOR = 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Cover:
    """The weights that give the figures at a shape from the figures at some points.

    Attributes:
        shape: The shape of the figures, at least as large as the requested shape in every dimension.
        points: Indices of the points.
        weights: The weight of each point.
        noise_bytes: Largest error of a figure.
    """

    shape: Shape
    points: tuple[int, ...]
    weights: NDArray[np.float64]
    noise_bytes: int


def rounded(size: int) -> int:
    """Return a size rounded up to one of eight in each octave: the sizes of a class.

    Example:
        >>> [rounded(size) for size in (1, 9, 16, 17, 100, 257)]
        [1, 9, 16, 18, 104, 288]
    """
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def cover(points: Sequence[Shape], shape: Shape, *, exact: bool = False) -> Cover | None:
    """Return how figures at a shape follow from the figures at points, or None if the points do not determine them.

    Args:
        points: The shapes with known figures.
        shape: The requested shape, with equally many dimensions.
        exact: Whether to cover the shape itself instead of its class.
    """
    return _cover(points, tuple(range(len(points))), shape, exact=exact)


def _cover(points: Sequence[Shape], chosen: tuple[int, ...], shape: Shape, *, exact: bool) -> Cover | None:
    table = np.array([points[index] for index in chosen], np.float64).reshape(len(chosen), len(shape))
    wanted = list(shape)
    symbols: list[list[int]] = []
    for columns in _alike(table):
        largest = max(wanted[column] for column in columns)
        smallest = min(wanted[column] for column in columns)
        values = table[:, columns[0]]
        if values.min() == values.max():
            known = int(values[0])
            if largest > known or (smallest != known and smallest * _STANDS_FOR <= known):
                return None
            largest = known
        else:
            if smallest != largest and smallest * _STANDS_FOR <= largest:
                return None
            symbols.append(columns)
            if not exact:
                most = int(values.max())
                largest = min(rounded(largest), most) if largest <= most else rounded(largest)
        for column in columns:
            wanted[column] = largest
    firsts = [columns[0] for columns in symbols]
    weights = _weights(table[:, firsts], np.array([wanted[column] for column in firsts], np.float64))
    if weights is not None:
        noise = float(np.linalg.norm(weights))
        return Cover(shape=tuple(wanted), points=chosen, weights=weights, noise_bytes=int(noise * _NOISE_BYTES))
    for column in firsts:  # too few points for all varying sizes: points that agree in a dimension may suffice
        for value in sorted({points[index][column] for index in chosen}):
            if shape[column] == value or shape[column] < value < _STANDS_FOR * shape[column]:
                some = tuple(index for index in chosen if points[index][column] == value)
                found = _cover(points, some, shape, exact=exact)
                if found is not None:
                    return found
    return None


def _alike(table: NDArray[np.float64]) -> list[list[int]]:
    """Return the columns, grouped if equal at every point, like the lengths of the tokens and of the targets."""
    groups: dict[bytes, list[int]] = {}
    for column in range(table.shape[1]):
        groups.setdefault(np.ascontiguousarray(table[:, column]).tobytes(), []).append(column)
    return list(groups.values())


def _weights(points: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64] | None:
    count, symbols = points.shape
    if not symbols:
        return np.array([1.0] + [0.0] * (count - 1))
    scale = points.max(axis=0)
    scale[scale == 0] = 1.0
    needed, further = _monomials(symbols)
    if count < len(needed):
        return None
    exponents = np.array([*needed, *further] if count >= len(needed) + len(further) else needed)
    features = np.prod((points / scale)[:, None, :] ** exponents, axis=2)
    asked = np.prod((wanted / scale) ** exponents, axis=1)
    weights = asked @ np.linalg.pinv(features, rcond=1e-9)
    if float(np.abs(weights @ features - asked).max()) > 1e-6 * max(1.0, float(asked.max())):
        return None  # for example, the points are on a line, and the shape is not
    return weights if float(np.linalg.norm(weights)) <= _MOST_WEIGHT else None


def _monomials(symbols: int) -> tuple[list[Shape], list[Shape]]:
    """Return the exponents of the monomials that a fit needs, and of those that it adds with enough points.

    Bytes of a batch of b sequences of length t scale with 1, b, t, b t and, where attention is explicit, b t t; a mask
    of t t that all sequences share is small.
    """
    unit = np.eye(symbols, dtype=int)
    one, squares = [unit[i] for i in range(symbols)], [2 * unit[i] for i in range(symbols)]
    if symbols == 1:
        return [(0,), (1,), (2,)], []
    mixed = [unit[i] + unit[j] for i, j in combinations(range(symbols), 2)]
    cubic = [2 * unit[i] + unit[j] for i, j in permutations(range(symbols), 2)]
    needed = [np.zeros(symbols, int), *one, *mixed, *cubic]
    return [tuple(row.tolist()) for row in needed], [tuple(row.tolist()) for row in squares]
