"""Curl-free polynomial fields: least squares of steps on -∇V with V a cubic polynomial, from a Gram matrix.

The field's linear part is then a symmetric matrix and its quadratic part a fully symmetric tensor, so all outputs
share parameters and the problem no longer splits by output; it has C(d + 3, 3) - 1 unknowns (47,904 at d = 64).
Its normal operator is applied, never formed: potential coefficients → field coefficients → Gram matrix → back.
Conjugate gradients, preconditioned by the unconstrained inverse, serve every width.

A gradient stays one when the axes are turned, and in the cloud's principal axes, scaled to unit variance, the Gram
matrix of a near-Gaussian cloud is near diagonal. So the sums are turned first: on real clouds 30 to 100 iterations
where coordinates as they come took 100 to beyond 2,000 (attention sinks). Tried and dropped: the dense normal
equations, as accurate, but 6,544 unknowns at d = 32 and out of reach at d = 64; Hermite polynomials for monomials, no
fewer iterations; no preconditioner, three times as many at half the cost.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float64, Int64

from layerflow.errors import InputError
from layerflow.numerics.gram import Gram
from layerflow.numerics.polynomial import evaluate, pairs

# Added to the unconstrained matrix so that it has a Cholesky factor; the first that suffices. The solution of the
# constrained problem does not see it.
_SHIFTS = (1e-10, 1e-8, 1e-6, 1e-4)
# An axis is flat when its variance is below this share of what its coordinates have without their correlations. The
# Gram matrix holds its fourth moments to (1 / share)² roundings; real clouds stay above 2e-3.
_FLAT = 1e-5


@dataclass(frozen=True)
class PotentialFit:
    """Field a(z) = -∇V(z) + A z, V a cubic polynomial and A antisymmetric (zero unless asked for).

    `field` (F, d) are the coefficients of the monomials of u = axesᵀ (z - center) / scale, in the order of
    `polynomial.features`, the antisymmetric part included; they give the step along each of the `axes` (columns of a
    rotation, (d, d)). `rotation` (d, d) is A, in raw coordinates and acting as A @ (z - center). `iterations` of
    conjugate gradients brought the relative residual to `residual`.
    """

    center: Float64[np.ndarray, " d"]
    axes: Float64[np.ndarray, "d d"]
    scale: float
    field: Float64[np.ndarray, "f d"]
    rotation: Float64[np.ndarray, "d d"]
    iterations: int
    residual: float

    def predict(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n d"]:
        """Predict the step at each state: the whole field, rotation included."""
        return evaluate(self.field, self._turned(z), 2) @ self.axes.T

    def potential(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, " n"]:
        """Evaluate V at each state, in (units of z)², zero at the centre of the cloud.

        V is a sum of homogeneous parts of degree m = 1, 2, 3, for which u · ∇V_m = m V_m (Euler); so each follows
        from the part of the field one degree lower. A rotation does no work along the ray and drops out.
        """
        u = self._turned(z)
        d = u.shape[1]
        constant, linear = self.field[0], u @ self.field[1 : d + 1]
        quadratic = evaluate(self.field, u, 2) - linear - constant
        work = constant + linear / 2 + quadratic / 3
        return np.asarray(-self.scale * np.einsum("nd,nd->n", u, work))

    def _turned(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n d"]:
        return np.asarray((z - self.center) @ self.axes / self.scale)


def fit_potential(
    sums: Gram, *, antisymmetric: bool = False, tolerance: float = 1e-11, max_iterations: int = 2000
) -> PotentialFit:
    """Fit -∇V, V a cubic polynomial, to the steps whose normal equations are `sums`.

    Minimises Σ‖Δ + ∇V(z) - A z‖² over V, and over antisymmetric A where `antisymmetric` is set. Raw coordinates with
    one common scale: being a gradient is not invariant under rescaling single coordinates.

    Raises:
        InputError: the Gram matrix is of degree 1, or its steps are not as wide as its states.

    Reference: SPEC section 6, potential and circulation.
    """
    d = sums.width
    if sums.degree != 2 or sums.cross.shape[1] != d:
        raise InputError("the potential needs a Gram matrix of degree 2 with steps as wide as the states")
    turned = _Turned.of(sums)
    problem = _Problem.of(turned, antisymmetric=antisymmetric)
    parameters, iterations, residual = _conjugate_gradients(problem, tolerance, max_iterations)
    field = problem.spread(parameters) * problem.unit[:, None]
    field[0] += sums.step_center @ turned.axes
    rotation = np.zeros((d, d))
    if antisymmetric:
        linear = field[1 : d + 1].T / turned.scale  # acts as linear @ axesᵀ (z - center)
        rotation = turned.axes @ ((linear - linear.T) / 2) @ turned.axes.T
    return PotentialFit(sums.scaler.center, turned.axes, turned.scale, field, rotation, iterations, residual)


@dataclass(frozen=True)
class _Turned:
    """A Gram matrix in the cloud's principal axes, each of unit variance: x = axesᵀ (z - center) / (scale · relative).

    `matrix` and `cross` are of the monomials of x, and of steps along the axes. A flat axis has `relative` 0 and x = 0.
    """

    axes: Float64[np.ndarray, "d d"]
    scale: float
    relative: Float64[np.ndarray, " d"]
    matrix: Float64[np.ndarray, "f f"]
    cross: Float64[np.ndarray, "f d"]

    @classmethod
    def of(cls, sums: Gram) -> "_Turned":
        deviation = np.divide(1.0, sums.scaler.inverse, out=np.zeros(sums.width), where=sums.scaler.inverse > 0)
        matrix = sums.matrix()
        block = slice(1, sums.width + 1)
        covariance = matrix[block, block] * np.outer(deviation, deviation) / sums.count
        variance, axes = np.linalg.eigh(covariance)
        variance[variance <= _FLAT * (axes.T**2 @ deviation**2)] = 0.0
        scale = float(np.sqrt(variance.mean())) or 1.0
        size = np.sqrt(variance)
        to_axes = axes.T * deviation * np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)[:, None]
        half = _change_variables(matrix, to_axes)
        whole = _change_variables(np.ascontiguousarray(half.T), to_axes)
        return cls(axes, scale, size / scale, whole, _change_variables(sums.cross, to_axes) @ axes)


def _change_variables(rows: Float64[np.ndarray, "f c"], to: Float64[np.ndarray, "d d"]) -> Float64[np.ndarray, "f c"]:
    """Turn rows that belong to the monomials of w into those of the monomials of `to` @ w.

    Pairs of extended variables are laid out as a square, so that each index is changed by one matrix product: 4 d³ c
    operations where the matrix of all pairs against all pairs would take d⁴ c / 2.
    """
    d = len(to)
    first, second = pairs(d)
    square = np.empty((d + 1, d + 1), dtype=np.int64)
    square[first, second] = square[second, first] = np.arange(len(first))
    basis = np.eye(d + 1)
    basis[1:, 1:] = to
    changed = np.matmul(basis, np.tensordot(basis, rows[square], axes=1))
    return np.asarray(changed[first, second])


@dataclass(frozen=True)
class _Problem:
    """The normal equations of the curl-free fit, in orthonormal parameters.

    Field coefficient (β, k) is `weight` times parameter `place`: the derivative along k of the potential's monomial
    β k. Columns of the design have unit length and parameters unit diagonal in the normal equations; since each
    field coefficient belongs to one parameter, that also makes `spread` an isometry and `collect` its transpose.
    """

    unit: Float64[np.ndarray, " f"]
    matrix: Float64[np.ndarray, "f f"]
    cross: Float64[np.ndarray, "f d"]
    place: Int64[np.ndarray, "f d"]
    weight: Float64[np.ndarray, "f d"]
    n_parameters: int

    @classmethod
    def of(cls, turned: _Turned, *, antisymmetric: bool) -> "_Problem":
        d = len(turned.relative)
        first, second = pairs(d)
        relative = np.append(1.0, turned.relative)
        common = relative[first] * relative[second]  # monomials of x → those of axesᵀ (z - center) / scale
        norms = np.sqrt(turned.matrix.diagonal())
        whole = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
        place, power, n_parameters = _derivatives(d, antisymmetric)
        weight = power * (common * norms)[:, None]
        length = np.sqrt(np.bincount(place.ravel(), (weight**2).ravel(), n_parameters))
        weight *= np.divide(1.0, length, out=np.zeros_like(length), where=length > 0)[place]
        unit = np.divide(whole, common, out=np.zeros_like(whole), where=common > 0)
        matrix = turned.matrix * whole * whole[:, None]
        return cls(unit, (matrix + matrix.T) / 2, turned.cross * whole[:, None], place, weight, n_parameters)

    def spread(self, parameters: Float64[np.ndarray, " p"]) -> Float64[np.ndarray, "f d"]:
        return np.asarray(self.weight * parameters[self.place])

    def collect(self, coefficients: Float64[np.ndarray, "f d"]) -> Float64[np.ndarray, " p"]:
        return np.bincount(self.place.ravel(), (self.weight * coefficients).ravel(), self.n_parameters)


@lru_cache(maxsize=16)
def _derivatives(d: int, antisymmetric: bool) -> tuple[Int64[np.ndarray, "f d"], Float64[np.ndarray, "f d"], int]:
    """Say which potential coefficient each field coefficient derives from, and the factor the derivative brings.

    The field's monomial (i, j) of extended variables, in output k, is the derivative of the potential's monomial
    (i, j, k); its power of k comes down. Parameters are places of sorted triples. With an antisymmetric part the
    linear coefficients are free: symmetric and antisymmetric matrices together are all matrices.
    """
    first, second = pairs(d)
    output = np.arange(1, d + 1)
    i, j = first[:, None], second[:, None]
    low, high = np.minimum(i, output), np.maximum(j, output)
    middle = i + j + output - low - high
    place = high * (high + 1) * (high + 2) // 6 + middle * (middle + 1) // 2 + low
    power = 1.0 + (i == output) + (j == output)
    n_parameters = (d + 1) * (d + 2) * (d + 3) // 6
    if antisymmetric:
        place[1 : d + 1] = n_parameters + np.arange(d * d).reshape(d, d)
        power[1 : d + 1] = 1.0
        n_parameters += d * d
    return place, power, n_parameters


def _conjugate_gradients(
    problem: _Problem, tolerance: float, max_iterations: int
) -> tuple[Float64[np.ndarray, " p"], int, float]:
    """Solve the normal equations, preconditioned by spread → inverse of the unconstrained matrix → collect."""
    factor = _factor(problem.matrix)
    target = problem.collect(problem.cross)
    size = float(np.linalg.norm(target)) or 1.0
    solution = np.zeros_like(target)
    residual, direction, power = target.copy(), np.zeros_like(target), 1.0
    for iteration in range(max_iterations + 1):
        error = float(np.linalg.norm(residual)) / size
        if error <= tolerance:
            break
        preconditioned = problem.collect(scipy.linalg.cho_solve((factor, True), problem.spread(residual)))
        previous, power = power, float(residual @ preconditioned)
        direction = preconditioned + (power / previous if iteration else 0.0) * direction
        image = problem.collect(problem.matrix @ problem.spread(direction))
        step = power / float(direction @ image)
        solution += step * direction
        residual -= step * image
    return solution, iteration, error


def _factor(matrix: Float64[np.ndarray, "f f"]) -> Float64[np.ndarray, "f f"]:
    """Cholesky factor of the matrix shifted by as little as makes it positive definite (unit columns: trace F)."""
    for shift in _SHIFTS:
        factor, failed = scipy.linalg.lapack.dpotrf(matrix + shift * np.eye(len(matrix)), lower=1, overwrite_a=1)
        if not failed:
            return np.asarray(factor)
    raise InputError(
        f"the Gram matrix has eigenvalues below -{_SHIFTS[-1]:g} of its columns: the states are too nearly collinear "
        "for a potential; use fewer components"
    )
