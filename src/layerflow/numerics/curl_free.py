"""Curl-free polynomial fields: least squares of steps on -∇V with V a cubic polynomial, from a Gram matrix.

The field's linear part is then a symmetric matrix and its quadratic part a fully symmetric tensor, so all outputs
share parameters and the problem no longer splits by output; it has C(d + 3, 3) - 1 unknowns (47,904 at d = 64).
Its normal operator is applied, never formed: potential coefficients → field coefficients → Gram matrix → back.
Conjugate gradients, preconditioned by the unconstrained inverse, serve every width. Tried and dropped: the dense
normal equations, as accurate, but 6,544 unknowns at d = 32 and out of reach at d = 64.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float64, Int64

from layerflow.errors import InputError
from layerflow.numerics.gram import Gram
from layerflow.numerics.polynomial import evaluate, pairs

_SHIFT = 1e-10  # keeps the preconditioner positive where the Gram matrix is singular; the solution does not see it


@dataclass(frozen=True)
class PotentialFit:
    """Field a(z) = -∇V(z) + A z, V a cubic polynomial and A antisymmetric (zero unless asked for).

    `field` (F, d) are the coefficients of the monomials of u = (z - center) / scale, in the order of
    `polynomial.features`, the antisymmetric part included; `rotation` (d, d) is A, in raw coordinates and acting as
    A @ (z - center). `iterations` of conjugate gradients brought the relative residual to `residual`.
    """

    center: Float64[np.ndarray, " d"]
    scale: float
    field: Float64[np.ndarray, "f d"]
    rotation: Float64[np.ndarray, "d d"]
    iterations: int
    residual: float

    def predict(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n d"]:
        """Predict the step at each state: the whole field, rotation included."""
        return evaluate(self.field, (z - self.center) / self.scale, 2)

    def potential(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, " n"]:
        """Evaluate V at each state, in (units of z)², zero at the centre of the cloud.

        V is a sum of homogeneous parts of degree m = 1, 2, 3, for which u · ∇V_m = m V_m (Euler); so each follows
        from the part of the field one degree lower. A rotation does no work along the ray and drops out.
        """
        u = (z - self.center) / self.scale
        d = u.shape[1]
        constant, linear = self.field[0], u @ self.field[1 : d + 1]
        quadratic = evaluate(self.field, u, 2) - linear - constant
        work = constant + linear / 2 + quadratic / 3
        return np.asarray(-self.scale * np.einsum("nd,nd->n", u, work))


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
    problem = _Problem.of(sums, antisymmetric=antisymmetric)
    parameters, iterations, residual = _conjugate_gradients(problem, tolerance, max_iterations)
    field = problem.spread(parameters) * problem.unit[:, None]
    linear = field[1 : d + 1].T / problem.scale  # acts as linear @ (z - center)
    field[0] += sums.step_center
    return PotentialFit(
        sums.scaler.center, problem.scale, field, (linear - linear.T) / 2, iterations, residual
    )


@dataclass(frozen=True)
class _Problem:
    """The normal equations of the curl-free fit, in orthonormal parameters.

    Field coefficient (β, k) is `weight` times parameter `place`: the derivative along k of the potential's monomial
    β k. Columns of the design have unit length and parameters unit diagonal in the normal equations; since each
    field coefficient belongs to one parameter, that also makes `spread` an isometry and `collect` its transpose.
    """

    scale: float
    unit: Float64[np.ndarray, " f"]
    matrix: Float64[np.ndarray, "f f"]
    cross: Float64[np.ndarray, "f d"]
    place: Int64[np.ndarray, "f d"]
    weight: Float64[np.ndarray, "f d"]
    n_parameters: int

    @classmethod
    def of(cls, sums: Gram, *, antisymmetric: bool) -> "_Problem":
        deviation = np.divide(1.0, sums.scaler.inverse, out=np.zeros(sums.width), where=sums.scaler.inverse > 0)
        scale = float(np.sqrt(np.mean(deviation**2))) or 1.0
        first, second = pairs(sums.width)
        relative = np.append(1.0, deviation / scale)
        common = relative[first] * relative[second]  # standard monomials → those of (z - center) / scale
        matrix = sums.matrix()
        norms = np.sqrt(matrix.diagonal())
        whole = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
        place, power, n_parameters = _derivatives(sums.width, antisymmetric)
        weight = power * (common * norms)[:, None]
        diagonal = np.bincount(place.ravel(), (weight**2).ravel(), n_parameters)
        length = np.sqrt(diagonal)
        weight *= np.divide(1.0, length, out=np.zeros_like(length), where=length > 0)[place]
        unit = np.divide(whole, common, out=np.zeros_like(whole), where=common > 0)
        cross = sums.cross * whole[:, None]
        return cls(scale, unit, matrix * whole * whole[:, None], cross, place, weight, n_parameters)

    def spread(self, parameters: Float64[np.ndarray, " p"]) -> Float64[np.ndarray, "f d"]:
        return np.asarray(self.weight * parameters[self.place])

    def collect(self, coefficients: Float64[np.ndarray, "f d"]) -> Float64[np.ndarray, " p"]:
        return np.bincount(self.place.ravel(), (self.weight * coefficients).ravel(), self.n_parameters)


@lru_cache(maxsize=16)
def _derivatives(
    d: int, antisymmetric: bool
) -> tuple[Int64[np.ndarray, "f d"], Float64[np.ndarray, "f d"], int]:
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
    shifted = problem.matrix + _SHIFT * np.eye(len(problem.matrix))
    inverse = scipy.linalg.inv(shifted)
    target = problem.collect(problem.cross)
    size = float(np.linalg.norm(target)) or 1.0
    solution = np.zeros_like(target)
    residual, direction, power = target.copy(), np.zeros_like(target), 1.0
    for iteration in range(max_iterations + 1):
        error = float(np.linalg.norm(residual)) / size
        if error <= tolerance:
            break
        preconditioned = problem.collect(inverse @ problem.spread(residual))
        previous, power = power, float(residual @ preconditioned)
        direction = preconditioned + (power / previous if iteration else 0.0) * direction
        image = problem.collect(problem.matrix @ problem.spread(direction))
        step = power / float(direction @ image)
        solution += step * direction
        residual -= step * image
    return solution, iteration, error
