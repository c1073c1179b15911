import numpy as np
import pytest

from layerflow.analysis.cloud import MAX_TOKENS, cloud_points

HOSTILE = np.array(["<script>", "\u202e", "", "=1+1"], dtype=object)


@pytest.fixture
def reduced():
    return np.random.default_rng(0).standard_normal((3, 4, 5))


def test_every_token_of_a_small_cloud_is_there_at_every_state(reduced):
    counts = np.array([5, 6, 7, 8])
    points = cloud_points(reduced, counts, HOSTILE, rng=np.random.default_rng(0))
    assert [(point.state, point.row) for point in points] == [(state, row) for state in range(3) for row in range(4)]
    for point in points:
        assert (point.x, point.y) == tuple(reduced[point.state, point.row, :2])
        assert (point.count, point.text) == (counts[point.row], HOSTILE[point.row])


def test_a_large_cloud_is_sampled_once_for_all_states():
    n = MAX_TOKENS + 500
    rng = np.random.default_rng(1)
    reduced = rng.standard_normal((2, n, 2))
    tokens = np.array([f"token {row}" for row in range(n)], dtype=object)
    points = cloud_points(reduced, np.arange(n), tokens, rng=np.random.default_rng(2))
    by_state = [[point for point in points if point.state == state] for state in (0, 1)]
    rows = [point.row for point in by_state[0]]
    assert rows == [point.row for point in by_state[1]]
    assert len(rows) == len(set(rows)) == MAX_TOKENS
    assert rows == sorted(rows)
    assert all(point.text == f"token {point.row}" and point.count == point.row for point in points)
    # Uniform: the mean of 2,000 rows out of n, drawn without replacement.
    error = n / np.sqrt(12 * MAX_TOKENS) * np.sqrt(1 - MAX_TOKENS / n)
    assert np.mean(rows) == pytest.approx((n - 1) / 2, abs=4 * error)


def test_the_sample_is_the_generator_s():
    n = MAX_TOKENS + 1
    reduced, counts = np.zeros((2, n, 2)), np.ones(n, np.int64)
    tokens = np.full(n, "a", dtype=object)

    def rows(seed):
        return [point.row for point in cloud_points(reduced, counts, tokens, rng=np.random.default_rng(seed))]

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)


def test_values_are_plain_numbers(reduced):
    """They go into tables, where NumPy's own scalars do not always fit."""
    point = cloud_points(reduced, np.array([5, 6, 7, 8]), HOSTILE, rng=np.random.default_rng(0))[0]
    values = (point.state, point.row, point.x, point.y, point.count, point.text)
    assert [type(value) for value in values] == [int, int, float, float, int, str]
