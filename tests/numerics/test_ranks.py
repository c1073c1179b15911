"""Rank correlations against SciPy, with and without ties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import spearmanr

from layerflow.errors import InputError
from layerflow.numerics.ranks import spearman, spearman_rows


@given(
    x=st.lists(st.integers(-3, 3), min_size=2, max_size=40),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_equals_scipy_with_ties(x, data):
    y = data.draw(st.lists(st.integers(-3, 3), min_size=len(x), max_size=len(x)))
    ours = spearman(np.array(x), np.array(y, dtype=float))
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert np.isnan(ours)
    else:
        assert_allclose(ours, spearmanr(x, y).statistic, atol=1e-14)


def test_rows_equal_scipy():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 200))
    b = np.round(a + rng.standard_normal((5, 200)), 1)
    expected = [spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    assert_allclose(spearman_rows(a, b), expected, atol=1e-14)


def test_invariant_under_monotone_maps_and_bounded():
    x = np.random.default_rng(1).standard_normal(100)
    assert spearman(x, np.exp(x)) == 1.0
    assert spearman(x, -(x**3)) == -1.0


def test_refusals(untyped):
    with pytest.raises(InputError, match="one shape"):
        spearman_rows(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(InputError, match="at least 2"):
        spearman(np.zeros(1), np.zeros(1))
    with pytest.raises(InputError, match="non-finite"):
        spearman(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
