"""Least squares in all D dimensions: an affine map, and one with products added, scored on rows it has not seen."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float64, Int64

from layerflow.errors import InputError

# Cholesky is trusted down to this reciprocal condition number (1-norm) of the scaled normal matrix: predictions lose
# their digits much later than coefficients do. A matrix that is singular up to rounding lies well below.
MIN_RECIPROCAL_CONDITION = 1e-13

# Otherwise directions of the regressors below this share of the largest eigenvalue are left out: relative scales of
# 1e-6, near the last digit of float32 states.
MIN_RELATIVE_EIGENVALUE = 1e-12

# Principal components of less than this share of the first one's variance have no products.
_MIN_RELATIVE_VARIANCE = 1e-12

# Numbers of 8 bytes in one block of rows: 32 MiB.
_BLOCK_NUMBERS = 2**22


@dataclass(frozen=True)
class HeldOutSquares:
    """Squared lengths per held-out row, (m,).

    ``affine`` and ``nonlinear`` are those of the residuals of the two maps, the latter None where it was not fitted;
    ``step`` and ``state`` those of the step and of the next state about their held-out means.
    """

    affine: Float64[np.ndarray, " m"]
    nonlinear: Float64[np.ndarray, " m"] | None
    step: Float64[np.ndarray, " m"]
    state: Float64[np.ndarray, " m"]


@dataclass(frozen=True)
class WideMaps:
    """Both fitted maps from states (n, D) to next states: regressors times coefficients, plus ``offset``.

    The regressors are x − ``mean`` and the centred products s_i s_j − [i = j], i ≤ j, of the scores
    s = (x − mean) ``directions``, whose training covariance is the identity. ``affine`` (D, D) uses the first D,
    ``nonlinear`` (D + F, D) all; it is None where there was nothing to add or too few training rows for it.
    """

    mean: Float64[np.ndarray, " D"]
    offset: Float64[np.ndarray, " D"]
    directions: Float64[np.ndarray, "D p"]
    affine: Float64[np.ndarray, "D D"]
    nonlinear: Float64[np.ndarray, "f D"] | None

    def regressors(self, x: Float[np.ndarray, "n D"]) -> Float64[np.ndarray, "n f"]:
        """Lay out the regressors of states ``x``."""
        return _with_products(x - self.mean, self.directions)


def held_out_squares(
    maps: WideMaps,
    state: Float[np.ndarray, "n D"],
    following: Float[np.ndarray, "n D"],
    test: Int64[np.ndarray, " m"],
) -> HeldOutSquares:
    """Square what fitted maps leave over on held-out rows, and the rows' own deviations from their means.

    Both arrays may be memory maps; a block of rows is in memory at a time. Raises ``InputError`` for fewer than two
    held-out rows.
    """
    if len(test) < 2:
        raise InputError(f"{len(test)} held-out rows were given; a share of variance needs at least 2")
    width = state.shape[1]
    state_mean = _mean(following, test)
    step_mean = state_mean - _mean(state, test)
    parts: dict[str, list[np.ndarray]] = {"affine": [], "nonlinear": [], "step": [], "state": []}
    for rows in row_blocks(test, width):
        x, y = state[rows].astype(np.float64), following[rows].astype(np.float64)
        parts["step"].append(_squares(y - x - step_mean))
        parts["state"].append(_squares(y - state_mean))
        regressors = maps.regressors(x)
        y -= maps.offset
        parts["affine"].append(_squares(y - regressors[:, :width] @ maps.affine))
        if maps.nonlinear is not None:
            parts["nonlinear"].append(_squares(y - regressors @ maps.nonlinear))
    joined = {name: np.concatenate(blocks) for name, blocks in parts.items() if blocks}
    return HeldOutSquares(joined["affine"], joined.get("nonlinear"), joined["step"], joined["state"])


def fit_maps(
    state: Float[np.ndarray, "n D"],
    following: Float[np.ndarray, "n D"],
    *,
    train: Int64[np.ndarray, " a"],
    n_leading: int,
) -> WideMaps:
    """Least squares of the next state on the state, and on the state and the products of its leading scores.

    Normal equations of centred regressors, summed in float64 block by block and solved by `solve`. The products belong
    to the ``n_leading`` principal components of the training rows' own covariance.

    Raises:
        InputError: No more training rows than the affine map has coefficients, D + 1.

    Cost: about a (D + F)(2D + F) multiplications for a training rows and F products. Memory: three (D + F)².

    """
    width = state.shape[1]
    if len(train) <= width + 1:
        raise InputError(
            f"{len(train)} training rows of width {width} were given; an affine map of all dimensions needs more than "
            f"{width + 1}"
        )
    train = np.sort(train)
    mean, offset = _mean(state, train), _mean(following, train)
    gram, cross = np.zeros((width, width)), np.zeros((width, width))
    for rows in row_blocks(train, width):
        x = state[rows] - mean
        gram += x.T @ x
        cross += x.T @ (following[rows] - offset)
    affine = solve(gram, cross)
    directions = _leading(gram / len(train), n_leading)
    n_products = directions.shape[1] * (directions.shape[1] + 1) // 2
    if n_products == 0 or len(train) <= width + 1 + n_products:
        return WideMaps(mean, offset, directions[:, :0], affine, None)
    lower, cross_products = np.zeros((n_products, width + n_products)), np.zeros((n_products, width))
    for rows in row_blocks(train, width):
        regressors = _with_products(state[rows] - mean, directions)
        lower += regressors[:, width:].T @ regressors
        cross_products += regressors[:, width:].T @ (following[rows] - offset)
    whole = np.block([[gram, lower[:, :width].T], [lower]])
    return WideMaps(mean, offset, directions, affine, solve(whole, np.vstack([cross, cross_products])))


def solve(gram: Float64[np.ndarray, "f f"], cross: Float64[np.ndarray, "f e"]) -> Float64[np.ndarray, "f e"]:
    """Coefficients C with ``gram`` C = ``cross``, regressors brought to unit length first.

    Cholesky while the scaled matrix is well enough conditioned (`MIN_RECIPROCAL_CONDITION`); otherwise the solution of
    least norm over the eigenvectors above `MIN_RELATIVE_EIGENVALUE`, so that regressors which are constant or
    combinations of others do no harm.
    """
    scale = np.sqrt(np.diagonal(gram))
    scale = np.where(scale > 0.0, scale, 1.0)
    scaled, right = gram / np.outer(scale, scale), cross / scale[:, None]
    factor, failed = scipy.linalg.lapack.dpotrf(scaled, lower=True)
    if not failed:
        reciprocal, _ = scipy.linalg.lapack.dpocon(factor, np.abs(scaled).sum(axis=0).max(), uplo="L")
        if reciprocal >= MIN_RECIPROCAL_CONDITION:
            return np.asarray(scipy.linalg.cho_solve((factor, True), right) / scale[:, None])
    values, vectors = np.linalg.eigh(scaled)
    kept = values > MIN_RELATIVE_EIGENVALUE * values[-1]
    vectors = vectors[:, kept]
    return np.asarray(vectors @ ((vectors.T @ right) / values[kept, None]) / scale[:, None])


def _leading(covariance: np.ndarray, n_leading: int) -> np.ndarray:
    """Directions (D, p) whose scores are uncorrelated and of variance 1; fewer where the variance runs out."""
    width = len(covariance)
    n_leading = min(n_leading, width)
    if n_leading == 0:
        return np.empty((width, 0))
    # Twice as fast as LAPACK's default driver for so few vectors.
    values, vectors = scipy.linalg.eigh(covariance, subset_by_index=[width - n_leading, width - 1], driver="evx")
    kept = values > _MIN_RELATIVE_VARIANCE * values[-1]
    return np.asarray(vectors[:, kept] / np.sqrt(values[kept]))


def _with_products(centred: np.ndarray, directions: np.ndarray) -> np.ndarray:
    scores = centred @ directions
    i, j = np.triu_indices(scores.shape[1])
    # Scores of training covariance 1 have products of training mean [i = j].
    return np.hstack([centred, scores[:, i] * scores[:, j] - (i == j)])


def _mean(state: np.ndarray, rows: np.ndarray) -> np.ndarray:
    total = np.zeros(state.shape[1])
    for block in row_blocks(rows, state.shape[1]):
        total += state[block].sum(axis=0, dtype=np.float64)
    return total / len(rows)


def row_blocks(rows: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Row numbers of one block after the other, each 32 MiB at most at this width."""
    size = max(1, _BLOCK_NUMBERS // width)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum("ij,ij->i", rows, rows))
