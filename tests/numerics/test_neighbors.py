import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits

from layerflow.errors import InputError
from layerflow.numerics import neighbors as module
from layerflow.numerics.neighbors import nearest, neighbor_means, restrict


def brute(points, queries, k, *, skip_diagonal=False):
    """Float64 distances to everything, sorted by (distance, index)."""
    squared = cdist(queries, points, "sqeuclidean")
    if skip_diagonal:
        np.fill_diagonal(squared, np.inf)
    order = np.argsort(squared, axis=1, kind="stable")[:, :k]
    return order, np.sqrt(np.take_along_axis(squared, order, axis=1))


def anisotropic(rng, n, d):
    return rng.normal(size=(n, d)) * np.geomspace(3.0, 0.1, d) @ np.linalg.qr(rng.normal(size=(d, d)))[0]


def sinks_spread(rng, n, d):
    """Attention sinks: a few states 100 to 1000 times the median norm out, in one dimension."""
    points = anisotropic(rng, n, d)
    points[: n // 50, 0] += np.median(np.linalg.norm(points, axis=1)) * rng.uniform(100, 1000, n // 50)
    return rng.permutation(points)


def sinks_together(rng, n, d):
    """The hard case for float32: the outliers are each other's neighbours, at bulk distances."""
    points = anisotropic(rng, n, d)
    points[: n // 20, -1] += 1000 * np.median(np.linalg.norm(points, axis=1))
    return rng.permutation(points)


def off_centre(rng, n, d):
    return anisotropic(rng, n, d) + 1e6


def tiny_scale(rng, n, d):
    return anisotropic(rng, n, d) * 1e-25


def absurd_outlier(rng, n, d):
    points = anisotropic(rng, n, d)
    points[0, 0] = 1e40
    return points


def lattice(rng, n, d):
    """Ties everywhere, at every distance, 0 included."""
    return rng.integers(0, 3, size=(n, d)).astype(float)


def constant(rng, n, d):
    return np.full((n, d), 2.5)


CLOUDS = [anisotropic, sinks_spread, sinks_together, off_centre, tiny_scale, absurd_outlier, lattice, constant]


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize(("n", "d", "k"), [(700, 6, 20), (1500, 16, 110), (60, 3, 59), (40, 1, 1)])
def test_equals_float64_brute_force(cloud, n, d, k):
    points = cloud(np.random.default_rng(n + d), n, d)
    found = nearest(points, k)
    indices, distances = brute(points, points, k, skip_diagonal=True)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-12)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_equals_float64_brute_force_for_queries(cloud):
    points = cloud(np.random.default_rng(1), 900, 5)
    points, queries = points[:700], points[700:]
    found = nearest(points, 30, queries=queries)
    indices, distances = brute(points, queries, 30)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-12)


def test_equals_scikit_learn():
    points = anisotropic(np.random.default_rng(2), 1000, 16)
    oracle = NearestNeighbors(n_neighbors=110, algorithm="brute").fit(points)
    distances, indices = oracle.kneighbors()
    found = nearest(points, 110)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-9)


def test_a_point_is_its_own_neighbor_when_asked():
    points = anisotropic(np.random.default_rng(3), 200, 4)
    found = nearest(points, 3, exclude_self=False)
    np.testing.assert_array_equal(found.indices[:, 0], np.arange(200))
    np.testing.assert_array_equal(found.distances[:, 0], 0.0)
    np.testing.assert_array_equal(found.indices[:, 1:], nearest(points, 2).indices)


def test_float32_points_are_measured_in_float64():
    points = anisotropic(np.random.default_rng(4), 300, 8).astype(np.float32)
    found = nearest(points, 10)
    np.testing.assert_array_equal(found.distances, nearest(points.astype(np.float64), 10).distances)


def test_only_uncertified_queries_are_searched_again(monkeypatch):
    searched = []
    exact = module._exact
    monkeypatch.setattr(module, "_exact", lambda *given: searched.append(1) or exact(*given))
    nearest(off_centre(np.random.default_rng(5), 2000, 8), 50)
    assert len(searched) == 0
    points = sinks_together(np.random.default_rng(5), 2000, 8)
    far = np.linalg.norm(points - np.median(points, axis=0), axis=1) > 100
    nearest(points, 50)
    assert 0 < len(searched) <= far.sum()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ties_and_small_clouds(data):
    n, d = data.draw(st.integers(2, 60)), data.draw(st.integers(1, 3))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=n * d, max_size=n * d))
    points = np.array(values, dtype=float).reshape(n, d)
    k = data.draw(st.integers(1, n - 1))
    indices, distances = brute(points, points, k, skip_diagonal=True)
    found = nearest(points, k)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-15)
    ks = tuple(sorted(data.draw(st.sets(st.integers(1, n), min_size=1, max_size=3))))
    np.testing.assert_allclose(
        neighbor_means(points, points, points, ks).means, naive_means(points, points, points, ks), atol=1e-12
    )


