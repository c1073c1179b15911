import numpy as np
import pytest
from sklearn.preprocessing import PolynomialFeatures

from layerflow.errors import InputError
from layerflow.numerics.polynomial import Scaler, evaluate, features, n_features, pairs, row_blocks


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("degree", [1, 2])
def test_features_are_scikit_learns(d, degree):
    z = np.random.default_rng(d).normal(size=(20, d))
    oracle = PolynomialFeatures(degree).fit_transform(z)
    assert n_features(d, degree) == oracle.shape[1]
    np.testing.assert_array_equal(features(z, degree), oracle)


def test_features_in_their_order():
    np.testing.assert_array_equal(features(np.array([[2.0, 3.0, 5.0]]), 2), [[1, 2, 3, 5, 4, 6, 10, 9, 15, 25]])


def test_pairs_name_the_features():
    z = np.random.default_rng(0).normal(size=(4, 5))
    extended = np.column_stack([np.ones(4), z])
    first, second = pairs(5)
    np.testing.assert_array_equal(features(z, 2), extended[:, first] * extended[:, second])


@pytest.mark.parametrize("degree", [1, 2])
def test_evaluate_is_features_times_coefficients_over_several_blocks(degree):
    rng = np.random.default_rng(1)
    z = rng.normal(size=(5000, 4)).astype(np.float32)
    assert len(row_blocks(len(z))) > 1
    coefficients = rng.normal(size=(n_features(4, degree), 3))
    np.testing.assert_allclose(evaluate(coefficients, z, degree), features(z, degree) @ coefficients, rtol=1e-12)


def test_nothing_evaluates_to_nothing():
    assert evaluate(np.zeros((3, 2)), np.zeros((0, 2)), 1).shape == (0, 2)


@pytest.mark.parametrize("degree", [1, 2])
def test_raw_coefficients_are_the_same_polynomial(degree):
    rng = np.random.default_rng(2)
    z = rng.normal(size=(200, 6)) * np.geomspace(0.01, 100, 6) + np.linspace(-5, 30, 6)
    scaler = Scaler.of(z)
    standard = rng.normal(size=(n_features(6, degree), 4))
    expected = evaluate(standard, scaler(z), degree)
    got = evaluate(scaler.raw_coefficients(standard), z, degree)
    # Raw monomials reach (center / deviation)² ~ 1e6 times the values; what cancels is lost in rounding.
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_scaler_standardises():
    z = np.random.default_rng(3).normal(size=(500, 3)) * [1e-3, 1, 1e3] + [1, 2, 3]
    scaled = Scaler.of(z)(z)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(scaled.std(axis=0), 1, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e9])
def test_a_constant_coordinate_scales_to_zero(value):
    z = np.random.default_rng(4).normal(size=(1000, 2))
    z[:, 1] = value
    scaler = Scaler.of(z)
    assert scaler.inverse[1] == 0
    np.testing.assert_array_equal(scaler(z)[:, 1], 0)


def test_other_degrees_are_refused():
    with pytest.raises(InputError, match="degree is 3"):
        n_features(4, 3)


def test_coefficients_of_another_width_are_refused():
    with pytest.raises(InputError, match=r"3 rows.*4 variables has 5 monomials"):
        evaluate(np.zeros((3, 2)), np.zeros((10, 4)), 1)
