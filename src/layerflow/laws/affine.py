"""The affine law: least squares of the step on (1, z)."""

import numpy as np
from jaxtyping import Float

from layerflow.laws.noise import NoiseForm
from layerflow.laws.polynomial import PolynomialFit, fit_polynomial_law


def fit_affine(
    z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n e"], *, noise: NoiseForm = "diagonal"
) -> PolynomialFit:
    """Fit the affine law: a(z) = b + A z with b and A minimising Σ‖Δ − a(z)‖².

    The noise has the biased (÷ n) moments of the training residuals: ``diagonal``, ``full`` or ``isotropic``.

    Shapes: states ``z`` (n, d), steps Δ ``dz`` (n, d). Where the rows do not determine all coefficients the solution of
    least norm is taken and ``least_squares.rank`` says so. Cost: n d² multiplications. SPEC §4.

    Raises:
        InputError: Rows that do not pair up, none of them, non-finite values, another form of noise.
    """
    return fit_polynomial_law(z, dz, degree=1, noise=noise)
