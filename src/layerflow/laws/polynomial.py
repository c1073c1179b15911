"""Polynomial laws from a solved least-squares fit: what the affine and the quadratic law share."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from layerflow.laws.drift import PolynomialDrift
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import NoiseForm, covariance_noise, residual_noise
from layerflow.laws.pairs import require_pairs
from layerflow.numerics.least_squares import LeastSquaresFit, fit_polynomial

# The residual covariance that a Gram matrix gives is a difference of sums: its error is about 1e-15 of the steps'
# variance, and up to 3e-16 times the design's condition, which is 1e6 where a few states are a thousand times larger
# than the rest. Residuals smaller than these shares, in any direction, are taken from the rows instead.
_DIFFERENCE_TRUSTED_ABOVE = 1e-8
_DIFFERENCE_TRUSTED_ABOVE_PER_CONDITION = 1e-9


@dataclass(frozen=True, eq=False)
class PolynomialFit:
    """A polynomial law, and the solved least squares that says how well posed it was (``rank``, ``condition``)."""

    law: GaussianLaw
    least_squares: LeastSquaresFit


def polynomial_law(
    fit: LeastSquaresFit,
    z: Float[np.ndarray, "n d"],
    dz: Float[np.ndarray, "n e"],
    *,
    noise: NoiseForm = "diagonal",
) -> GaussianLaw:
    """Make the law of a least-squares fit solved before, from a Gram matrix say, on training rows ``z`` and ``dz``.

    The noise has the biased (÷ n) moments of the training residuals. They come with the fit, at no cost, unless it is
    so nearly exact that a difference of sums cannot resolve them; only then the drift is evaluated at all training
    states. Shapes (n, d). SPEC §4.

    Raises:
        InputError: Another form of noise.
    """
    drift = PolynomialDrift.from_fit(fit)
    if _resolved(fit, dz):
        return GaussianLaw(drift, covariance_noise(fit.residual_covariance, noise))
    return GaussianLaw(drift, residual_noise(dz - drift(z), noise))


def fit_polynomial_law(
    z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n e"], *, degree: int, noise: NoiseForm
) -> PolynomialFit:
    """Check the rows, solve, and make the law; see ``fit_affine`` and ``fit_quadratic``."""
    states, steps = require_pairs(z, dz)
    fit = fit_polynomial(states, steps, degree=degree)
    return PolynomialFit(polynomial_law(fit, states, steps, noise=noise), fit)


def _resolved(fit: LeastSquaresFit, dz: np.ndarray) -> bool:
    """Whether a residual covariance stands clear of rounding in every direction, in units of the steps' spread."""
    deviation = np.std(dz, axis=0, dtype=np.float64)
    if not (deviation > 0.0).all():
        return False
    smallest = np.linalg.eigvalsh(fit.residual_covariance / np.outer(deviation, deviation))[0]
    trusted = max(_DIFFERENCE_TRUSTED_ABOVE, _DIFFERENCE_TRUSTED_ABOVE_PER_CONDITION * fit.condition)
    return bool(smallest > trusted)
