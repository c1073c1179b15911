"""Exact when the map is a rotation and stretch, isotropic noise, signs."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import ortho_group

from layerflow.errors import InputError
from layerflow.laws.rotation_stretch import fit_rotation_stretch


def planted(seed: int, n: int, stretch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cloud with clear axes and the next one: rotated along its axes' images, stretched, translated."""
    d = len(stretch)
    rng = np.random.default_rng(seed)
    axes, next_axes = ortho_group.rvs(d, size=2, random_state=seed)
    scores = rng.standard_normal((n, d))
    scores -= scores.mean(axis=0)
    scores = np.linalg.qr(scores)[0] * np.sqrt(n) * np.geomspace(4.0, 0.5, d)
    matrix = (next_axes * stretch) @ axes.T
    z = scores @ axes.T + 3.0
    return z, (z - 3.0) @ matrix.T - 7.0, matrix


@pytest.mark.parametrize("seed", range(5))
def test_exact_for_a_rotation_and_stretch(seed):
    stretch = np.array([2.0, 1.5, 1.4, 0.5])  # keeps the order of the axes
    z, following, matrix = planted(seed, 200, stretch)
    fit = fit_rotation_stretch(z, following - z)
    assert_allclose(fit.law.drift(z), following - z, atol=1e-11)
    assert_allclose(fit.law.drift.matrix, matrix - np.eye(4), atol=1e-11)
    assert_allclose(fit.stretch, stretch, rtol=1e-11)
    assert_allclose(fit.law.at(z).marginal_variance, 0.0, atol=1e-20)
    assert fit.rank == 4


def test_noise_is_the_mean_squared_residual():
    z, following, _ = planted(0, 500, np.array([2.0, 1.5, 1.4, 0.5]))
    dz = following - z + 0.1 * np.random.default_rng(1).standard_normal(z.shape) * [1.0, 2.0, 3.0, 0.1]
    fit = fit_rotation_stretch(z, dz)
    residuals = dz - fit.law.drift(z)
    assert_allclose(residuals.mean(axis=0), 0.0, atol=1e-12)
    assert_allclose(fit.law.noise.variance, np.full(4, (residuals**2).mean()), rtol=1e-10)
    assert_allclose(fit.axes.T @ fit.axes, np.eye(4), atol=1e-12)
    assert_allclose(fit.next_axes.T @ fit.next_axes, np.eye(4), atol=1e-12)


def test_is_equivariant_under_rotations_of_each_cloud():
    """No basis is special: rotating the next cloud rotates the map."""
    z, following, _ = planted(2, 300, np.array([2.0, 1.5, 1.4, 0.5]))
    following = following + 0.2 * np.random.default_rng(3).standard_normal(z.shape)
    turn = ortho_group.rvs(4, random_state=4)
    plain = fit_rotation_stretch(z, following - z).law
    turned = fit_rotation_stretch(z, following @ turn.T - z).law
    assert_allclose(turned.drift(z) + z, (plain.drift(z) + z) @ turn.T, atol=1e-10)


@pytest.mark.parametrize("n", [3, 50])
def test_a_cloud_without_extent_in_some_direction(n):
    rng = np.random.default_rng(5)
    flat = rng.standard_normal((n, 2)) @ rng.standard_normal((2, 4))
    fit = fit_rotation_stretch(flat, 0.5 * flat)
    assert fit.rank == 2
    assert_allclose(fit.law.drift(flat), 0.5 * flat, atol=1e-12)


def test_refusals(untyped):
    z = np.zeros((5, 2))
    with pytest.raises(InputError, match="do not pair up"):
        fit_rotation_stretch(z, z[:4])
    with pytest.raises(InputError, match="at least 2"):
        fit_rotation_stretch(z[:1], z[:1])
    with pytest.raises(InputError, match="non-finite"):
        fit_rotation_stretch(z, np.full((5, 2), np.nan))
