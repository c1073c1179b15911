import numpy as np
import pytest
from scipy.stats import norm
from sklearn.neighbors import NearestNeighbors

from layerflow.analysis.gradient import density_direction, energy_share, gradient_row, mean_cosine, unit_rows
from layerflow.analysis.shuffle import derangement
from layerflow.errors import InputError
from layerflow.numerics.bootstrap import resample_weights
from layerflow.numerics.neighbors import nearest

N, D = 3_000, 6


def _covariance(rng: np.random.Generator, *, condition: float = 10.0) -> np.ndarray:
    axes, _ = np.linalg.qr(rng.standard_normal((D, D)))
    return (axes * np.geomspace(1.0, 1.0 / condition, D)) @ axes.T


@pytest.fixture(scope="module")
def cloud() -> dict[str, np.ndarray]:
    """An anisotropic Gaussian off the origin, its directions and its exact score."""
    rng = np.random.default_rng(0)
    covariance = _covariance(rng)
    mean = 3.0 * rng.standard_normal(D)
    z = rng.multivariate_normal(mean, covariance, size=N)
    direction = density_direction(z, nearest(z, 48).indices)
    return {"z": z, "direction": direction, "score": -np.linalg.solve(covariance, (z - mean).T).T}


def _row(direction: np.ndarray, steps: np.ndarray, *, n_resamples: int = 400):
    weights = resample_weights(len(steps), n_resamples, np.random.default_rng(7))
    return gradient_row(direction, steps, weights, transition=0, subject="flow")


def test_direction_is_the_mean_of_the_other_neighbours_minus_the_state(cloud: dict[str, np.ndarray]) -> None:
    z = cloud["z"]
    found = NearestNeighbors(n_neighbors=49, algorithm="brute").fit(z).kneighbors(z, return_distance=False)
    np.testing.assert_allclose(cloud["direction"], z[found[:, 1:]].mean(axis=1) - z, atol=1e-12)


def test_direction_at_some_states_is_that_of_the_whole(cloud: dict[str, np.ndarray]) -> None:
    z = cloud["z"]
    some = density_direction(z, nearest(z, 48).indices[:7], at=z[:7])
    np.testing.assert_array_equal(some, cloud["direction"][:7])


def test_direction_points_up_the_density(cloud: dict[str, np.ndarray]) -> None:
    assert mean_cosine(cloud["direction"], cloud["score"]) > 0.85


def test_row_agrees_with_a_direct_computation(cloud: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(1)
    g = cloud["direction"]
    steps = cloud["score"] + 2.0 * rng.standard_normal((N, D)) + np.array([3.0, 0, 0, 0, 0, 1.0])
    row = _row(g, steps)
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(g, steps, strict=True)]
    along = [float(b @ a / np.linalg.norm(a)) for a, b in zip(g, steps, strict=True)]
    assert row.alignment == pytest.approx(np.mean(cosines), abs=1e-12)
    assert row.energy_share == pytest.approx(np.sum(np.square(along)) / np.sum(steps**2), abs=1e-12)
    assert row.gap == pytest.approx(row.alignment - row.shuffled, abs=1e-15)
    assert (row.n_components, row.transition, row.subject) == (D, 0, "flow")


def test_shuffled_is_the_mean_over_all_pairings_and_sampled_shuffles_scatter_around_it(
    cloud: dict[str, np.ndarray],
) -> None:
    rng = np.random.default_rng(2)
    g, steps = cloud["direction"][:40] + 0.3, cloud["score"][:40] + 2.0
    cosines = unit_rows(g) @ unit_rows(steps).T
    off_diagonal = cosines[~np.eye(40, dtype=bool)]
    shuffled = _row(g, steps).shuffled
    assert shuffled == pytest.approx(off_diagonal.mean(), abs=1e-14)
    sampled = [np.mean(cosines[np.arange(40), derangement(40, rng)]) for _ in range(400)]
    assert abs(np.mean(sampled) - shuffled) < 4 * np.std(sampled) / 20


