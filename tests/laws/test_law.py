"""A hand-written Ornstein-Uhlenbeck law walks the same code as fitted ones."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.linalg import solve_discrete_lyapunov
from scipy.stats import multivariate_normal

from layerflow.laws import Affine, ConstantDrift, DiagonalNoise, FullNoise, GaussianLaw, PolynomialDrift
from layerflow.laws.law import Law

OFFSET = np.array([0.3, -0.2])
MATRIX = np.array([[-0.5, -0.8], [0.4, -0.3]])  # rotation and contraction
COVARIANCE = np.array([[0.5, 0.2], [0.2, 0.1]])  # does not commute with it

OU = GaussianLaw(PolynomialDrift.affine(OFFSET, MATRIX), FullNoise(COVARIANCE))


def test_the_truth_is_anisotropic_and_does_not_commute():
    assert np.abs(MATRIX @ COVARIANCE - COVARIANCE @ MATRIX).max() > 0.1


def test_density_of_a_step():
    rng = np.random.default_rng(0)
    z, dz = rng.standard_normal((2, 6, 2))
    expected = [multivariate_normal(OFFSET + MATRIX @ a, COVARIANCE).logpdf(b) for a, b in zip(z, dz, strict=True)]
    assert_allclose(OU.log_density(z, dz), expected, rtol=1e-12)
    assert_allclose(OU.at(z).mean, OU.drift(z))


def test_any_callable_is_a_drift():
    law = GaussianLaw(lambda z: -z, DiagonalNoise(np.ones(2)))
    z = np.random.default_rng(1).standard_normal((3, 2))
    assert_array_equal(law.at(z).mean, -z)


def test_without_noise_a_step_is_the_map():
    law = GaussianLaw(PolynomialDrift.affine(OFFSET, MATRIX), DiagonalNoise(np.zeros(2)))
    z = np.ones((1, 2))
    for _ in range(3):
        z = law.step(z, np.random.default_rng(0))
    expected = np.ones(2)
    for _ in range(3):
        expected = expected + OFFSET + MATRIX @ expected
    assert_allclose(z[0], expected)


def test_stepping_reaches_the_stationary_state():
    rng = np.random.default_rng(2)
    n = 20_000
    z = np.zeros((n, 2))
    for _ in range(60):
        z = OU.step(z, rng)
    mean = -np.linalg.solve(MATRIX, OFFSET)
    stationary = solve_discrete_lyapunov(np.eye(2) + MATRIX, COVARIANCE)
    variance = np.diag(stationary)
    assert (np.abs(z.mean(axis=0) - mean) < 4.5 * np.sqrt(variance / n)).all()
    error = np.sqrt((np.outer(variance, variance) + stationary**2) / n)
    assert (np.abs(np.cov(z.T, bias=True) - stationary) < 4.5 * error).all()


@pytest.mark.parametrize(
    "law",
    [
        OU,
        GaussianLaw(ConstantDrift(OFFSET), DiagonalNoise(np.ones(2))),
        Affine().fit(np.random.default_rng(3).standard_normal((30, 2)), np.ones((30, 2)) * [[1.0, 2.0]]).law_,
    ],
)
def test_laws_answer_alike(law: Law):
    z = np.random.default_rng(4).standard_normal((5, 2))
    assert_allclose(law.at(z).mean, law.drift(z))
    assert law.step(z, np.random.default_rng(0)).shape == (5, 2)
