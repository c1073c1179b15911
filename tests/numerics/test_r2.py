"""The pooled share of explained variance."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.metrics import r2_score

from layerflow.errors import InputError
from layerflow.numerics.r2 import r2, squared_errors, total_square


def test_by_hand_coordinates_are_pooled():
    steps = np.array([[0.0, 0.0], [2.0, 20.0]])
    predicted = np.array([[0.0, 10.0], [2.0, 10.0]])
    # errors 100 + 100, total 2 + 200; the mean of one R2 a coordinate would be 0.5
    assert_allclose(r2(steps, predicted), 1.0 - 200.0 / 202.0)
    assert_array_equal(squared_errors(steps, predicted), [100.0, 100.0])


def test_equals_scikit_learn_weighted_by_variance():
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((50, 4)) * [1.0, 2.0, 5.0, 0.1] + 3.0
    predicted = steps + rng.standard_normal((50, 4))
    assert_allclose(r2(steps, predicted), r2_score(steps, predicted, multioutput="variance_weighted"))


def test_limits():
    steps = np.random.default_rng(1).standard_normal((20, 3))
    assert r2(steps, steps) == 1.0
    assert_allclose(r2(steps, np.tile(steps.mean(axis=0), (20, 1))), 0.0, atol=1e-14)
    assert r2(steps, steps + 10.0) < 0.0


def test_equal_steps_leave_nothing_to_explain():
    steps = np.full((7, 3), 0.1)  # whose mean is not 0.1
    assert total_square(steps) == 0.0
    assert np.isnan(r2(steps, steps + 1.0))


def test_refuses_other_shapes(untyped):
    with pytest.raises(InputError, match="one shape"):
        r2(np.zeros((3, 2)), np.zeros((2, 2)))