@pytest.mark.parametrize("k", [5, 40])
def test_restricting_reads_off_the_subset(k):
    rng = np.random.default_rng(6)
    points = sinks_spread(rng, 800, 6)
    members = rng.random(800) < 0.8
    whole = nearest(points, 60)
    for rows in (np.flatnonzero(~members), np.flatnonzero(members), np.arange(800)):
        found = restrict(whole, points, members, k, rows=rows)
        squared = cdist(points[rows], points, "sqeuclidean")
        squared[:, ~members] = np.inf
        squared[np.arange(len(rows)), rows] = np.inf
        order = np.argsort(squared, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(found.indices, order)
        np.testing.assert_allclose(found.distances, np.sqrt(np.take_along_axis(squared, order, axis=1)), rtol=1e-12)


def test_restricting_searches_again_where_the_list_runs_short():
    rng = np.random.default_rng(7)
    points = anisotropic(rng, 500, 4)
    members = rng.random(500) < 0.1
    short = restrict(nearest(points, 20), points, members, 20)
    long = restrict(nearest(points, 499), points, members, 20)
    np.testing.assert_array_equal(short.indices, long.indices)
    np.testing.assert_array_equal(short.distances, long.distances)


def naive_means(points, values, queries, ks):
    order, _ = brute(points, queries, ks[-1])
    return np.stack([values[order[:, :k]].mean(axis=1) for k in ks], axis=1)


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("ks", [(64, 256, 400), (1, 2, 3), (50, 55, 90), (700,), (690, 700)])
def test_means_over_nested_neighborhoods(cloud, ks):
    rng = np.random.default_rng(8)
    points = cloud(rng, 900, 7)
    points, queries, values = points[:700], points[700:], rng.normal(size=(700, 5))
    found = neighbor_means(points, values, queries, ks)
    _, distances = brute(points, queries, ks[-1])
    assert found.ks == ks
    np.testing.assert_allclose(found.distances, distances[:, np.array(ks) - 1], rtol=1e-12)
    np.testing.assert_allclose(found.means, naive_means(points, values, queries, ks), atol=1e-12)


def test_threads_do_not_change_a_bit():
    rng = np.random.default_rng(9)
    points, values = anisotropic(rng, 3000, 16), rng.normal(size=(3000, 16))
    many, mean_many = nearest(points, 30), neighbor_means(points, values, points[:900], (64, 256))
    with threadpool_limits(1):
        one, mean_one = nearest(points, 30), neighbor_means(points, values, points[:900], (64, 256))
    np.testing.assert_array_equal(many.indices, one.indices)
    np.testing.assert_array_equal(many.distances, one.distances)
    np.testing.assert_array_equal(mean_many.means, mean_one.means)


def test_memory_stays_bounded():
    points = np.random.default_rng(10).normal(size=(12_000, 4))
    tracemalloc.start()
    nearest(points, 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    scores = 4 * len(points) ** 2
    assert peak < scores / 8


@pytest.mark.parametrize("k", [0, 10])
def test_k_outside_the_cloud_is_refused(k):
    points = np.zeros((10, 2))
    with pytest.raises(InputError, match=f"k is {k}.*9 points"):
        nearest(points, k)


def test_non_finite_points_are_refused():
    points = np.zeros((10, 2))
    points[3, 1] = np.nan
    with pytest.raises(InputError, match="1 coordinates non-finite"):
        nearest(points, 2)
    with pytest.raises(InputError, match="queries"):
        nearest(np.zeros((10, 2)), 2, queries=points)
    with pytest.raises(InputError, match="beyond"):
        nearest(np.full((10, 2), 1e200), 2)


@pytest.mark.parametrize("ks", [(), (3, 2), (2, 2)])
def test_unordered_ks_are_refused(ks):
    with pytest.raises(InputError, match="ascending"):
        neighbor_means(np.zeros((10, 2)), np.zeros((10, 1)), np.zeros((4, 2)), ks)


@pytest.mark.parametrize("d", [8, 16, 32, 64])
def test_padding_to_whole_groups_is_silent(d):
    """Infinity in the padding met BLAS's own zeros: invalid values at 1,331 points, on real clouds."""
    points = np.random.default_rng(d).standard_normal((1331, d))
    near = NearestNeighbors(n_neighbors=111, algorithm="brute").fit(points).kneighbors(points, return_distance=False)
    np.testing.assert_array_equal(nearest(points, 110).indices, near[:, 1:])
