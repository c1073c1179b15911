from itertools import combinations_with_replacement

import numpy as np
import pytest

from layerflow.errors import InputError
from layerflow.numerics.curl_free import fit_potential
from layerflow.numerics.gram import gram
from layerflow.numerics.least_squares import fit_polynomial

EXACT = 1e-13


def anisotropic(n, d, seed=0):
    """A cloud whose axes are neither equal nor those of the coordinates, off centre, with heavy tails."""
    rng = np.random.default_rng(seed)
    mix = np.linalg.qr(rng.normal(size=(d, d)))[0]
    return rng.standard_t(6, size=(n, d)) * np.geomspace(3.0, 0.2, d) @ mix + rng.normal(size=d)


class Cubic:
    """V(z) = b·z + z·Az/2 + Σ T_ijk z_i z_j z_k / 3 with A symmetric and T fully symmetric, written out."""

    def __init__(self, d, seed=0):
        rng = np.random.default_rng(seed)
        self.b = rng.normal(size=d)
        a = rng.normal(size=(d, d))
        self.a = (a + a.T) / 2
        t = rng.normal(size=(d, d, d))
        orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
        self.t = sum(t.transpose(order) for order in orders) / 6

    def potential(self, z):
        cubic = np.einsum("ijk,ni,nj,nk->n", self.t, z, z, z)
        return z @ self.b + np.einsum("ni,ij,nj->n", z, self.a, z) / 2 + cubic / 3

    def field(self, z):
        return -(self.b + z @ self.a + np.einsum("ijk,ni,nj->nk", self.t, z, z))


def antisymmetric(d, seed=0):
    a = np.random.default_rng(seed).normal(size=(d, d))
    return (a - a.T) / 2


def dense_curl_free(z, dz, *, rotation=False):
    """Predict by least squares on the gradients of all monomials, one by one, rows and outputs stacked."""
    x = z - z.mean(axis=0)
    n, d = x.shape
    columns = []
    for length in (1, 2, 3):
        for chosen in combinations_with_replacement(range(d), length):
            column = np.zeros((n, d))
            for k in range(d):
                for place in range(length):
                    if chosen[place] == k:
                        column[:, k] += np.prod(x[:, [*chosen[:place], *chosen[place + 1 :]]], axis=1)
            columns.append(column.ravel())
    if rotation:
        for i in range(d):
            for j in range(i):
                column = np.zeros((n, d))
                column[:, i], column[:, j] = x[:, j], -x[:, i]
                columns.append(column.ravel())
    design = np.stack(columns, axis=1)
    design /= np.linalg.norm(design, axis=0) + (np.linalg.norm(design, axis=0) == 0)
    return (design @ np.linalg.lstsq(design, dz.ravel())[0]).reshape(n, d)


@pytest.mark.parametrize("d", [1, 2, 5, 12])
def test_a_planted_potential_is_recovered(d):
    z, planted = anisotropic(3000, d), Cubic(d)
    fit = fit_potential(gram(z, planted.field(z)), tolerance=EXACT)
    scale = np.abs(planted.field(z)).max()
    np.testing.assert_allclose(fit.predict(z), planted.field(z), atol=1e-8 * scale)
    values = planted.potential(z) - planted.potential(z.mean(axis=0)[None])
    np.testing.assert_allclose(fit.potential(z), values, atol=1e-8 * np.abs(values).max())
    np.testing.assert_array_equal(fit.rotation, 0)
    assert fit.residual <= EXACT


def test_a_planted_rotation_is_recovered_beside_a_potential():
    d = 6
    z, planted, turn = anisotropic(3000, d, seed=1), Cubic(d, seed=1), antisymmetric(d)
    field = planted.field(z) + (z - z.mean(axis=0)) @ turn.T
    fit = fit_potential(gram(z, field), antisymmetric=True, tolerance=EXACT)
    np.testing.assert_allclose(fit.rotation, turn, atol=1e-8)
    np.testing.assert_allclose(fit.predict(z), field, atol=1e-8 * np.abs(field).max())
    values = planted.potential(z) - planted.potential(z.mean(axis=0)[None])
    np.testing.assert_allclose(fit.potential(z), values, atol=1e-8 * np.abs(values).max())


def test_a_pure_rotation_of_a_round_cloud_has_no_potential():
    rng = np.random.default_rng(2)
    half = rng.normal(size=(400, 5))
    z = np.vstack([half, -half])
    z = z @ np.linalg.inv(np.linalg.cholesky(np.cov(z.T))).T  # symmetric about 0 and round: A ⊥ every gradient
    turn = antisymmetric(5, seed=2)
    sums = gram(z, z @ turn.T)
    fit = fit_potential(sums, tolerance=EXACT)
    np.testing.assert_allclose(fit.field, 0, atol=1e-10)
    np.testing.assert_allclose(fit_potential(sums, antisymmetric=True).rotation, turn, atol=1e-8)


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("n", [600, 25])  # enough rows, and far fewer than unknowns
def test_mixtures_match_dense_least_squares(n, rotation):
    d = 4
    rng = np.random.default_rng(3)
    z = anisotropic(n, d, seed=3)
    dz = Cubic(d).field(z) + z @ antisymmetric(d).T * 2 + rng.normal(size=(n, d)) + np.tanh(z) * 5
    got = fit_potential(gram(z, dz), antisymmetric=rotation, tolerance=EXACT).predict(z)
    expected = dense_curl_free(z, dz, rotation=rotation)
    np.testing.assert_allclose(got, expected, atol=1e-8 * np.abs(dz).max())


