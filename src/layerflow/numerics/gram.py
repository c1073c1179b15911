"""Normal equations of polynomial least squares as sums over rows: they add, subtract and narrow.

The Gram matrix of (1, z, z_i z_j) is the fourth moment tensor of the extended state (1, z), which is symmetric in
all four indices. So each distinct moment is summed once, D⁴/24 numbers instead of the D⁴/8 of the matrix's own
upper half: three times less work than BLAS's `syrk`, and less memory. Moments are stored by their largest index
first (colexicographic order), which makes those of the first d' coordinates the beginning of those of all d.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from layerflow.errors import InputError
from layerflow.numerics.polynomial import Scaler, feature_rows, n_features, pairs, require_finite, row_blocks

_GROUP = 8  # extended variables whose pairs share one matrix product: wide enough for BLAS, little computed twice


@dataclass(frozen=True)
class Gram:
    """Sums over rows from which least squares of steps on polynomials of states follows.

    `moments` are the distinct entries of XᵀX, X the monomials of the standard coordinates; `cross` is XᵀY, (F, c),
    and `steps` YᵀY, (c, c), Y the steps less `step_center`, which keeps both free of cancellation. `count` rows.
    Sums of the same coordinates add and subtract: a split's training part is the whole less the held-out part.
    """

    degree: int
    scaler: Scaler
    step_center: Float64[np.ndarray, " c"]
    count: int
    moments: Float64[np.ndarray, " m"]
    cross: Float64[np.ndarray, "f c"]
    steps: Float64[np.ndarray, "c c"]

    def __add__(self, other: "Gram") -> "Gram":
        return self._combine(other, 1)

    def __sub__(self, other: "Gram") -> "Gram":
        return self._combine(other, -1)

    def _combine(self, other: "Gram", sign: int) -> "Gram":
        same = (
            self.degree == other.degree
            and np.array_equal(self.scaler.center, other.scaler.center)
            and np.array_equal(self.scaler.inverse, other.scaler.inverse)
            and np.array_equal(self.step_center, other.step_center)
        )
        if not same:
            raise InputError("the Gram matrices differ in degree, scaler or step centre: give both the same scaler")
        return Gram(
            self.degree,
            self.scaler,
            self.step_center,
            self.count + sign * other.count,
            self.moments + sign * other.moments,
            self.cross + sign * other.cross,
            self.steps + sign * other.steps,
        )

    @property
    def width(self) -> int:
        """The number of coordinates d."""
        return len(self.scaler.center)

    def matrix(self, degree: int | None = None) -> Float64[np.ndarray, "f f"]:
        """Lay out XᵀX; `degree=1` gives the affine block of a quadratic one."""
        degree = self.degree if degree is None else degree
        if degree > self.degree:
            raise InputError(f"degree is {degree}: this Gram matrix holds monomials up to degree {self.degree} only")
        if self.degree == 1:
            return self.moments.reshape(self.width + 1, self.width + 1)
        size = n_features(self.width, degree)
        return np.take(self.moments, _layout(self.width)[:size, :size])

    def narrow(self, width: int) -> "Gram":
        """Keep the first `width` coordinates of states and steps: the sums of a narrower cloud, for nothing."""
        if not 1 <= width <= self.width:
            raise InputError(f"width is {width}: it must lie between 1 and the {self.width} coordinates summed")
        kept = self.cross[_prefix(self.width, width, self.degree), :width]
        if self.degree == 1:
            moments = self.matrix()[: width + 1, : width + 1].ravel()
        else:
            moments = self.moments[: _count_sorted(width + 1, 4)]
        scaler, steps = self.scaler.narrow(width), self.steps[:width, :width]
        return Gram(self.degree, scaler, self.step_center[:width], self.count, moments, kept, steps)


def gram(
    z: Float[np.ndarray, "n d"],
    dz: Float[np.ndarray, "n c"],
    *,
    degree: int = 2,
    scaler: Scaler | None = None,
    step_center: Float64[np.ndarray, " c"] | None = None,
) -> Gram:
    """Sum the normal equations over rows; standard coordinates are those of `z` unless a scaler is given.

    Cost: n d⁴ / 12 multiplications and additions at degree 2; memory one block of rows' monomials.

    Raises:
        InputError: a state or step is not finite.
    """
    scaler = Scaler.of(z) if scaler is None else scaler
    center = _mean_step(dz) if step_center is None else step_center
    d, outputs = z.shape[1], dz.shape[1]
    products = _no_products(d, degree)
    cross = np.zeros((n_features(d, degree), outputs))
    steps = np.zeros((outputs, outputs))
    for block in row_blocks(len(z)):
        rows = feature_rows(scaler(z[block]), degree)
        centred = dz[block] - center
        _add_products(products, rows, degree)
        cross += rows @ centred
        steps += centred.T @ centred
    moments = products[0].ravel() if degree == 1 else np.concatenate([p.ravel() for p in products])[_sources(d)]
    return Gram(degree, scaler, np.asarray(center), len(z), moments, cross, steps)


def training_grams(
    z: Float[np.ndarray, "n d"],
    dz: Float[np.ndarray, "n c"],
    held_out: Bool[np.ndarray, "s n"],
    *,
    degree: int = 2,
) -> list[Gram]:
    """Sum the normal equations of the training rows of several splits, visiting each row once.

    Rows that are held out in the same splits form one cell; each cell is summed once and added to the splits it
    trains. All are in the standard coordinates of the whole cloud.
    """
    scaler, center = Scaler.of(z), _mean_step(dz)
    patterns, cell = np.unique(held_out, axis=1, return_inverse=True)
    totals: list[Gram | None] = [None] * len(held_out)
    for number, pattern in enumerate(patterns.T):
        rows = np.flatnonzero(cell.ravel() == number)
        part = gram(z[rows], dz[rows], degree=degree, scaler=scaler, step_center=center)
        for split in np.flatnonzero(~pattern):
            total = totals[split]
            totals[split] = part if total is None else total + part
    if any(total is None for total in totals):
        raise InputError("a split holds out every row: leave it rows to train on")
    return [total for total in totals if total is not None]


def _mean_step(dz: Float[np.ndarray, "n c"]) -> Float64[np.ndarray, " c"]:
    return np.asarray(require_finite(dz, "steps").mean(axis=0))


def _groups(d: int) -> list[tuple[int, int]]:
    """Cut the extended variables 0…d into groups."""
    return list(pairwise([*range(0, d + 1, _GROUP), d + 1]))


def _offset(d: int, i: int) -> int:
    """Give the place of the first monomial whose first extended variable is i."""
    return i * (d + 1) - i * (i - 1) // 2


@lru_cache(maxsize=8)
def _group_rows(d: int) -> list[np.ndarray]:
    """Give the places of the monomials (i, j), i <= j, with j in each group."""
    _, second = pairs(d)
    return [np.flatnonzero((second >= start) & (second < stop)) for start, stop in _groups(d)]


def _no_products(d: int, degree: int) -> list[np.ndarray]:
    if degree == 1:
        return [np.zeros((d + 1, d + 1))]
    size = n_features(d, 2)
    groups = zip(_groups(d), _group_rows(d), strict=True)
    return [np.zeros((len(rows), size - _offset(d, start))) for (start, _), rows in groups]


def _add_products(products: list[np.ndarray], rows: Float64[np.ndarray, "f n"], degree: int) -> None:
    """Add one block of rows: for each group, pairs (i, j <= k) against pairs (k, l)."""
    if degree == 1:
        products[0] += rows @ rows.T
        return
    d = round((2 * len(rows) + 0.25) ** 0.5 - 1.5)
    for product, (start, _), chosen in zip(products, _groups(d), _group_rows(d), strict=True):
        product += rows[chosen] @ rows[_offset(d, start) :].T


def _count_sorted(n: int, length: int) -> int:
    """Count the sorted tuples of `length` numbers below n: C(n + length - 1, length)."""
    return int(np.prod([n + i for i in range(length)], dtype=object)) // {3: 6, 4: 24}[length]


def _place(
    i: Int64[np.ndarray, "*s"], j: Int64[np.ndarray, "*s"], k: Int64[np.ndarray, "*s"], m: Int64[np.ndarray, "*s"]
) -> Int64[np.ndarray, "*s"]:
    """Place i <= j <= k <= m among sorted quadruples by their last, then third, then second, then first number."""
    return m * (m + 1) * (m + 2) * (m + 3) // 24 + k * (k + 1) * (k + 2) // 6 + j * (j + 1) // 2 + i


@lru_cache(maxsize=8)
def _sources(d: int) -> Int64[np.ndarray, " m"]:
    """Say where, in the groups' products laid end to end, each distinct moment is found."""
    first, second = pairs(d)
    sources = np.empty(_count_sorted(d + 1, 4), dtype=np.int64)
    base = 0
    for (start, _), chosen in zip(_groups(d), _group_rows(d), strict=True):
        offset = _offset(d, start)
        i, j = first[chosen, None], second[chosen, None]
        k, m = first[None, offset:], second[None, offset:]
        row, column = np.nonzero(j <= k)
        places = _place(i[row, 0], j[row, 0], k[0, column], m[0, column])
        sources[places] = base + row * k.shape[1] + column
        base += len(chosen) * k.shape[1]
    return sources


@lru_cache(maxsize=8)
def _layout(d: int) -> Int64[np.ndarray, "f f"]:
    """Say which distinct moment each entry of the Gram matrix is."""
    first, second = pairs(d)
    low, high = np.minimum.outer(first, first), np.maximum.outer(second, second)
    left, right = np.maximum.outer(first, first), np.minimum.outer(second, second)
    return _place(low, np.minimum(left, right), np.maximum(left, right), high)


def _prefix(d: int, width: int, degree: int) -> Int64[np.ndarray, " f"]:
    """Give the places of the monomials of the first `width` coordinates."""
    if degree == 1:
        return np.arange(width + 1)
    first, second = pairs(d)
    return np.flatnonzero((first <= width) & (second <= width))
