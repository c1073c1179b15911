from itertools import pairwise

import numpy as np
import pytest

from layerflow.errors import InputError
from layerflow.numerics.gram import gram, training_grams
from layerflow.numerics.polynomial import features


def cloud(n, d, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
    return z, z @ rng.normal(size=(d, d)) + rng.normal(size=(n, d))


def assert_same(a, b, *, rtol=1e-11):
    assert a.count == b.count
    assert a.degree == b.degree
    for name in ("moments", "cross", "steps"):
        left, right = getattr(a, name), getattr(b, name)
        np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * np.abs(right).max(), err_msg=name)


@pytest.mark.parametrize("d", [1, 2, 6, 7, 8, 15, 20])  # on both sides of the groups of eight extended variables
@pytest.mark.parametrize("degree", [1, 2])
def test_it_is_the_normal_equations_of_the_features(d, degree):
    z, dz = cloud(3000, d)
    sums = gram(z, dz, degree=degree)
    design = features(sums.scaler(z), degree)
    steps = dz - dz.mean(axis=0)
    size = len(z) * 1e-13 * np.abs(design).max() ** 2
    np.testing.assert_allclose(sums.matrix(), design.T @ design, atol=size)
    np.testing.assert_allclose(sums.cross, design.T @ steps, atol=size * np.abs(steps).max())
    np.testing.assert_allclose(sums.steps, steps.T @ steps, rtol=1e-10)
    assert sums.count == 3000
    assert sums.width == d


def test_distinct_moments_only_are_stored():
    z, dz = cloud(50, 9)
    assert len(gram(z, dz).moments) == 10 * 11 * 12 * 13 // 24


@pytest.mark.parametrize("degree", [1, 2])
def test_any_chunking_and_order_of_sums_agree(degree):
    z, dz = cloud(5000, 5)
    whole = gram(z, dz, degree=degree)
    edges = [0, 1, 700, 2748, 5000]
    parts = [
        gram(z[a:b], dz[a:b], degree=degree, scaler=whole.scaler, step_center=whole.step_center)
        for a, b in pairwise(edges)
    ]
    assert_same(parts[0] + parts[1] + parts[2] + parts[3], whole)
    assert_same(parts[3] + (parts[1] + parts[0]) + parts[2], whole)
    assert_same(whole - parts[2] - parts[0], parts[1] + parts[3])


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("width", [1, 3, 8, 11])
def test_narrow_is_the_gram_matrix_of_the_first_coordinates(degree, width):
    z, dz = cloud(400, 11)
    narrow = gram(z, dz, degree=degree).narrow(width)
    assert_same(narrow, gram(z[:, :width], dz[:, :width], degree=degree))
    assert narrow.matrix().shape[0] == narrow.cross.shape[0]


def test_the_affine_block_of_a_quadratic_gram_matrix():
    z, dz = cloud(400, 6)
    np.testing.assert_allclose(gram(z, dz).matrix(1), gram(z, dz, degree=1).matrix(), rtol=1e-12, atol=1e-10)


def test_training_grams_are_the_whole_less_the_held_out():
    z, dz = cloud(2500, 6)
    held_out = np.random.default_rng(1).random((3, 2500)) < 0.2
    whole = gram(z, dz)
    for split, got in zip(held_out, training_grams(z, dz, held_out), strict=True):
        part = gram(z[split], dz[split], scaler=whole.scaler, step_center=whole.step_center)
        assert_same(got, whole - part)


def test_a_split_without_training_rows_is_refused():
    z, dz = cloud(10, 2)
    with pytest.raises(InputError, match="holds out every row"):
        training_grams(z, dz, np.array([[True] * 10, [False] * 10]))


def test_different_coordinates_do_not_add():
    z, dz = cloud(100, 3)
    with pytest.raises(InputError, match="same scaler"):
        gram(z[:50], dz[:50]) + gram(z[50:], dz[50:])
    with pytest.raises(InputError, match="degree"):
        gram(z, dz) - gram(z, dz, degree=1)
    with pytest.raises(InputError, match="same scaler"):
        gram(z, dz) + gram(z, dz + 1)


def test_more_than_was_summed_is_refused():
    z, dz = cloud(100, 3)
    with pytest.raises(InputError, match="width is 4"):
        gram(z, dz).narrow(4)
    with pytest.raises(InputError, match="degree is 2"):
        gram(z, dz, degree=1).matrix(2)


def test_non_finite_rows_are_refused():
    z, dz = cloud(100, 3)
    dz[4, 1] = np.inf
    with pytest.raises(InputError, match="1 of 100 steps are not finite"):
        gram(z, dz)
    with pytest.raises(InputError, match="1 of 100 states are not finite"):
        training_grams(dz, z, np.zeros((1, 100), dtype=bool))
