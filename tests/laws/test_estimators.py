"""scikit-learn's own checks, and agreement with the pure functions."""

import logging
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from layerflow.errors import InputError
from layerflow.laws import Affine, KramersMoyal, Quadratic, fit_affine, fit_quadratic
from layerflow.numerics.r2 import r2


@parametrize_with_checks([KramersMoyal(), Affine(), Quadratic()])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def flow(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, 3)) * [3.0, 1.0, 0.3]
    matrix = np.array([[-0.5, 1.0, 0.0], [-1.0, -0.2, 0.3], [0.0, 0.4, -0.9]])
    dz = z @ matrix.T + 0.2 * z[:, :1] * z[:, [1, 2, 0]] + 0.3 * rng.standard_normal((n, 3)) + 5.0
    return z, dz


@pytest.mark.parametrize("estimator", [KramersMoyal(k=10), Affine(), Quadratic()])
def test_score_is_the_pooled_r2(estimator):
    z, dz = flow(0, 300)
    held_out = flow(1, 100)
    fitted = clone(estimator).fit(z, dz)
    predicted = fitted.predict(held_out[0])
    assert_allclose(fitted.score(*held_out), r2(held_out[1], predicted))
    assert_array_equal(predicted, fitted.law_.drift(held_out[0]))
    again = pickle.loads(pickle.dumps(fitted))  # own object, own process
    assert_array_equal(again.predict(held_out[0]), predicted)


def test_affine_predicts_what_scikit_learn_does():
    z, dz = flow(2, 200)
    assert_allclose(Affine().fit(z, dz).predict(z), LinearRegression().fit(z, dz).predict(z), rtol=1e-9)


def test_estimators_are_thin_over_the_functions():
    z, dz = flow(3, 200)
    for estimator, function in ((Affine(noise="full"), fit_affine), (Quadratic(noise="full"), fit_quadratic)):
        fitted, pure = estimator.fit(z, dz), function(z, dz, noise="full")
        assert_array_equal(fitted.law_.drift.coefficients, pure.law.drift.coefficients)
        assert_array_equal(fitted.law_.noise.covariance, pure.law.noise.covariance)
        assert (fitted.rank_, fitted.condition_) == (pure.least_squares.rank, pure.least_squares.condition)


def test_they_work_in_scikit_learn():
    z, dz = flow(4, 200)
    pipeline = make_pipeline(StandardScaler(), Quadratic())
    assert cross_val_score(pipeline, z, dz).min() > 0.9


def test_one_coordinate_comes_back_flat():
    z, dz = flow(5, 50)
    fitted = Affine().fit(z, dz[:, 0])
    assert fitted.predict(z).shape == (50,)
    assert_allclose(fitted.score(z, dz[:, 0]), Affine().fit(z, dz[:, :1]).score(z, dz[:, :1]))


def test_k_beyond_the_data_is_reported(caplog):
    z, dz = flow(6, 20)
    with caplog.at_level(logging.WARNING):
        fitted = KramersMoyal(k=64).fit(z, dz)
    assert fitted.k == 64
    assert fitted.k_ == fitted.law_.k == 20
    assert caplog.messages == ["k = 64 exceeds the 20 training states: all of them are averaged"]
    assert_allclose(fitted.predict(z), np.tile(dz.mean(axis=0), (20, 1)))


def test_refusals(untyped):
    z, dz = flow(7, 20)
    with pytest.raises(InputError, match="k is 0"):
        KramersMoyal(k=0).fit(z, dz)
    with pytest.raises(InputError, match="'local'"):
        KramersMoyal(k=5, noise="local").fit(z, dz)
    with pytest.raises(InputError, match="'local_full'"):
        Affine(noise="local_full").fit(z, dz)
    with pytest.raises(InputError, match=r"steps have shape \(20, 2\)"):
        Affine().fit(z, dz).score(z, dz[:, :2])
    with pytest.raises(InputError, match="20 states and 19 steps"):
        Quadratic().fit(z, dz[1:])
