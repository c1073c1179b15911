"""Weights and intervals against a naive loop over resampled rows, and against SciPy."""

import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal

from layerflow.errors import InputError
from layerflow.numerics.bootstrap import (
    mean_interval,
    r2_difference_interval,
    resample_weights,
)
from layerflow.numerics.r2 import r2, squared_errors


def rows_of(weights: np.ndarray) -> np.ndarray:
    """The resample a row of weights stands for."""
    return np.repeat(np.arange(len(weights)), weights.astype(int))


def contest(seed: int, n: int = 60, d: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps with a large mean, and predictions of two contestants."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((n, d)) * [1.0, 3.0, 0.2] + [100.0, -50.0, 7.0]
    return steps, steps + rng.standard_normal((n, d)), steps + 1.3 * rng.standard_normal((n, d))


def test_weights_are_resamples():
    weights = resample_weights(40, 500, np.random.default_rng(0))
    assert weights.shape == (500, 40)
    assert weights.dtype == np.float64
    assert_array_equal(weights.sum(axis=1), 40.0)
    assert_array_equal(weights, np.round(weights))
    # Multinomial counts: mean 1, variance 1 - 1/n, covariance -1/n; 20,000 entries.
    assert abs(weights.var() - (1 - 1 / 40)) < 5 * np.sqrt(2.0 / weights.size)
    assert np.abs(weights.mean(axis=0) - 1.0).max() < 5 / np.sqrt(500)


def test_weights_follow_the_generator():
    first, again, other = (resample_weights(9, 4, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_mean_interval_equals_a_naive_loop():
    rng = np.random.default_rng(2)
    values = rng.standard_normal((80, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, -1.0]
    weights = resample_weights(80, 300, rng)
    interval = mean_interval(values, weights)
    means = np.array([values[rows_of(row)].mean(axis=0) for row in weights])
    assert_allclose(interval.estimate, values.mean(axis=0))
    assert_allclose(interval.low, np.percentile(means, 2.5, axis=0))
    assert_allclose(interval.high, np.percentile(means, 97.5, axis=0))
    narrow = mean_interval(values, weights, level=0.5)
    assert (narrow.high - narrow.low < interval.high - interval.low).all()


def test_r2_difference_equals_a_naive_loop():
    steps, ours, theirs = contest(3)
    weights = resample_weights(len(steps), 300, np.random.default_rng(4))
    interval = r2_difference_interval(
        steps, squared_errors(steps, ours)[:, None], squared_errors(steps, theirs)[:, None], weights
    )
    resampled = []
    for row in weights:
        index = rows_of(row)
        resampled.append(r2(steps[index], ours[index]) - r2(steps[index], theirs[index]))
    assert_allclose(interval.estimate, [r2(steps, ours) - r2(steps, theirs)], rtol=1e-10)
    assert_allclose(interval.low, [np.percentile(resampled, 2.5)], rtol=1e-9)
    assert_allclose(interval.high, [np.percentile(resampled, 97.5)], rtol=1e-9)


def test_contests_side_by_side_equal_one_at_a_time():
    steps, ours, theirs = contest(5)
    weights = resample_weights(len(steps), 50, np.random.default_rng(6))
    a, b = squared_errors(steps, ours), squared_errors(steps, theirs)
    both = r2_difference_interval(steps, np.column_stack([a, b]), np.column_stack([b, a]), weights)
    assert_allclose(both.estimate[0], -both.estimate[1])
    one = r2_difference_interval(steps, b[:, None], a[:, None], weights)
    assert_allclose([both.low[1], both.high[1]], [one.low[0], one.high[0]])


def test_agrees_with_scipy_within_resampling_error():
    steps, ours, theirs = contest(7)
    rng = np.random.default_rng(8)
    weights = resample_weights(len(steps), 4_000, rng)
    interval = r2_difference_interval(
        steps, squared_errors(steps, ours)[:, None], squared_errors(steps, theirs)[:, None], weights
    )

    def difference(index: np.ndarray) -> float:
        return r2(steps[index], ours[index]) - r2(steps[index], theirs[index])

    oracle = scipy.stats.bootstrap(
        (np.arange(len(steps)),), difference, n_resamples=4_000, method="percentile", vectorized=False, rng=rng
    )
    # A percentile of B resamples has standard error sqrt(p (1 - p) / B) / density.
    spread = oracle.standard_error
    tail_density = scipy.stats.norm.pdf(scipy.stats.norm.ppf(0.025)) / spread
    tolerance = 5 * np.sqrt(2) * np.sqrt(0.025 * 0.975 / 4_000) / tail_density
    assert abs(interval.low[0] - oracle.confidence_interval.low) < tolerance
    assert abs(interval.high[0] - oracle.confidence_interval.high) < tolerance


def test_coverage_of_the_mean():
    rng = np.random.default_rng(9)
    values = rng.standard_normal((100, 400))  # 400 experiments side by side, truth 0
    interval = mean_interval(values, resample_weights(100, 400, rng))
    covered = ((interval.low < 0.0) & (interval.high > 0.0)).mean()
    assert abs(covered - 0.95) < 0.01 + 4 * np.sqrt(0.95 * 0.05 / 400)


def test_a_far_mean_costs_no_digits():
    steps, ours, theirs = contest(10)
    weights = resample_weights(len(steps), 50, np.random.default_rng(11))
    a, b = squared_errors(steps, ours)[:, None], squared_errors(steps, theirs)[:, None]
    near, far = (r2_difference_interval(shifted, a, b, weights) for shifted in (steps, steps + 1e8))
    assert_allclose([far.low, far.high, far.estimate], [near.low, near.high, near.estimate], rtol=1e-6)


def test_a_resample_of_equal_steps_has_no_r2():
    rng = np.random.default_rng(12)
    for _ in range(50):
        steps, errors = rng.standard_normal((3, 2)), rng.uniform(size=(3, 1))
        for weights in 3.0 * np.eye(3):
            assert np.isnan(r2_difference_interval(steps, errors, 2.0 * errors, weights[None]).low[0])


def test_equal_steps_give_no_interval():
    steps = np.full((10, 2), 0.1)
    errors = np.arange(10.0)[:, None]
    weights = resample_weights(10, 20, np.random.default_rng(0))
    interval = r2_difference_interval(steps, errors, errors + 1.0, weights)
    assert np.isnan([interval.estimate[0], interval.low[0], interval.high[0]]).all()


def test_refusals(untyped):
    weights = resample_weights(5, 3, np.random.default_rng(0))
    with pytest.raises(InputError, match="at least 1"):
        resample_weights(0, 10, np.random.default_rng(0))
    with pytest.raises(InputError, match="values holds 4 rows"):
        mean_interval(np.zeros((4, 1)), weights)
    with pytest.raises(InputError, match="non-finite"):
        mean_interval(np.full((5, 1), np.nan), weights)
    with pytest.raises(InputError, match=r"is 1\.0"):
        mean_interval(np.zeros((5, 1)), weights, level=1.0)
    with pytest.raises(InputError, match="errors holds 4"):
        r2_difference_interval(np.zeros((5, 2)), np.zeros((4, 1)), np.zeros((5, 1)), weights)
