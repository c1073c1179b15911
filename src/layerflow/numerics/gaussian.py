"""Gaussians over steps: log-densities, draws, shrinkage and a Cholesky factorisation that says what it did."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float64

from layerflow.errors import InputError

LOG_TWO_PI = float(np.log(2.0 * np.pi))

# Tried in turn on a matrix scaled to unit diagonal; past the last one a matrix is called singular.
JITTERS = (1e-12, 1e-11, 1e-10, 1e-9, 1e-8)


class SingularCovarianceError(InputError, np.linalg.LinAlgError):
    """A covariance has no density: a variance of zero, or negative directions beyond rounding."""


@dataclass(frozen=True, eq=False)
class SafeCholesky:
    """A lower factor and what it took to get it.

    F Fᵀ = C + ε diag(C), with ``factor`` F of shape (…, d, d) and ``jitter`` ε of shape (…): zero where the matrix was
    positive definite beyond rounding as given, at most 1e-8 elsewhere. The jitter is relative to each coordinate's own
    variance, so it means the same whatever units the coordinates have.
    """

    factor: Float64[np.ndarray, "*batch d d"]
    jitter: Float64[np.ndarray, "*batch"]


def safe_cholesky(covariance: Float[np.ndarray, "*batch d d"]) -> SafeCholesky:
    """Factorise one covariance or a batch, with bounded jitter where rounding made one indefinite.

    Each matrix is symmetrised first. Cost: d³/3 multiplications a matrix.

    Raises:
        SingularCovarianceError: A non-finite entry, a variance that is not positive, or a matrix that stays indefinite
            under the largest jitter. It is an ``InputError`` and a ``LinAlgError``.
    """
    matrices = np.asarray(covariance, dtype=np.float64)
    _require_variances(np.diagonal(matrices, axis1=-2, axis2=-1))
    symmetric = (matrices + np.swapaxes(matrices, -1, -2)) / 2.0
    batch = symmetric.shape[:-2]
    try:
        return SafeCholesky(_checked_cholesky(symmetric), np.zeros(batch))
    except np.linalg.LinAlgError:
        # NumPy does not say which matrix of a batch failed; they are few, so each is looked at alone.
        flat = symmetric.reshape(-1, *symmetric.shape[-2:])
        pairs = [_jittered(matrix) for matrix in flat]
        factor = np.stack([factor for factor, _ in pairs]).reshape(symmetric.shape)
        return SafeCholesky(factor, np.array([jitter for _, jitter in pairs]).reshape(batch))


def _jittered(symmetric: np.ndarray) -> tuple[np.ndarray, float]:
    """One matrix: factor and the smallest jitter that makes it positive definite."""
    scale = np.sqrt(np.diagonal(symmetric))
    correlation = symmetric / np.outer(scale, scale)
    for jitter in (0.0, *JITTERS):
        try:
            factor = _checked_cholesky(correlation + jitter * np.eye(len(scale)))
            return scale[:, None] * factor, jitter
        except np.linalg.LinAlgError:
            continue
    lowest = float(np.linalg.eigvalsh(correlation)[0]) if np.isfinite(correlation).all() else float("nan")
    raise SingularCovarianceError(
        f"the smallest eigenvalue of a correlation matrix is {lowest:.3g}, and a covariance must be positive "
        f"definite up to a relative jitter of {JITTERS[-1]:g}; use fewer components, more rows or shrinkage"
    )


def _checked_cholesky(symmetric: np.ndarray) -> np.ndarray:
    """Factors, with ``LinAlgError`` also for a pivot that is rounding and for NaN, which NumPy lets through.

    A pivot F_jj² is C_jj times the share of coordinate j that the coordinates before it do not explain. Where that is
    below rounding the matrix is singular, and the logarithm of its determinant would be noise.
    """
    factor: np.ndarray = np.linalg.cholesky(symmetric)
    pivots = np.diagonal(factor, axis1=-2, axis2=-1) ** 2
    rounding = 4.0 * symmetric.shape[-1] * np.finfo(np.float64).eps
    if not (pivots > rounding * np.diagonal(symmetric, axis1=-2, axis2=-1)).all():
        raise np.linalg.LinAlgError("a pivot is not above rounding")
    return factor


def _require_variances(variance: np.ndarray) -> None:
    """Every variance must be positive and finite for a density to exist."""
    good = np.isfinite(variance) & (variance > 0.0)
    if not good.all():
        where = np.argwhere(~good)[0]
        raise SingularCovarianceError(
            f"the variance of coordinate {where[-1]} is {variance[tuple(where)]:.3g}, and a density needs a positive "
            "finite one; leave the coordinate out or give the noise a floor"
        )


def shrink_off_diagonal(
    covariance: Float[np.ndarray, "*batch d d"], *, factor: float = 0.9
) -> Float64[np.ndarray, "*batch d d"]:
    """Multiply the off-diagonal entries of covariances by ``factor`` f: C′ = f C + (1 − f) diag(C).

    With f < 1 and positive variances C′ is positive definite even where C has lower rank than d, as with k = 64
    neighbours in d = 64 dimensions. SPEC §4.

    Raises:
        InputError: A factor outside 0…1.
    """
    if not 0.0 <= factor <= 1.0:
        raise InputError(f"the shrinkage factor is {factor}, and it must lie between 0 and 1; the paper uses 0.9")
    matrices = np.asarray(covariance, dtype=np.float64)
    shrunk = factor * matrices
    diagonal = np.arange(matrices.shape[-1])
    shrunk[..., diagonal, diagonal] = matrices[..., diagonal, diagonal]
    return shrunk


class Gaussian(ABC):
    """n Gaussians over d coordinates, one a row: what a law says of the step at each of n states.

    ``mean`` has shape (n, d). Build one with ``Gaussian.diagonal`` or ``Gaussian.full``; the noise is either one for
    all rows or one a row.
    """

    mean: Float64[np.ndarray, "n d"]

    @staticmethod
    def diagonal(mean: np.ndarray, variance: np.ndarray) -> "DiagonalGaussian":
        """Independent coordinates: ``mean`` (n, d), ``variance`` (d,) or (n, d)."""
        return DiagonalGaussian(_float64(mean), _float64(variance))

    @staticmethod
    def full(mean: np.ndarray, covariance: np.ndarray) -> "FullGaussian":
        """Correlated coordinates: ``mean`` (n, d), ``covariance`` (d, d) or (n, d, d)."""
        return FullGaussian(_float64(mean), _float64(covariance))

    @property
    @abstractmethod
    def marginal_variance(self) -> Float64[np.ndarray, "n d"]:
        """Each coordinate's own variance, (n, d): the diagonal of every row's covariance."""

    @abstractmethod
    def log_density(self, x: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, " n"]:
        """Natural logarithm of the density at row i of ``x`` under row i's Gaussian, in nats.

        −(d log 2π + log det C + (x − m)ᵀ C⁻¹ (x − m)) / 2, in the raw units of ``x``: it depends on them, so only
        densities of the same steps compare. Shapes: (n, d) to (n,).

        Raises:
            SingularCovarianceError: A covariance that has no density.
        """

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Float64[np.ndarray, "n d"]:
        """Draw once a row, independently: (n, d).

        A diagonal variance of zero is allowed and draws the mean; a full covariance must be positive definite, as for
        ``log_density``.
        """


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Gaussian):
    """Gaussians with independent coordinates; ``variance`` is (d,) for all rows or (n, d)."""

    mean: Float64[np.ndarray, "n d"]
    variance: Float64[np.ndarray, "*rows d"]

    def __post_init__(self) -> None:
        n, d = self.mean.shape
        _require_shape("variance", self.variance, [(d,), (n, d)])

    @property
    def marginal_variance(self) -> Float64[np.ndarray, "n d"]:
        """Each coordinate's own variance, (n, d)."""
        return np.broadcast_to(self.variance, self.mean.shape)

    def log_density(self, x: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, " n"]:
        """See ``Gaussian.log_density``."""
        _require_shape("x", x, [self.mean.shape])
        _require_variances(self.variance)
        squares = ((x - self.mean) ** 2 / self.variance).sum(axis=1)
        log_determinant = np.log(self.variance).sum(axis=-1)
        return -0.5 * (x.shape[1] * LOG_TWO_PI + log_determinant + squares)

    def draw(self, rng: np.random.Generator) -> Float64[np.ndarray, "n d"]:
        """See ``Gaussian.draw``."""
        return self.mean + np.sqrt(self.variance) * rng.standard_normal(self.mean.shape)


