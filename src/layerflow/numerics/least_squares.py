"""Least squares of steps on polynomials of states, from their Gram matrix, checked and refined.

Standard coordinates and unit columns first; then Cholesky with a condition estimate. The digits that the normal
equations lose come back by refinement through the residual, streamed over the rows, until the solution is that of a
QR factorisation; where the equations cannot be trusted at all (collinear or too few rows) the minimum-norm solution
comes from a complete orthogonal factorisation, with its rank. No ridge ever steps in.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float64

from layerflow.errors import InputError
from layerflow.numerics.gram import Gram, gram
from layerflow.numerics.polynomial import Scaler, evaluate, feature_rows, n_features, row_blocks

# Reciprocal conditions of the unit-column Gram matrix: below the first the solution is always refined, below the
# second (a design of condition 10⁶) refinement leaves errors above 1e-8.
_REFINE_BELOW = 1e-10
_DISTRUST_BELOW = 1e-12
# A correction this small, relative to the solution, leaves an error of its square.
_LAST_CORRECTION = 1e-7
_MAX_REFINEMENTS = 8


@dataclass(frozen=True)
class LeastSquaresFit:
    """Polynomial that predicts the step from the state, and how well the data determined it.

    `standard` (F, c) are coefficients of the monomials of the standard coordinates; they predict without the
    cancellation that raw monomials of an off-centre cloud suffer. `coefficients` are those of the raw monomials.
    `rank` counts independent monomials (F when all are), `condition` is that of the design matrix with unit columns
    (its 1-norm estimate; after a fallback 1e6, where the normal equations cease to be trusted; infinite when rank < F).
    `refinements` counts the passes over the residual, `residual_covariance` (c, c) is biased (÷ n).
    """

    degree: int
    scaler: Scaler
    standard: Float64[np.ndarray, "f c"]
    residual_covariance: Float64[np.ndarray, "c c"]
    n_rows: int
    rank: int
    condition: float
    refinements: int

    @property
    def coefficients(self) -> Float64[np.ndarray, "f c"]:
        """Coefficients of the monomials of the raw states, in the order of `polynomial.features`."""
        return self.scaler.raw_coefficients(self.standard)

    def predict(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n c"]:
        """Predict the step at each state."""
        return evaluate(self.standard, self.scaler(z), self.degree)


def fit_polynomial(z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n c"], *, degree: int = 2) -> LeastSquaresFit:
    """Fit steps by a polynomial of the state: `solve` on the Gram matrix of these very rows, refined."""
    return solve(gram(z, dz, degree=degree), z, dz)


def solve(
    sums: Gram,
    z: Float[np.ndarray, "n d"],
    dz: Float[np.ndarray, "n c"],
    *,
    degree: int | None = None,
    refine: bool = True,
) -> LeastSquaresFit:
    """Solve the least squares problem min ‖dz - X β‖² whose normal equations are `sums`.

    `z` and `dz` are the rows summed. `degree=1` solves the affine problem inside a quadratic Gram matrix. Without
    `refine` the rows are read only when the condition demands it: coefficients then err by up to 1e-16 condition²
    relative to the largest (1e-11 on real clouds), which no score can see, and outliers 10,000 times the bulk away
    can cost the bulk's coefficients eight of their digits.

    Cost: F³ / 3 multiplications, and 2 n F c for each pass over the rows, of which there is rarely more than one.

    Raises:
        InputError: the rows are not as many as were summed.
    """
    if len(z) != sums.count or len(dz) != sums.count:
        raise InputError(f"{len(z)} states and {len(dz)} steps given: the Gram matrix sums {sums.count} rows")
    degree = sums.degree if degree is None else degree
    size = n_features(sums.width, degree)
    matrix, cross = sums.matrix(degree), sums.cross[:size]
    norms = np.sqrt(matrix.diagonal())
    unit = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    problem = _Problem(sums, degree, z, dz, matrix, cross, unit)
    found = _by_cholesky(problem, refine) or _by_orthogonal_factors(problem)
    standard = found.solution * unit[:, None]
    covariance = sums.steps - cross.T @ standard
    standard[0] += sums.step_center
    return LeastSquaresFit(
        degree,
        sums.scaler,
        standard,
        (covariance + covariance.T) / (2 * sums.count),
        sums.count,
        found.rank,
        found.condition,
        found.refinements,
    )


@dataclass(frozen=True)
class _Problem:
    """Normal equations with the rows they came from; `unit` scales every column of the design to length 1."""

    sums: Gram
    degree: int
    z: Float[np.ndarray, "n d"]
    dz: Float[np.ndarray, "n c"]
    matrix: Float64[np.ndarray, "f f"]
    cross: Float64[np.ndarray, "f c"]
    unit: Float64[np.ndarray, " f"]

    def design_rows(self, block: slice) -> Float64[np.ndarray, "f b"]:
        return feature_rows(self.sums.scaler(self.z[block]), self.degree)

    def centred_steps(self, block: slice) -> Float64[np.ndarray, "b c"]:
        return np.asarray(self.dz[block] - self.sums.step_center)


@dataclass(frozen=True)
class _Solution:
    """Coefficients of the unit columns."""

    solution: Float64[np.ndarray, "f c"]
    rank: int
    condition: float
    refinements: int


def _by_cholesky(problem: _Problem, refine: bool) -> _Solution | None:
    """Solve the normal equations, or give None when they are too close to singular to be trusted."""
    scaled = problem.matrix * problem.unit * problem.unit[:, None]
    norm = float(np.abs(scaled).sum(axis=0).max())
    factor, failed = scipy.linalg.lapack.dpotrf(scaled.T, lower=1, overwrite_a=1)
    if failed:
        return None
    reciprocal = float(scipy.linalg.lapack.dpocon(factor, norm, uplo="L")[0])
    if reciprocal < _DISTRUST_BELOW:
        return None
    solution = scipy.linalg.cho_solve((factor, True), problem.cross * problem.unit[:, None])
    passes = 0
    if refine or reciprocal < _REFINE_BELOW:
        passes = _refine(problem, factor, solution)
        if passes > _MAX_REFINEMENTS:
            return None
    return _Solution(solution, len(solution), reciprocal**-0.5, passes)


def _refine(problem: _Problem, factor: Float64[np.ndarray, "f f"], solution: Float64[np.ndarray, "f c"]) -> int:
    """Correct the solution in place by G⁻¹ Xᵀ(Y - X β) until it stands still; count the passes, one too many if never.

    Each pass shrinks the error by the same factor, so the last correction's size tells what is left.
    """
    for passes in range(1, _MAX_REFINEMENTS + 1):
        residual = np.zeros_like(solution)
        for block in row_blocks(problem.sums.count):
            rows = problem.design_rows(block)
            residual += rows @ (problem.centred_steps(block) - rows.T @ (solution * problem.unit[:, None]))
        correction = scipy.linalg.cho_solve((factor, True), residual * problem.unit[:, None])
        solution += correction
        if np.abs(correction).max() <= _LAST_CORRECTION * np.abs(solution).max():
            return passes
    return _MAX_REFINEMENTS + 1


def _by_orthogonal_factors(problem: _Problem) -> _Solution:
    """Find the minimum-norm solution from the whole design: O(n F²) time and n F memory, the last resort.

    A pivoted QR factorisation completed from the right tells the rank and takes half the time of singular values.
    """
    rows = slice(0, problem.sums.count)
    design = problem.design_rows(rows)
    design *= problem.unit[:, None]
    # Collinear columns are so only up to the rounding of their entries: LAPACK's own cut-off, one unit of rounding,
    # takes some of them for real and predicts with noise along them. This is NumPy's.
    cutoff = max(design.shape) * np.finfo(np.float64).eps
    solution, _, rank, _ = scipy.linalg.lstsq(
        design.T, problem.centred_steps(rows), cond=cutoff, overwrite_a=True, overwrite_b=True, lapack_driver="gelsy"
    )
    condition = _DISTRUST_BELOW**-0.5 if rank == len(design) else float("inf")
    return _Solution(cast("np.ndarray", solution), int(rank), condition, 0)
