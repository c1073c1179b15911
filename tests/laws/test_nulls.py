"""Null laws."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from layerflow.errors import InputError
from layerflow.laws.nulls import fit_null_a, fit_null_b, fit_null_c

STEPS = np.random.default_rng(0).standard_normal((2, 40, 3)) @ np.array(
    [[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [-1.0, 0.2, 0.1]]
) + np.array([[[5.0, 0.0, 1.0]], [[-5.0, 1.0, 0.0]]])
Z = np.random.default_rng(1).standard_normal((4, 3))


def test_null_a_is_mean_and_variance_whatever_the_state():
    gaussian = fit_null_a(STEPS[0]).at(Z)
    assert_allclose(gaussian.mean, np.tile(STEPS[0].mean(axis=0), (4, 1)))
    assert_allclose(gaussian.marginal_variance, np.tile(STEPS[0].var(axis=0), (4, 1)))


@pytest.mark.parametrize("form", [np.asarray, list])
def test_null_b_pools_all_transitions(form):
    gaussian = fit_null_b(form(STEPS)).at(Z)
    pooled = STEPS.reshape(-1, 3)
    assert_allclose(gaussian.mean[0], pooled.mean(axis=0))
    assert_allclose(gaussian.marginal_variance[0], pooled.var(axis=0))


def test_null_b_weighs_transitions_by_their_tokens():
    gaussian = fit_null_b([STEPS[0], STEPS[1][:3]]).at(Z)
    assert_allclose(gaussian.mean[0], np.vstack([STEPS[0], STEPS[1][:3]]).mean(axis=0))


def test_null_c_has_the_full_covariance():
    law = fit_null_c(STEPS[0])
    assert_allclose(law.noise.covariance, np.cov(STEPS[0].T, bias=True))
    assert_allclose(law.at(Z).mean, fit_null_a(STEPS[0]).at(Z).mean)


def test_null_c_gains_the_information_in_the_correlations():
    """On its own steps the mean log-density exceeds null A's by -log det(correlation) / 2, exactly."""
    gain = [law.log_density(STEPS[0], STEPS[0]).mean() for law in (fit_null_c(STEPS[0]), fit_null_a(STEPS[0]))]
    expected = -0.5 * np.linalg.slogdet(np.corrcoef(STEPS[0].T))[1]
    assert_allclose(gain[0] - gain[1], expected, rtol=1e-10)


def test_refusals():
    with pytest.raises(InputError, match="no transitions"):
        fit_null_b([])
    with pytest.raises(InputError, match="non-finite"):
        fit_null_a(np.array([[np.inf, 1.0]]))
    with pytest.raises(InputError, match="no rows"):
        fit_null_c(np.empty((0, 3)))