@dataclass(frozen=True, eq=False)
class FullGaussian(Gaussian):
    """Gaussians with correlated coordinates; ``covariance`` is (d, d) for all rows or (n, d, d)."""

    mean: Float64[np.ndarray, "n d"]
    covariance: Float64[np.ndarray, "*rows d d"]

    def __post_init__(self) -> None:
        n, d = self.mean.shape
        _require_shape("covariance", self.covariance, [(d, d), (n, d, d)])

    @property
    def marginal_variance(self) -> Float64[np.ndarray, "n d"]:
        """Each coordinate's own variance, (n, d)."""
        return np.broadcast_to(np.diagonal(self.covariance, axis1=-2, axis2=-1), self.mean.shape)

    @cached_property
    def cholesky(self) -> SafeCholesky:
        """The factors used by densities and draws, with the jitter they needed."""
        return safe_cholesky(self.covariance)

    def log_density(self, x: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, " n"]:
        """See ``Gaussian.log_density``."""
        _require_shape("x", x, [self.mean.shape])
        factor = self.cholesky.factor
        whitened = _solve_lower(factor, x - self.mean)
        log_determinant = 2.0 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
        return -0.5 * (x.shape[1] * LOG_TWO_PI + log_determinant + (whitened**2).sum(axis=1))

    def draw(self, rng: np.random.Generator) -> Float64[np.ndarray, "n d"]:
        """See ``Gaussian.draw``."""
        white = rng.standard_normal(self.mean.shape)
        factor = self.cholesky.factor
        if factor.ndim == 2:
            return self.mean + white @ factor.T
        return self.mean + np.matmul(factor, white[:, :, None])[:, :, 0]


def _solve_lower(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve F y = right for every row; F is (d, d) for all rows or (n, d, d).

    Forward substitution over the d columns, all rows at once: NumPy has no batched triangular solve, and its general
    one factorises again, at twice the cost of the Cholesky.
    """
    if factor.ndim == 2:
        solved: np.ndarray = scipy.linalg.solve_triangular(factor, right.T, lower=True).T
        return solved
    solved = np.empty_like(right)
    for j in range(right.shape[1]):
        known = np.einsum("ni,ni->n", factor[:, j, :j], solved[:, :j])
        solved[:, j] = (right[:, j] - known) / factor[:, j, j]
    return solved


def _float64(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _require_shape(name: str, array: np.ndarray, allowed: list[tuple[int, ...]]) -> None:
    if array.shape not in allowed:
        rule = " or ".join(str(shape) for shape in allowed)
        raise InputError(f"{name} has shape {array.shape}, and here it must be {rule}; pass one row a state")
