"""Streaming = direct, for any chunking and any order of merging."""

import functools

import numpy as np
import pytest
from deeptime.covariance import Covariance
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from layerflow.errors import InputError
from layerflow.numerics.moments import Moments


def rows(seed: int, n: int, offset: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixing = np.array([[3.0, 0.0, 0.0], [1.0, 0.2, 0.0], [-2.0, 0.1, 0.01]])
    return rng.standard_normal((n, 3)) @ mixing.T + offset


@given(
    seed=st.integers(0, 2**16),
    n=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    order=st.randoms(use_true_random=False),
    offset=st.sampled_from([0.0, 1e4]),
    full=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_chunking_and_merge_order(seed, n, cuts, order, offset, full):
    data = rows(seed, n, offset)
    chunks = np.split(data, sorted(min(cut, n) for cut in cuts))
    streamed = functools.reduce(Moments.update, chunks, Moments.empty(3, full=full))
    parts = [Moments.of(chunk, full=full) for chunk in chunks]
    order.shuffle(parts)
    merged = functools.reduce(Moments.merge, parts)
    covariance = np.cov(data.T, bias=True) if n > 1 else np.zeros((3, 3))
    scale = np.abs(covariance).max()
    for moments in (streamed, merged):
        assert moments.count == n
        assert_allclose(moments.mean, data.mean(axis=0), rtol=1e-13, atol=1e-13)
        assert_allclose(moments.variance, np.diag(covariance), rtol=1e-7, atol=1e-11 * scale + 1e-20)
        if full:
            assert_allclose(moments.covariance, covariance, rtol=1e-7, atol=1e-11 * scale + 1e-20)


def test_a_far_mean_costs_no_digits():
    # A difference of raw sums would leave nothing of a variance of 1 on a mean of 1e9.
    data = np.random.default_rng(0).standard_normal((2_000, 3)) + 1e9
    moments = functools.reduce(Moments.update, np.array_split(data, 7), Moments.empty(3))
    assert_allclose(moments.variance, data.var(axis=0), rtol=1e-6)


def test_equals_deeptime():
    data = rows(1, 500, offset=5.0)
    oracle = Covariance(bessels_correction=False, remove_data_mean=True)
    moments = Moments.empty(3)
    for chunk in np.array_split(data, 4):
        oracle.partial_fit(chunk)
        moments = moments.update(chunk)
    model = oracle.fetch_model()
    assert_allclose(moments.mean, model.mean_0, rtol=1e-12)
    assert_allclose(moments.covariance, model.cov_00, rtol=1e-10)


def test_updating_leaves_the_earlier_record_alone():
    first = Moments.of(rows(2, 10))
    mean, scatter = first.mean.copy(), first.scatter.copy()
    second = first.update(rows(3, 10)).merge(first)
    assert second.count == 30
    assert first.count == 10
    assert_array_equal(first.mean, mean)
    assert_array_equal(first.scatter, scatter)


def test_float32_rows_are_summed_in_float64():
    data = (rows(4, 5_000) + 300.0).astype(np.float32)
    moments = Moments.of(data)
    assert moments.mean.dtype == moments.scatter.dtype == np.float64
    assert_allclose(moments.mean, data.astype(np.float64).mean(axis=0), rtol=1e-14)


def test_refusals():
    moments = Moments.of(rows(5, 4))
    with pytest.raises(InputError, match="width 3"):
        moments.update(np.zeros((2, 4)))
    with pytest.raises(InputError, match="non-finite"):
        moments.update(np.array([[1.0, np.nan, 0.0]]))
    with pytest.raises(InputError, match="cannot be merged"):
        moments.merge(Moments.of(rows(5, 4), full=False))
    with pytest.raises(InputError, match="variances only"):
        _ = Moments.of(rows(5, 4), full=False).covariance
    with pytest.raises(InputError, match="no rows"):
        _ = Moments.empty(3).variance
