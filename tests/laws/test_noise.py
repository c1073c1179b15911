"""Noise from residuals."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from layerflow.errors import InputError
from layerflow.laws.noise import DiagonalNoise, FullNoise, residual_noise

RESIDUALS = np.random.default_rng(0).standard_normal((50, 3)) @ np.array(
    [[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [-1.0, 0.2, 0.1]]
)
RESIDUALS -= RESIDUALS.mean(axis=0)


def test_moments_are_biased():
    covariance = np.cov(RESIDUALS.T, bias=True)
    full = residual_noise(RESIDUALS, "full")
    assert isinstance(full, FullNoise)
    assert_allclose(full.covariance, covariance)
    diagonal = residual_noise(RESIDUALS, "diagonal")
    assert isinstance(diagonal, DiagonalNoise)
    assert_allclose(diagonal.variance, np.diag(covariance))


def test_residuals_are_squared_about_the_drift_not_about_their_mean():
    shifted = RESIDUALS + np.array([5.0, 0.0, -1.0])
    assert_allclose(residual_noise(shifted, "full").covariance, shifted.T @ shifted / 50)
    assert_allclose(residual_noise(shifted, "diagonal").variance, (shifted**2).mean(axis=0))
    assert_allclose(residual_noise(shifted, "isotropic").variance, np.full(3, (shifted**2).mean()))


def test_gaussians_around_means():
    mean = np.arange(6.0).reshape(2, 3)
    assert_allclose(DiagonalNoise(np.array([1.0, 2.0, 3.0])).around(mean).mean, mean)
    assert_allclose(FullNoise(np.eye(3)).around(mean).marginal_variance, np.ones((2, 3)))


def test_refusals(untyped):
    with pytest.raises(InputError, match="'other'"):
        residual_noise(RESIDUALS, "other")
    with pytest.raises(InputError, match="not negative"):
        DiagonalNoise(np.array([1.0, -1.0]))
    with pytest.raises(InputError, match="symmetric"):
        FullNoise(np.array([[1.0, 0.5], [0.0, 1.0]]))
    with pytest.raises(InputError, match="symmetric"):
        FullNoise(np.array([[1.0, np.nan], [np.nan, 1.0]]))
