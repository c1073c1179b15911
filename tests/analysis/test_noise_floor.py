import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.special import gammaln

from layerflow.analysis import noise_floor as module
from layerflow.analysis.noise_floor import NoiseFloorRow, mean_pair_distance, noise_floor
from layerflow.data.trajectories import Halves
from layerflow.errors import InputError


def halves_of(a, b, count_a, count_b):
    return Halves(np.asarray(a, float), np.asarray(b, float), np.asarray(count_a), np.asarray(count_b))


def test_by_hand():
    # Final states on a line at 0, 3, 6: distances 3, 3 and 6, mean 4.
    final = np.array([[0.0, 0.0], [3.0, 0.0], [6.0, 0.0]])
    halves = halves_of([[0, 2], [3, 0], [6, 4]], [[0, -2], [3, 0], [6, -4]], [2, 3, 25], [3, 2, 25])
    rows = noise_floor(final, halves, np.array([5, 5, 50]), np.random.default_rng(0))
    # Half the distance between halves: 2, 0 and 4.
    assert rows == [
        NoiseFloorRow(5, 5, 2, 0.25),
        NoiseFloorRow(10, 100, 1, 1.0),
        NoiseFloorRow(1001, None, 0, None),
    ]


def test_a_token_without_one_half_is_not_measured():
    final = np.array([[0.0], [4.0], [8.0]])
    halves = halves_of([[1.0], [0.0], [8.5]], [[-1.0], [4.0], [7.5]], [3, 0, 700], [2, 5, 600])
    five, middle, many = noise_floor(final, halves, np.array([5, 5, 1300]), np.random.default_rng(0))
    assert (five.n_tokens, five.ratio) == (1, pytest.approx(1.0 / (16 / 3)))
    assert (middle.n_tokens, middle.ratio) == (0, None)
    assert (many.n_tokens, many.ratio) == (1, pytest.approx(0.5 / (16 / 3)))


def test_frequencies_between_the_bands_belong_to_none():
    final = np.arange(4.0)[:, None]
    halves = halves_of(final, final + 1, np.full(4, 2), np.full(4, 2))
    rows = noise_floor(final, halves, np.array([4, 6, 101, 1000]), np.random.default_rng(0))
    assert [row.n_tokens for row in rows] == [0, 0, 0]


def test_planted_noise_is_recovered():
    """Means of c draws of N(μ, σ²) in D dimensions are off by σ/sqrt(c) times a chi variable's mean."""
    rng = np.random.default_rng(0)
    n, width, sigma, count = 4000, 6, 0.7, 10
    centre = 3.0 * rng.standard_normal((n, width))
    halves = [centre + sigma / np.sqrt(count / 2) * rng.standard_normal((n, width)) for _ in range(2)]
    final = (halves[0] + halves[1]) / 2
    counts, half = np.full(n, count), np.full(n, count // 2)
    row = noise_floor(final, halves_of(*halves, half, half), counts, rng)[1]

    chi = np.sqrt(2) * np.exp(gammaln((width + 1) / 2) - gammaln(width / 2))
    noise = sigma / np.sqrt(count) * chi
    distance = np.sqrt(2 * (9 + sigma**2 / count)) * chi
    relative_error = np.sqrt((width / chi**2 - 1) * (1 / n + 1 / module.MAX_PAIRS) + 0.5 / (n * width))
    assert row.n_tokens == n
    assert row.ratio == pytest.approx(noise / distance, rel=5 * relative_error)


def test_pairs_are_exact_while_they_are_few():
    points = np.random.default_rng(0).standard_normal((600, 3))
    drawn = np.random.default_rng(1)
    assert mean_pair_distance(points, drawn) == pytest.approx(pdist(points).mean(), rel=1e-12)
    assert drawn.random() == np.random.default_rng(1).random()


def test_random_pairs_agree_with_all_pairs():
    points = np.random.default_rng(0).standard_normal((1500, 3)) * [5.0, 1.0, 0.2]
    distances = pdist(points)
    assert len(distances) > module.MAX_PAIRS
    error = distances.std() / np.sqrt(module.MAX_PAIRS)
    measured = mean_pair_distance(points.astype(np.float32), np.random.default_rng(2))
    assert measured == pytest.approx(distances.mean(), abs=4 * error)
    # A pair of one token with itself would bring the mean down.
    assert mean_pair_distance(np.eye(700), np.random.default_rng(3)) == pytest.approx(np.sqrt(2), rel=1e-12)


def test_the_same_seed_gives_the_same_floor():
    rng = np.random.default_rng(0)
    final = rng.standard_normal((900, 4))
    halves = halves_of(final + 0.1, final - 0.2, np.full(900, 4), np.full(900, 4))
    counts = np.full(900, 20)
    first, second = (noise_floor(final, halves, counts, np.random.default_rng(7)) for _ in range(2))
    assert first == second


def test_no_ratio_where_no_two_tokens_differ():
    for n in (1, 3):
        final = np.ones((n, 2))
        halves = halves_of(final, final, np.ones(n, int), np.ones(n, int))
        rows = noise_floor(final, halves, np.full(n, 5), np.random.default_rng(0))
        assert (rows[0].n_tokens, rows[0].ratio) == (n, None)


@pytest.mark.usefixtures("untyped")
def test_lengths_that_differ_are_refused():
    final = np.zeros((3, 2))
    halves = halves_of(final[:2], final[:2], [1, 1], [1, 1])
    with pytest.raises(InputError, match="3 final states, halves of 2 and 2 and 3 counts"):
        noise_floor(final, halves, np.ones(3, int), np.random.default_rng(0))
