"""Local moments against naive loops, floors, memory blocks, convergence with the number of tokens."""

import tracemalloc

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import multivariate_normal
from sklearn.neighbors import KNeighborsRegressor

from layerflow.errors import InputError
from layerflow.laws import kramers_moyal
from layerflow.laws.kramers_moyal import KramersMoyalLaw


def cloud(seed: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Anisotropic states, and steps whose mean and covariance both depend on the state."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, d)) * np.geomspace(3.0, 0.3, d)
    mixing = rng.standard_normal((d, d))
    dz = np.sin(z) @ mixing + 0.1 * (1.0 + np.abs(z[:, :1])) * (rng.standard_normal((n, d)) @ mixing.T)
    return z, dz


def naive(z: np.ndarray, dz: np.ndarray, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    near = dz[np.argsort(np.linalg.norm(z - query, axis=1))[:k]]
    covariance = np.cov(near.T, bias=True).reshape(dz.shape[1], dz.shape[1])
    return near.mean(axis=0), np.where(np.eye(dz.shape[1], dtype=bool), covariance, 0.9 * covariance)


@pytest.mark.parametrize("block_bytes", [kramers_moyal.BLOCK_BYTES, 3_000])
@pytest.mark.parametrize(("d", "k"), [(1, 5), (4, 16)])
def test_moments_equal_a_naive_loop(monkeypatch, d, k, block_bytes):
    monkeypatch.setattr(kramers_moyal, "BLOCK_BYTES", block_bytes)
    z, dz = cloud(0, 200, d)
    queries = cloud(1, 17, d)[0]
    diagonal = KramersMoyalLaw(z, dz, k=k).at(queries)
    full = KramersMoyalLaw(z, dz, k=k, noise="local_full").at(queries)
    for row, query in enumerate(queries):
        mean, covariance = naive(z, dz, query, k)
        assert_allclose(diagonal.mean[row], mean, rtol=1e-12, atol=1e-14)
        assert_allclose(full.mean[row], mean, rtol=1e-12, atol=1e-14)
        assert_allclose(diagonal.variance[row], np.diag(covariance), rtol=1e-10)
        assert_allclose(full.covariance[row], covariance, rtol=1e-10, atol=1e-12)


def test_drift_equals_scikit_learn():
    z, dz = cloud(2, 300, 3)
    queries = cloud(3, 40, 3)[0]
    oracle = KNeighborsRegressor(n_neighbors=20, algorithm="brute").fit(z, dz).predict(queries)
    law = KramersMoyalLaw(z, dz, k=20)
    assert_allclose(law.drift(queries), oracle, rtol=1e-10, atol=1e-13)
    assert_allclose(law.at(queries).mean, oracle, rtol=1e-10, atol=1e-13)


def test_a_training_state_is_its_own_neighbour():
    z, dz = cloud(4, 30, 2)
    assert_array_equal(KramersMoyalLaw(z, dz, k=1).drift(z), dz)


@pytest.mark.parametrize("block_bytes", [kramers_moyal.BLOCK_BYTES, 10_000])
def test_both_noise_forms_from_one_pass(monkeypatch, block_bytes):
    monkeypatch.setattr(kramers_moyal, "BLOCK_BYTES", block_bytes)
    z, dz = cloud(5, 400, 5)
    queries, steps = cloud(6, 23, 5)
    law = KramersMoyalLaw(z, dz, k=32)
    scores = law.score_neighbors(law.neighbors(queries), steps)
    full_law = KramersMoyalLaw(z, dz, k=32, noise="local_full")
    assert_allclose(scores.log_density_diagonal, law.log_density(queries, steps), rtol=1e-12)
    assert_allclose(scores.log_density_full, full_law.log_density(queries, steps), rtol=1e-12)
    moments = [naive(z, dz, query, 32) for query in queries]
    expected = [multivariate_normal(m, c).logpdf(s) for (m, c), s in zip(moments, steps, strict=True)]
    assert_allclose(scores.log_density_full, expected, rtol=1e-10)
    expected = [multivariate_normal(m, np.diag(np.diag(c))).logpdf(s) for (m, c), s in zip(moments, steps, strict=True)]
    assert_allclose(scores.log_density_diagonal, expected, rtol=1e-10)
    assert scores.n_floored == 0


def test_a_search_already_made_gives_the_same_law():
    z, dz = cloud(7, 100, 3)
    queries = cloud(8, 9, 3)[0]
    law = KramersMoyalLaw(z, dz, k=10, noise="local_full")
    found = law.at_neighbors(law.neighbors(queries))
    assert_array_equal(found.covariance, law.at(queries).covariance)


def test_variances_are_floored_and_counted():
    z, dz = cloud(9, 200, 3)
    near = np.argsort(np.linalg.norm(z - z[0], axis=1))[:8]
    dz[near, 1] = 0.25 + 1e-9 * np.arange(8)  # next to no spread in coordinate 1 around z[0]
    law = KramersMoyalLaw(z, dz, k=8, noise="local_full")
    moments = law.moments(law.neighbors(z[:1]), full=True)
    floor = 1e-6 * dz[:, 1].var()
    assert moments.n_floored == 1
    assert_allclose(moments.variance[0, 1], floor)
    assert_allclose(moments.covariance[0, 1, 1], floor)
    assert_allclose(moments.covariance[0, [0, 2], [0, 2]], np.var(dz[near][:, [0, 2]], axis=0))
    everywhere = law.moments(law.neighbors(z), full=False)
    assert everywhere.n_floored == np.isclose(everywhere.variance, law.floor, rtol=1e-12).sum() > 0


def test_one_neighbour_floors_every_entry_and_still_has_a_density():
    z, dz = cloud(10, 50, 4)
    law = KramersMoyalLaw(z, dz, k=1, noise="local_full")
    scores = law.score_neighbors(law.neighbors(z), dz)
    assert scores.n_floored == 50 * 4
    assert np.isfinite(scores.log_density_full).all()


def test_as_many_coordinates_as_neighbours_need_no_jitter():
    # k = 64 at d = 64 is rank-deficient by construction; shrinking the off-diagonals cures it.
    z, dz = cloud(11, 300, 64)
    gaussian = KramersMoyalLaw(z, dz, k=64, noise="local_full").at(z[:20])
    raw = np.cov(dz[:64].T, bias=True)
    assert np.linalg.matrix_rank(raw) == 63
    assert_array_equal(gaussian.cholesky.jitter, 0.0)


def test_scoring_holds_memory_in_blocks():
    rng = np.random.default_rng(12)
    z, dz = rng.standard_normal((2, 2_000, 48))
    law = KramersMoyalLaw(z, dz, k=48)
    indices = rng.integers(2_000, size=(4_000, 48))
    tracemalloc.start()
    law.score_neighbors(indices, dz[rng.integers(2_000, size=4_000)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4_000 * 48 * 48 * 8 > 70e6
    assert peak < 4 * kramers_moyal.BLOCK_BYTES


def test_error_falls_with_the_number_of_tokens():
    """Bias ~ (k/n)^(2/d) and variance ~ 1/k: with k ~ n^(2/3) at d = 1 the squared error falls as n^(-2/3) or faster.

    (k/n)^4 + 1/k = n^(-4/3) + n^(-2/3), so the slope of the log error is -2/3.
    """
    rng = np.random.default_rng(13)
    queries = np.linspace(-1.0, 1.0, 400)[:, None]
    sizes = np.array([500, 2_000, 8_000, 32_000])
    errors = []
    for n in sizes:
        squares = []
        for _ in range(6):
            z = rng.uniform(-1.5, 1.5, (n, 1))
            dz = np.sin(3.0 * z) + 0.5 * rng.standard_normal((n, 1))
            law = KramersMoyalLaw(z, dz, k=round(n ** (2 / 3)))
            squares.append(np.mean((law.drift(queries) - np.sin(3.0 * queries)) ** 2))
        errors.append(np.mean(squares))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -0.85 < slope < -0.55


def test_noise_covariance_converges_to_the_truth():
    """Pure noise: local covariances average to C (k - 1) / k on the diagonal, 0.9 of that off it."""
    rng = np.random.default_rng(14)
    n, k = 20_000, 64
    covariance = np.array([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 0.2]])
    z = rng.standard_normal((n, 3))
    dz = rng.multivariate_normal(np.zeros(3), covariance, n)
    law = KramersMoyalLaw(z, dz, k=k, noise="local_full")
    mean = law.at(z[:2_000]).covariance.mean(axis=0)
    shrunk = np.where(np.eye(3, dtype=bool), covariance, 0.9 * covariance) * (k - 1) / k
    # At most all n steps enter; neighbourhoods overlap, so at least n / 10 count as independent.
    variance = np.diag(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / (n / 10))
    assert (np.abs(mean - shrunk) < 4 * error).all()


@pytest.mark.parametrize("noise", ["local_diagonal", "local_full"])
def test_a_step_is_the_state_plus_a_draw_whatever_the_blocks(monkeypatch, noise):
    monkeypatch.setattr(kramers_moyal, "BLOCK_BYTES", 600)  # two states at a time
    z, dz = cloud(15, 100, 3)
    law = KramersMoyalLaw(z, dz, k=10, noise=noise)
    stepped = law.step(z[:5], np.random.default_rng(0))
    assert_array_equal(stepped, z[:5] + law.at(z[:5]).draw(np.random.default_rng(0)))


def test_no_states_give_no_gaussians():
    z, dz = cloud(16, 100, 3)
    law = KramersMoyalLaw(z, dz, k=10, noise="local_full")
    assert law.at_neighbors(np.empty((0, 10), dtype=np.int64)).covariance.shape == (0, 3, 3)


@pytest.mark.parametrize("k", [0, -1, 101])
def test_refuses_a_k_the_data_do_not_allow(k):
    with pytest.raises(InputError, match=f"k is {k}, and it must lie between 1 and the 100 training states"):
        KramersMoyalLaw(*cloud(17, 100, 2), k=k)


def test_refusals(untyped):
    z, dz = cloud(18, 100, 2)
    with pytest.raises(InputError, match="do not pair up"):
        KramersMoyalLaw(z, dz[:-1], k=5)
    with pytest.raises(InputError, match="non-finite"):
        KramersMoyalLaw(np.where(z == z[0], np.nan, z), dz, k=5)
    with pytest.raises(InputError, match="'diagonal'"):
        KramersMoyalLaw(z, dz, k=5, noise="diagonal")
    law = KramersMoyalLaw(z, dz, k=5)
    with pytest.raises(InputError, match=r"shape \(3, 4\)"):
        law.at_neighbors(np.zeros((3, 4), dtype=np.int64))
    with pytest.raises(InputError, match="run from -1 to 0"):
        law.at_neighbors(np.array([[0, 0, 0, 0, -1]]))
    with pytest.raises(InputError, match="non-finite"):
        law.at(np.full((1, 2), np.nan))
    with pytest.raises(InputError, match="without covariances"):
        law.moments(law.neighbors(z), full=False).gaussian("local_full")
