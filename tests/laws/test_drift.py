"""Drifts built from their parts."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from layerflow.errors import InputError
from layerflow.laws.drift import ConstantDrift, PolynomialDrift

OFFSET = np.array([1.0, -2.0, 0.5])
MATRIX = np.array([[0.1, -2.0, 0.0], [2.0, -0.3, 1.0], [0.0, 4.0, 0.7]])


def test_affine_acts_as_offset_plus_matrix_times_state():
    affine = PolynomialDrift.affine(OFFSET, MATRIX)
    z = np.random.default_rng(0).standard_normal((7, 3))
    assert_allclose(affine(z), np.array([OFFSET + MATRIX @ row for row in z]), rtol=1e-14)
    assert_allclose(affine.offset, OFFSET)
    assert_allclose(affine.matrix, MATRIX)


def test_quadratic_acts_as_its_tensor():
    rng = np.random.default_rng(1)
    tensor = rng.standard_normal((3, 3, 3))  # not symmetric: both halves must count
    quadratic = PolynomialDrift.quadratic(OFFSET, MATRIX, tensor)
    z = rng.standard_normal((50, 3))
    expected = OFFSET + z @ MATRIX.T + np.einsum("cij,ni,nj->nc", tensor, z, z)
    assert_allclose(quadratic(z), expected, rtol=1e-12, atol=1e-13)
    assert_allclose(quadratic.matrix, MATRIX)


def test_quadratic_without_products_is_affine():
    z = np.random.default_rng(2).standard_normal((5, 3))
    quadratic = PolynomialDrift.quadratic(OFFSET, MATRIX, np.zeros((3, 3, 3)))
    assert_allclose(quadratic(z), PolynomialDrift.affine(OFFSET, MATRIX)(z), rtol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 16, 64])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_state_width_is_read_off_the_coefficients(d, degree):
    rows = 1 + d if degree == 1 else (d + 1) * (d + 2) // 2
    assert PolynomialDrift(np.zeros((rows, d)), degree).width == d


def test_constant_drift_steps_the_same_everywhere():
    z = np.random.default_rng(3).standard_normal((4, 3))
    assert_allclose(ConstantDrift(OFFSET)(z), np.tile(OFFSET, (4, 1)))


def test_float32_states_are_computed_in_float64():
    z = np.random.default_rng(4).standard_normal((4, 3)).astype(np.float32)
    steps = PolynomialDrift.affine(OFFSET, MATRIX)(z)
    assert steps.dtype == np.float64
    assert_allclose(steps, OFFSET + z.astype(np.float64) @ MATRIX.T, rtol=1e-14)


def test_refusals():
    with pytest.raises(InputError, match="degree is 3"):
        PolynomialDrift(np.zeros((20, 3)), 3)
    with pytest.raises(InputError, match="7 rows of coefficients fit no state width at degree 2"):
        PolynomialDrift(np.zeros((7, 3)), 2)
    with pytest.raises(InputError, match="states have 2 coordinates and the drift was made for 3"):
        PolynomialDrift.affine(OFFSET, MATRIX)(np.zeros((4, 2)))
