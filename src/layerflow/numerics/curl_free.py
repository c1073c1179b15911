"""Curl-free polynomial fields: least squares of steps on -∇V with V a cubic polynomial, from a Gram matrix.

The field's linear part is then a symmetric matrix and its quadratic part a fully symmetric tensor, so all outputs
share parameters and the problem no longer splits by output; it has C(d + 3, 3) - 1 unknowns (47,904 at d = 64).
Its normal operator is applied, never formed: potential coefficients → field coefficients → Gram matrix → back.
Conjugate gradients, preconditioned by the unconstrained inverse (float32 is enough for that), serve every width.

A gradient stays one when the axes are turned, and in the cloud's principal axes, scaled to unit variance, the Gram
matrix of a near-Gaussian cloud is near diagonal. So the sums are turned first: on real clouds 30 to 100 iterations
where coordinates as they come took 100 to beyond 2,000 (attention sinks). Tried and dropped: the dense normal
equations, as accurate, but 6,544 unknowns at d = 32 and out of reach at d = 64; Hermite polynomials for monomials, and
averaging the preconditioner's outputs by their variances, no fewer iterations; one block of unknowns for each output,
more; no preconditioner, three times as many at half the cost.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float32, Float64, Int64

from layerflow.errors import InputError
from layerflow.numerics.gram import Gram
from layerflow.numerics.polynomial import evaluate, pairs

# Added to the unconstrained matrix (unit columns) so that its inverse exists and float32 holds it, whatever the rank.
# Only the preconditioner sees it, and takes no more iterations for it.
_SHIFT = 1e-3
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
    return PotentialEquations.of(sums).fit(
        antisymmetric=antisymmetric, tolerance=tolerance, max_iterations=max_iterations
    )


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
class PotentialEquations:
    """What the fits with and without an antisymmetric part share: a Gram matrix turned, scaled and inverted once.

    `matrix` and `cross` are the unconstrained normal equations of unit columns, `inverse` that of `matrix`, nearly.
    At d = 64 they take as long to set up as 20 iterations.
    """

    center: Float64[np.ndarray, " d"]
    step_center: Float64[np.ndarray, " d"]
    turned: "_Turned"
    norms: Float64[np.ndarray, " f"]
    matrix: Float64[np.ndarray, "f f"]
    cross: Float64[np.ndarray, "f d"]
    inverse: Float32[np.ndarray, "f f"]

    @classmethod
    def of(cls, sums: Gram) -> "PotentialEquations":
        """Prepare the Gram matrix of degree 2 of d coordinates and d steps.

        Raises:
            InputError: the Gram matrix is of degree 1, or its steps are not as wide as its states.
        """
        if sums.degree != 2 or sums.cross.shape[1] != sums.width:
            raise InputError("the potential needs a Gram matrix of degree 2 with steps as wide as the states")
        turned = _Turned.of(sums)
        norms = np.sqrt(turned.matrix.diagonal())
        unit = _reciprocal(norms)
        matrix = turned.matrix * unit * unit[:, None]
        matrix = (matrix + matrix.T) / 2
        factor, _ = scipy.linalg.lapack.dpotrf(matrix + _SHIFT * np.eye(len(matrix)), lower=1, overwrite_a=1)
        lower, _ = scipy.linalg.lapack.dpotri(factor, lower=1, overwrite_c=1)
        inverse = (np.tril(lower) + np.tril(lower, -1).T).astype(np.float32)
        cross = turned.cross * unit[:, None]
        return cls(sums.scaler.center, sums.step_center, turned, norms, matrix, cross, inverse)

    def fit(self, *, antisymmetric: bool = False, tolerance: float = 1e-11, max_iterations: int = 2000) -> PotentialFit:
        """Fit the potential, with an antisymmetric part if asked for; see `fit_potential`."""
        turned = self.turned
        d = len(turned.axes)
        first, second = pairs(d)
        relative = np.append(1.0, turned.relative)
        common = relative[first] * relative[second]  # monomials of x → those of axesᵀ (z - center) / scale
        parameters = _Parameters.of(common * self.norms, antisymmetric=antisymmetric)
        solved = _conjugate_gradients(self, parameters, tolerance, max_iterations)
        field = parameters.spread(solved.solution) * (_reciprocal(self.norms) * _reciprocal(common))[:, None]
        field[0] += self.step_center @ turned.axes
        rotation = np.zeros((d, d))
        if antisymmetric:
            linear = field[1 : d + 1].T / turned.scale  # acts as linear @ axesᵀ (z - center)
            rotation = turned.axes @ ((linear - linear.T) / 2) @ turned.axes.T
        return PotentialFit(self.center, turned.axes, turned.scale, field, rotation, solved.iterations, solved.residual)


def _reciprocal(values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Invert, leaving zeros."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)


@dataclass(frozen=True)
class _Parameters:
    """How orthonormal parameters of the potential make the field's coefficients of unit columns.

    Field coefficient (β, k) is `weight` times parameter `place`: the derivative along k of the potential's monomial
    β k. Parameters have unit diagonal in the normal equations; since each field coefficient belongs to one parameter,
    that also makes `spread` an isometry and `collect` its transpose.
    """

    place: Int64[np.ndarray, "f d"]
    weight: Float64[np.ndarray, "f d"]
    count: int

    @classmethod
    def of(cls, lengths: Float64[np.ndarray, " f"], *, antisymmetric: bool) -> "_Parameters":
        """Prepare parameters for columns of these lengths in common coordinates."""
        place, power, count = _derivatives(round((2 * len(lengths) + 0.25) ** 0.5 - 1.5), antisymmetric)
        weight = power * lengths[:, None]
        length = np.sqrt(np.bincount(place.ravel(), (weight**2).ravel(), count))
        return cls(place, weight * _reciprocal(length)[place], count)

    def spread(self, parameters: Float64[np.ndarray, " p"]) -> Float64[np.ndarray, "f d"]:
        return np.asarray(self.weight * parameters[self.place])

    def collect(self, coefficients: Float[np.ndarray, "f d"]) -> Float64[np.ndarray, " p"]:
        return np.bincount(self.place.ravel(), (self.weight * coefficients).ravel(), self.count)


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


@dataclass(frozen=True)
class _Solved:
    solution: Float64[np.ndarray, " p"]
    iterations: int
    residual: float


def _conjugate_gradients(
    equations: PotentialEquations, parameters: _Parameters, tolerance: float, max_iterations: int
) -> _Solved:
    """Solve the normal equations, preconditioned by spread → inverse of the unconstrained matrix → collect."""
    target = parameters.collect(equations.cross)
    size = float(np.linalg.norm(target)) or 1.0
    solution = np.zeros_like(target)
    residual, direction, power = target.copy(), np.zeros_like(target), 1.0
    for iteration in range(max_iterations + 1):
        error = float(np.linalg.norm(residual)) / size
        if error <= tolerance:
            break
        # In float32 relative to the residual, which would underflow there as it shrinks.
        spread = (parameters.spread(residual) / (error * size)).astype(np.float32)
        preconditioned = parameters.collect(equations.inverse @ spread) * (error * size)
        previous, power = power, float(residual @ preconditioned)
        direction = preconditioned + (power / previous if iteration else 0.0) * direction
        image = parameters.collect(equations.matrix @ parameters.spread(direction))
        step = power / float(direction @ image)
        solution += step * direction
        residual -= step * image
    return _Solved(solution, iteration, error)