def test_a_coordinate_that_does_not_vary_is_left_alone():
    z = anisotropic(500, 3, seed=4)
    dz = np.column_stack([Cubic(3).field(z), np.full(500, 2.0)])
    z = np.column_stack([z, np.full(500, 7.0)])
    np.testing.assert_allclose(fit_potential(gram(z, dz)).predict(z), dz, atol=1e-7 * np.abs(dz).max())


@pytest.mark.parametrize("share", [1e-4, 1e-8, 1e-16])
def test_nearly_collinear_coordinates(share):
    """An axis too thin for the Gram matrix is left out of the field, which misses its part; nothing else suffers."""
    rng = np.random.default_rng(14)
    z = rng.normal(size=(1000, 4)) * [1, 2, 1, np.sqrt(share)] @ np.linalg.qr(rng.normal(size=(4, 4)))[0] + 3
    matrix = rng.normal(size=(4, 4))
    dz = z @ (matrix + matrix.T)
    missed = 0.0 if share > 1e-5 else 20 * np.sqrt(share)
    np.testing.assert_allclose(fit_potential(gram(z, dz)).predict(z), dz, atol=1e-7 + missed)


def test_axes_are_turned_before_the_search():
    """Where an outlying axis is shared by several coordinates, coordinates as they come take thousands of steps."""
    rng = np.random.default_rng(15)
    z = rng.normal(size=(2000, 8)) * np.geomspace(100, 0.3, 8) @ np.linalg.qr(rng.normal(size=(8, 8)))[0]
    dz = np.tanh(z) + rng.normal(size=z.shape)
    assert fit_potential(gram(z, dz)).iterations < 60


def test_outliers():
    z = anisotropic(800, 4, seed=5)
    z[:16, 1] += 1000 * np.random.default_rng(5).uniform(0.1, 1.0, 16)
    dz = np.tanh(z) + np.random.default_rng(6).normal(size=z.shape)
    got = fit_potential(gram(z, dz)).predict(z)
    np.testing.assert_allclose(got, dense_curl_free(z, dz), atol=1e-7)


def test_few_iterations_suffice():
    """Without the unconstrained inverse as preconditioner it takes some 200."""
    rng = np.random.default_rng(14)
    z = anisotropic(4000, 12, seed=14)
    z[:40, 0] += 300
    dz = np.tanh(z) @ rng.normal(size=(12, 12)) + rng.normal(size=z.shape)
    assert fit_potential(gram(z, dz)).iterations < 70


def test_the_field_is_minus_the_gradient_of_the_potential():
    z = anisotropic(500, 5, seed=7)
    dz = np.random.default_rng(7).normal(size=z.shape) + z @ antisymmetric(5).T
    fit = fit_potential(gram(z, dz), antisymmetric=True)
    at, step = z[:40], 1e-4 * np.eye(5)
    slope = [(fit.potential(at + e) - fit.potential(at - e)) / 2e-4 for e in step]
    field = -np.stack(slope, axis=1) + (at - fit.center) @ fit.rotation.T
    np.testing.assert_allclose(fit.predict(at), field, atol=1e-6)


def test_shifting_the_cloud_shifts_the_fit():
    z = anisotropic(500, 4, seed=8)
    dz = np.random.default_rng(8).normal(size=z.shape) + z @ np.random.default_rng(9).normal(size=(4, 4))
    here, there = fit_potential(gram(z, dz)), fit_potential(gram(z + 50, dz))
    np.testing.assert_allclose(there.predict(z + 50), here.predict(z), atol=1e-8)


def test_rotating_the_cloud_rotates_the_fit():
    """Fails if coordinates are rescaled one by one: being a gradient would not survive it."""
    rng = np.random.default_rng(10)
    z, turn = anisotropic(500, 4, seed=10), np.linalg.qr(rng.normal(size=(4, 4)))[0]
    dz = rng.normal(size=z.shape) + z @ rng.normal(size=(4, 4))
    here, there = fit_potential(gram(z, dz)), fit_potential(gram(z @ turn, dz @ turn))
    np.testing.assert_allclose(there.predict(z @ turn), here.predict(z) @ turn, atol=1e-7)


def test_the_potential_cannot_beat_the_unconstrained_field():
    z = anisotropic(400, 5, seed=11)
    dz = z @ np.random.default_rng(11).normal(size=(5, 5)) + np.random.default_rng(12).normal(size=z.shape)
    sums = gram(z, dz)
    losses = [
        np.sum((dz - fit.predict(z)) ** 2)
        for fit in (fit_polynomial(z, dz), fit_potential(sums, antisymmetric=True), fit_potential(sums))
    ]
    assert losses == sorted(losses)
    assert losses[0] < losses[2]


def test_a_fit_from_a_narrowed_gram_matrix():
    z = anisotropic(500, 6, seed=13)
    dz = np.random.default_rng(13).normal(size=z.shape) + z
    inside, alone = fit_potential(gram(z, dz).narrow(3)), fit_potential(gram(z[:, :3], dz[:, :3]))
    np.testing.assert_allclose(inside.predict(z[:, :3]), alone.predict(z[:, :3]), atol=1e-9)


def test_what_cannot_have_a_potential_is_refused():
    z = anisotropic(50, 3)
    with pytest.raises(InputError, match="degree 2"):
        fit_potential(gram(z, z, degree=1))
    with pytest.raises(InputError, match="as wide as"):
        fit_potential(gram(z, z[:, :2]))