def test_interval_is_that_of_resampled_tokens(cloud: dict[str, np.ndarray]) -> None:
    """Against the bootstrap that resamples tokens and computes the gap anew each time."""
    rng = np.random.default_rng(3)
    n = 500
    g, steps = cloud["direction"][:n], cloud["score"][:n] + 3.0 * rng.standard_normal((n, D)) + 1.0
    row = _row(g, steps, n_resamples=2_000)
    u, s = unit_rows(g), unit_rows(steps)
    gaps = []
    for _ in range(2_000):
        drawn = rng.integers(n, size=n)
        a, b = u[drawn], s[drawn]
        gaps.append(np.einsum("nd,nd->", a - a.mean(0), b - b.mean(0)) / (n - 1))
    low, high = np.quantile(gaps, [0.025, 0.975])
    # A 2.5 % quantile of 2,000 draws has a standard error of about 0.06 standard deviations; both ends are drawn twice.
    tolerance = 4 * np.sqrt(2) * 0.06 * np.std(gaps) + 1 / n
    assert row.low == pytest.approx(low, abs=tolerance)
    assert row.high == pytest.approx(high, abs=tolerance)
    assert row.low < row.gap < row.high


def test_interval_covers_the_true_gap(cloud: dict[str, np.ndarray]) -> None:
    """Steps that know nothing of the direction have a gap of zero, inside 95 % of the intervals."""
    rng = np.random.default_rng(4)
    weights = resample_weights(200, 300, rng)
    covered = 0
    for _ in range(200):
        rows = rng.choice(N, 200, replace=False)
        row = gradient_row(
            cloud["direction"][rows], rng.standard_normal((200, D)) + 0.5, weights, transition=0, subject="flow"
        )
        covered += row.low <= 0.0 <= row.high
    lowest = 200 * 0.95 + norm.ppf(1e-4) * np.sqrt(200 * 0.95 * 0.05) - 5  # percentile intervals run a little short
    assert lowest < covered


def test_an_isotropic_gradient_flow_reads_high(cloud: dict[str, np.ndarray]) -> None:
    assert _row(cloud["direction"], cloud["score"]).gap > 0.5


def test_a_rotation_around_the_density_reads_nothing(cloud: dict[str, np.ndarray]) -> None:
    """Steps A grad log p with A antisymmetric run along the level sets: the gap is zero within its interval."""
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((D, D))
    row = _row(cloud["direction"], cloud["score"] @ (matrix - matrix.T).T)
    # The estimated direction is not quite the score, which lets a few hundredths through.
    assert abs(row.gap) < 0.05


def test_unrelated_steps_share_one_in_d_of_their_energy(cloud: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(6)
    steps = rng.standard_normal((N, D))
    # Each share is Beta(1/2, (d - 1)/2) of its own step.
    error = np.sqrt(2 * (D - 1) / (D**2 * (D + 2)) / N)
    assert energy_share(cloud["direction"], steps) == pytest.approx(1 / D, abs=5 * error)


def test_a_shared_translation_is_seen_by_the_null_too(cloud: dict[str, np.ndarray]) -> None:
    """Directions with a common part and steps with a common part align; the gap does not."""
    g = cloud["direction"] + 2.0
    row = _row(g, np.tile([1.0, 2, 0, 0, 0, 1], (N, 1)))
    assert row.alignment > 0.3
    assert row.gap == pytest.approx(0.0, abs=1e-12)


def test_tokens_without_direction_or_step_count_as_zero() -> None:
    g = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    steps = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 3.0]])
    assert _row(g, steps).alignment == pytest.approx(0.5)
    assert np.isnan(energy_share(g, np.zeros((4, 2))))


def test_bad_input_is_named(cloud: dict[str, np.ndarray]) -> None:
    with pytest.raises(InputError, match="at least 2"):
        _row(np.ones((1, 2)), np.ones((1, 2)))
    with pytest.raises(InputError, match="3000 states and 5 rows"):
        density_direction(cloud["z"], np.zeros((5, 48), dtype=np.int64))
