"""The quadratic law: least squares of the step on (1, z, z_i z_j for i ≤ j)."""

import numpy as np
from jaxtyping import Float

from layerflow.laws.noise import NoiseForm
from layerflow.laws.polynomial import PolynomialFit, fit_polynomial_law


def fit_quadratic(
    z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n e"], *, noise: NoiseForm = "diagonal"
) -> PolynomialFit:
    """Fit the quadratic law.

    a_c(z) = b_c + Σ_i A_ci z_i + Σ_{i≤j} Q_cij z_i z_j, minimising Σ‖Δ − a(z)‖²; the noise has the biased (÷ n)
    moments of the training residuals: ``diagonal``, ``full`` or ``isotropic``.

    Shapes: states ``z`` (n, d), steps Δ ``dz`` (n, d). Where the rows do not determine all coefficients the solution of
    least norm is taken and ``least_squares.rank`` says so. Cost: n d⁴/12 multiplications. SPEC §4.

    Raises:
        InputError: Rows that do not pair up, none of them, non-finite values, another form of noise.
    """
    return fit_polynomial_law(z, dz, degree=2, noise=noise)
