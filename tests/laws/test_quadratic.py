"""A planted quadratic flow is recovered; independent packages agree."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import PolynomialFeatures

from layerflow.errors import InputError
from layerflow.laws import FullNoise, GaussianLaw, PolynomialDrift, fit_affine, fit_quadratic
from layerflow.numerics.r2 import r2

OFFSET = np.array([0.3, -0.2])
MATRIX = np.array([[-0.5, -0.8], [0.4, -0.3]])
TENSOR = np.array([[[0.10, 0.05], [-0.02, 0.00]], [[0.00, -0.10], [0.00, 0.20]]])
COVARIANCE = np.array([[0.50, 0.20], [0.20, 0.10]])
TRUTH = GaussianLaw(PolynomialDrift.quadratic(OFFSET, MATRIX, TENSOR), FullNoise(COVARIANCE))


def steps_of_the_flow(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, 2)) * [2.0, 0.7] + [1.0, -3.0]
    return z, TRUTH.at(z).draw(rng)


@pytest.mark.parametrize("seed", range(4))
def test_recovers_the_flow_within_standard_errors(seed):
    n = 4_000
    z, dz = steps_of_the_flow(seed, n)
    fit = fit_quadratic(z, dz, noise="full")
    design = np.column_stack([np.ones(n), z, z[:, 0] ** 2, z[:, 0] * z[:, 1], z[:, 1] ** 2])
    errors = np.sqrt(np.outer(np.diag(np.linalg.inv(design.T @ design)), np.diag(COVARIANCE)))
    truth = TRUTH.drift.coefficients
    assert (np.abs(fit.law.drift.coefficients - truth) < 4.5 * errors).all()
    variance = np.diag(COVARIANCE)
    errors = np.sqrt((np.outer(variance, variance) + COVARIANCE**2) / n)
    assert (np.abs(fit.law.noise.covariance - COVARIANCE * (1 - 6 / n)) < 4.5 * errors).all()
    assert fit.least_squares.rank == 6


def test_coefficients_equal_scikit_learn():
    z, dz = steps_of_the_flow(0, 300)
    oracle = make_oracle(z, dz)
    assert_allclose(fit_quadratic(z, dz).law.drift.coefficients, oracle, rtol=1e-8, atol=1e-10)


def make_oracle(z: np.ndarray, dz: np.ndarray) -> np.ndarray:
    """scikit-learn's features come in the order 1, z, z_i z_j for i <= j."""
    return LinearRegression(fit_intercept=False).fit(PolynomialFeatures(2).fit_transform(z), dz).coef_.T


def test_drift_equals_stochastic_force_inference():
    """At unit time steps its Kramers-Moyal preset (Ito moments, rectangle rule) is the same regression."""
    sfi = pytest.importorskip("SFI")
    rng = np.random.default_rng(0)
    law = GaussianLaw(PolynomialDrift.affine(OFFSET, MATRIX), FullNoise(COVARIANCE))
    states = [rng.standard_normal((200, 2))]
    for _ in range(3):
        states.append(law.step(states[-1], rng))
    trajectories = np.array(states)
    z, dz = trajectories[:-1].reshape(-1, 2), np.diff(trajectories, axis=0).reshape(-1, 2)
    inference = sfi.OverdampedLangevinInference(sfi.TrajectoryCollection.from_arrays(X=trajectories, dt=1.0))
    inference.compute_diffusion_constant(method="MSD")  # its regression is weighted by it, which changes nothing
    inference.infer_force_linear(sfi.bases.monomials_up_to(2, dim=2, rank="vector"), preset="KM")
    expected = np.asarray(inference.force_inferred(z[:20]))  # in float32
    assert_allclose(fit_quadratic(z, dz).law.drift(z[:20]), expected, atol=1e-5)


def test_affine_data_have_no_products():
    rng = np.random.default_rng(1)
    z = rng.standard_normal((200, 3)) @ rng.standard_normal((3, 3)) + 4.0
    dz = 1.0 + z @ rng.standard_normal((3, 3))
    fit = fit_quadratic(z, dz)
    assert_allclose(fit.law.drift.coefficients[4:], 0.0, atol=1e-11)
    assert_allclose(fit.law.drift(z), dz, atol=1e-11)


def test_beats_the_affine_law_where_the_flow_bends():
    train, held_out = steps_of_the_flow(0, 3_000), steps_of_the_flow(1, 1_000)
    scores = [r2(held_out[1], fit(*train).law.drift(held_out[0])) for fit in (fit_quadratic, fit_affine)]
    assert scores[0] > scores[1] + 0.02


def test_too_few_rows_give_the_least_norm_and_say_so():
    rng = np.random.default_rng(2)
    z, dz = rng.standard_normal((2, 8, 4))  # 15 coefficients
    fit = fit_quadratic(z, dz)
    assert fit.least_squares.rank == 8
    assert_allclose(fit.law.drift(z), dz, atol=1e-10)


def test_refusals(untyped):
    z, dz = steps_of_the_flow(0, 20)
    with pytest.raises(InputError, match="do not pair up"):
        fit_quadratic(z, dz[:-1])
    with pytest.raises(InputError, match="non-finite"):
        fit_quadratic(np.where(z > 0, np.nan, z), dz)
    with pytest.raises(InputError, match="'local_full'"):
        fit_quadratic(z, dz, noise="local_full")
