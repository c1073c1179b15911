"""Sinks and norm counts against NumPy's own medians, and in any order of merging."""

import numpy as np
import pytest

from layerflow.data.sinks import NormCounts, find_sinks

MEDIANS = np.array([1.0, 2.0, 3.0])


def test_find_sinks_by_place_and_by_norm() -> None:
    norms = np.array([[1, 11, 1, 1, 1], [2, 2, 19.9, 20.1, 2], [3, 3, 3, 3, 3000]], dtype=np.float32)
    is_first = np.array([True, False, False, False, False])
    # The final state calls no sink.
    assert find_sinks(norms, MEDIANS, is_first).tolist() == [True, True, False, True, False]


def make_norms(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    norms = rng.lognormal(mean=[[0.0], [1.0], [6.0]], sigma=[[0.2], [1.0], [2.0]], size=(3, n)).astype(np.float32)
    return norms, find_sinks(norms, MEDIANS, rng.random(n) < 0.01)


@pytest.mark.parametrize("sinks", [True, False])
def test_table_is_that_of_the_norms(sinks: bool) -> None:
    norms, is_sink = make_norms(5000)
    counts = NormCounts.zeros(3)
    counts.update(norms, is_sink, MEDIANS)
    counted = norms if sinks else norms[:, ~is_sink]
    assert counts.n_sinks == is_sink.sum()
    for state, record in enumerate(counts.table(sinks=sinks)):
        assert record.state == state
        assert record.median == pytest.approx(np.median(counted[state]), rel=2e-3)
        assert record.p99 == pytest.approx(np.quantile(counted[state], 0.99, method="inverted_cdf"), rel=6e-4)
        assert record.maximum == counted[state].max()
        n_over = (norms[state] > 10 * MEDIANS[state]).sum() if sinks and state < 2 else 0
        assert record.n_sinks == n_over


def test_quantiles_of_one_value_are_it() -> None:
    counts = NormCounts.zeros(1)
    counts.update(np.full((1, 7), 4.2, np.float32), np.zeros(7, bool), np.ones(1))
    (record,) = counts.table(sinks=True)
    assert record.median == pytest.approx(4.2, rel=5e-4)
    assert record.median <= record.p99 <= record.maximum


def test_merged_is_direct() -> None:
    norms, is_sink = make_norms(500)
    direct = NormCounts.zeros(3)
    direct.update(norms, is_sink, MEDIANS)
    parts = []
    for part in np.array_split(np.random.default_rng(1).permutation(500), 7):
        parts.append(NormCounts.zeros(3))
        parts[-1].update(norms[:, part], is_sink[part], MEDIANS)
    merged = NormCounts.zeros(3)
    for part in reversed(parts):
        merged.merge(part)
    assert np.array_equal(merged.bins, direct.bins)
    assert merged.table(sinks=True) == direct.table(sinks=True)
    assert merged.table(sinks=False) == direct.table(sinks=False)


def test_norms_out_of_range_are_counted() -> None:
    counts = NormCounts.zeros(1)
    counts.update(np.array([[0.0, 1e-30, 1e30]], np.float32), np.zeros(3, bool), np.ones(1))
    assert counts.bins.sum() == 3
    assert counts.table(sinks=True)[0].maximum == np.float32(1e30)
