"""An anisotropic, rotating Ornstein-Uhlenbeck process is recovered within its standard errors."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.linalg import solve_discrete_lyapunov

from layerflow.errors import InputError
from layerflow.laws import FullNoise, GaussianLaw, PolynomialDrift, fit_affine, polynomial_law
from layerflow.numerics.gram import gram
from layerflow.numerics.least_squares import solve

OFFSET = np.array([0.3, -0.2, 1.0])
MATRIX = np.array([[-0.5, -0.8, 0.0], [0.6, -0.3, 0.2], [0.1, 0.0, -0.2]])
COVARIANCE = np.array([[0.50, 0.20, 0.00], [0.20, 0.10, 0.01], [0.00, 0.01, 0.02]])
TRUTH = GaussianLaw(PolynomialDrift.affine(OFFSET, MATRIX), FullNoise(COVARIANCE))


def stationary_steps(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    spread = solve_discrete_lyapunov(np.eye(3) + MATRIX, COVARIANCE)
    z = rng.multivariate_normal(-np.linalg.solve(MATRIX, OFFSET), spread, n)
    return z, TRUTH.at(z).draw(rng)


def test_the_truth_is_anisotropic_and_does_not_commute():
    assert np.abs(MATRIX @ COVARIANCE - COVARIANCE @ MATRIX).max() > 0.1


@pytest.mark.parametrize("seed", range(4))
def test_recovers_the_process_within_standard_errors(seed):
    n = 4_000
    z, dz = stationary_steps(seed, n)
    law = fit_affine(z, dz, noise="full").law
    design = np.column_stack([np.ones(n), z])
    # Covariance of the coefficients: (X^T X)^-1 times each coordinate's noise variance.
    errors = np.sqrt(np.outer(np.diag(np.linalg.inv(design.T @ design)), np.diag(COVARIANCE)))
    truth = np.vstack([OFFSET, MATRIX.T])
    assert (np.abs(law.drift.coefficients - truth) < 4.5 * errors).all()
    variance = np.diag(COVARIANCE)
    errors = np.sqrt((np.outer(variance, variance) + COVARIANCE**2) / n)
    # Biased moments of residuals fall short by (rows - 4) / rows on average.
    assert (np.abs(law.noise.covariance - COVARIANCE * (1 - 4 / n)) < 4.5 * errors).all()


def test_error_falls_with_the_root_of_the_number_of_tokens():
    sizes = np.array([500, 2_000, 8_000, 32_000])
    errors = []
    for n in sizes:
        fits = [fit_affine(*stationary_steps(seed, n)).law.drift.matrix for seed in range(8)]
        errors.append(np.sqrt(np.mean((np.array(fits) - MATRIX) ** 2)))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -0.62 < slope < -0.38


@pytest.mark.parametrize("form", ["diagonal", "full", "isotropic"])
def test_noise_has_the_moments_of_the_residuals(form):
    z, dz = stationary_steps(0, 500)
    law = fit_affine(z, dz, noise=form).law
    residuals = dz - law.drift(z)
    assert_allclose(residuals.mean(axis=0), 0.0, atol=1e-13)
    covariance = np.cov(residuals.T, bias=True)
    expected = {
        "diagonal": np.diag(covariance),
        "full": covariance,
        "isotropic": np.full(3, np.trace(covariance) / 3),
    }[form]
    found = law.noise.covariance if form == "full" else law.noise.variance
    assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


def test_full_noise_is_the_likelier_on_held_out_steps():
    z, dz = stationary_steps(0, 4_000)
    held_out = stationary_steps(1, 4_000)
    gain = [fit_affine(z, dz, noise=form).law.log_density(*held_out).mean() for form in ("full", "diagonal")]
    expected = -0.5 * np.linalg.slogdet(COVARIANCE / np.sqrt(np.outer(np.diag(COVARIANCE), np.diag(COVARIANCE))))[1]
    assert abs(gain[0] - gain[1] - expected) < 0.1 * expected


def test_from_a_gram_matrix_solved_elsewhere():
    """As the study does it: whole cloud minus the held-out part."""
    z, dz = stationary_steps(0, 1_000)
    whole = gram(z, dz, degree=1)
    part = gram(z[800:], dz[800:], degree=1, scaler=whole.scaler, step_center=whole.step_center)
    law = polynomial_law(solve(whole - part, z[:800], dz[:800]), z[:800], dz[:800], noise="full")
    direct = fit_affine(z[:800], dz[:800], noise="full").law
    assert_allclose(law.drift.coefficients, direct.drift.coefficients, rtol=1e-9)
    assert_allclose(law.drift(z), direct.drift(z), rtol=1e-9, atol=1e-12)
    assert_allclose(law.noise.covariance, direct.noise.covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9, 1e-12])
def test_residuals_far_below_the_steps_are_still_resolved(size):
    """A difference of sums would leave nothing of them below 1e-8 of the steps."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((400, 3)) + 10.0
    noise = size * rng.standard_normal((400, 3)) * [1.0, 2.0, 0.5]
    law = fit_affine(z, OFFSET + z @ MATRIX.T + noise, noise="full").law
    residuals = (
        noise
        - np.column_stack([np.ones(400), z]) @ np.linalg.lstsq(np.column_stack([np.ones(400), z]), noise, rcond=None)[0]
    )
    expected = residuals.T @ residuals / 400
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert_allclose(law.noise.covariance / scale, expected / scale, atol=1e-2 if size < 1e-10 else 1e-4)


def test_steps_that_do_not_vary_are_fitted_exactly():
    z = np.random.default_rng(0).standard_normal((50, 2))
    law = fit_affine(z, np.tile([1.0, -2.0], (50, 1))).law
    assert_allclose(law.drift(z), np.tile([1.0, -2.0], (50, 1)), atol=1e-14)
    assert (law.noise.variance < 1e-25).all()


def test_states_far_from_the_origin_cost_no_digits():
    z, dz = stationary_steps(0, 500)
    near, far = fit_affine(z, dz).law, fit_affine(z + 1e7, dz).law
    assert_allclose(far.drift(z + 1e7), near.drift(z), atol=1e-7)  # z + 1e7 itself is rounded to 1e-9


def test_float32_rows_are_fitted_in_float64():
    z, dz = (rows.astype(np.float32) for rows in stationary_steps(0, 300))
    single, double = fit_affine(z, dz).law, fit_affine(z.astype(float), dz.astype(float)).law
    assert_array_equal(single.drift.coefficients, double.drift.coefficients)


def test_says_when_the_rows_do_not_determine_the_map():
    z, dz = stationary_steps(0, 100)
    flat = np.column_stack([z[:, :2], z[:, 0] - z[:, 1]])
    assert fit_affine(z, dz).least_squares.rank == 4
    assert fit_affine(flat, dz).least_squares.rank == 3


def test_refusals(untyped):
    z, dz = stationary_steps(0, 20)
    with pytest.raises(InputError, match="do not pair up"):
        fit_affine(z, dz[:-1])
    with pytest.raises(InputError, match="do not pair up"):
        fit_affine(z[:, 0], dz)
    with pytest.raises(InputError, match="non-finite"):
        fit_affine(z, np.where(dz > 0, np.inf, dz))
    with pytest.raises(InputError, match="'local'"):
        fit_affine(z, dz, noise="local")
    with pytest.raises(InputError, match="at least 1"):
        fit_affine(z[:0], dz[:0])
