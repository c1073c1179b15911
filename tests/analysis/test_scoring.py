import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.metrics import r2_score
from tests.flows import rotation

from layerflow.analysis.scoring import HeldOut, LawContest, Setting, contests, hold_out, scores, split
from layerflow.errors import InputError
from layerflow.laws.drift import PolynomialDrift
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import FullNoise
from layerflow.numerics.bootstrap import resample_weights

D = 5
SETTING = Setting(n_components=D, seed=3, transition=7)

# SPEC section 5, and the two richer-noise contests of the paper's Table 1.
CONTESTS = {
    ("km", "local_diagonal", "affine", "diagonal"),
    ("km", "local_full", "affine", "full"),
    ("quadratic", "diagonal", "affine", "diagonal"),
    ("quadratic", "full", "affine", "full"),
    ("km", "local_diagonal", "null_a", "diagonal"),
    ("km", "local_diagonal", "null_b", "diagonal"),
    ("km", "local_full", "null_c", "full"),
    ("affine", "full", "km", "local_diagonal"),
    ("null_c", "full", "km", "local_diagonal"),
}
NOISES = {
    "km": ("local_diagonal", "local_full"),
    "affine": ("diagonal", "full"),
    "quadratic": ("diagonal", "full"),
    "null_a": ("diagonal",),
    "null_b": ("diagonal",),
    "null_c": ("full",),
    "rotation_stretch": ("isotropic",),
}


@pytest.fixture(scope="module")
def law():
    """An Ornstein–Uhlenbeck law whose matrix and noise are anisotropic and do not commute."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((D, D)) / 4 - 0.3 * np.eye(D)
    axes = rotation(D, rng)
    covariance = axes * np.geomspace(2.0, 0.05, D) @ axes.T
    assert np.linalg.norm(matrix @ covariance - covariance @ matrix) > 0.3
    return GaussianLaw(PolynomialDrift.affine(rng.standard_normal(D), matrix), FullNoise(covariance))


def random_entries(rng: np.random.Generator, m: int) -> list[HeldOut]:
    """Errors and densities of every law, correlated over tokens as real ones are."""
    hard = rng.gamma(2.0, size=m)
    return [
        HeldOut(name, noise, hard * rng.gamma(5.0, size=m), -hard + rng.standard_normal(m))
        for name, noises in NOISES.items()
        for noise in noises
    ]


@pytest.mark.parametrize(("n_tokens", "seed"), [(6, 0), (101, 1), (25_268, 2)])
def test_a_split_is_the_seeded_permutation_cut_at_four_fifths(n_tokens, seed):
    parts = split(n_tokens, seed)
    order = np.random.default_rng(seed).permutation(n_tokens)
    assert len(parts.train) == n_tokens * 8 // 10
    np.testing.assert_array_equal(np.concatenate([parts.train, parts.test]), order)
    assert parts.seed == seed


def test_too_few_tokens_cannot_be_split():
    with pytest.raises(InputError, match=r"5 tokens are too few .* at least 6"):
        split(5, 0)


def test_held_out_densities_and_errors_are_those_of_the_law(law):
    rng = np.random.default_rng(1)
    z, dz = rng.standard_normal((2, 40, D)) * 3
    held_out = hold_out(law.at(z), dz, law="affine", noise="full")
    drift = law.drift(z)
    expected = [
        multivariate_normal(mean, law.noise.covariance).logpdf(step) for mean, step in zip(drift, dz, strict=True)
    ]
    np.testing.assert_allclose(held_out.log_density, expected, rtol=1e-12)
    np.testing.assert_allclose(held_out.errors, ((dz - drift) ** 2).sum(axis=1), rtol=1e-12)


def test_the_law_that_drew_the_steps_scores_its_own_entropy(law):
    rng = np.random.default_rng(2)
    m = 20_000
    z = rng.standard_normal((m, D)) * np.geomspace(3, 0.5, D)
    dz = law.step(z, rng) - z
    (score,) = scores([hold_out(law.at(z), dz, law="affine", noise="full")], dz, SETTING, n_train=11)
    entropy = multivariate_normal(np.zeros(D), law.noise.covariance).entropy()
    # The log-density of a Gaussian's own draw has variance d/2.
    assert score.log_likelihood == pytest.approx(-entropy, abs=4 * np.sqrt(D / 2 / m))
    drift = law.drift(z)
    explained = drift.var(axis=0).sum()
    share = explained / (explained + np.trace(law.noise.covariance))
    assert score.r2 == pytest.approx(share, abs=4 / np.sqrt(m))
    assert 0.2 < share < 0.9
    assert (score.n_components, score.seed, score.transition, score.law, score.noise) == (D, 3, 7, "affine", "full")
    assert (score.n_train, score.n_test) == (11, m)


def test_r2_pools_coordinates(law):
    rng = np.random.default_rng(3)
    z, dz = rng.standard_normal((2, 300, D)) * np.geomspace(5, 0.1, D)
    (score,) = scores([hold_out(law.at(z), dz, law="affine", noise="full")], dz, SETTING, n_train=2)
    assert score.r2 == pytest.approx(r2_score(dz, law.drift(z), multioutput="variance_weighted"), rel=1e-10)
    assert score.r2 != pytest.approx(r2_score(dz, law.drift(z)), rel=1e-3)


def test_predicting_the_mean_of_the_held_out_steps_scores_zero():
    dz = np.random.default_rng(4).standard_normal((50, D)) + 100.0
    entry = HeldOut("null_a", "diagonal", ((dz - dz.mean(axis=0)) ** 2).sum(axis=1), np.zeros(50))
    (score,) = scores([entry], dz, SETTING, n_train=2)
    assert score.r2 == pytest.approx(0.0, abs=1e-12)


def test_equal_steps_leave_r2_undefined():
    (score,) = scores([HeldOut("km", "local_full", np.ones(4), np.zeros(4))], np.ones((4, D)), SETTING, n_train=2)
    assert np.isnan(score.r2)


def one_by_one(entries: list[HeldOut], dz: np.ndarray, weights: np.ndarray) -> dict[tuple[str, ...], list[float]]:
    """Every contest's two differences in every resample, by repeating rows and scoring them again."""
    held_out = {(entry.law, entry.noise): entry for entry in entries}
    drawn: dict[tuple[str, ...], list[float]] = {}
    for counts in weights.astype(int):
        rows = np.repeat(np.arange(len(dz)), counts)
        total = ((dz[rows] - dz[rows].mean(axis=0)) ** 2).sum()
        for pair in CONTESTS:
            first, second = held_out[pair[:2]], held_out[pair[2:]]
            r2 = (1 - first.errors[rows].sum() / total) - (1 - second.errors[rows].sum() / total)
            drawn.setdefault((*pair, "r2"), []).append(r2)
            nats = first.log_density[rows].mean() - second.log_density[rows].mean()
            drawn.setdefault((*pair, "log_likelihood"), []).append(nats)
    return drawn


def key(row: LawContest) -> tuple[str, ...]:
    return (row.law, row.noise, row.opponent, row.opponent_noise, row.metric)


def test_contests_are_paired_bootstraps_done_one_resample_at_a_time():
    rng = np.random.default_rng(5)
    m = 120
    entries = random_entries(rng, m)
    dz = rng.standard_normal((m, D)) * np.geomspace(4, 0.3, D) + 50.0
    weights = resample_weights(m, 200, rng)
    rows = contests(entries, dz, weights, SETTING)
    whole, drawn = one_by_one(entries, dz, np.ones((1, m))), one_by_one(entries, dz, weights)
    assert sorted(map(key, rows)) == sorted(drawn)
    for row in rows:
        assert row.difference == pytest.approx(whole[key(row)][0], rel=1e-9)
        assert (row.low, row.high) == pytest.approx(tuple(np.percentile(drawn[key(row)], [2.5, 97.5])), rel=1e-9)
        assert (row.n_components, row.seed, row.transition) == (D, 3, 7)


def test_a_contest_is_the_difference_of_the_two_scores():
    rng = np.random.default_rng(6)
    entries, dz = random_entries(rng, 80), rng.standard_normal((80, D))
    by_law = {(score.law, score.noise): score for score in scores(entries, dz, SETTING, n_train=2)}
    for row in contests(entries, dz, resample_weights(80, 10, rng), SETTING):
        first, second = by_law[row.law, row.noise], by_law[row.opponent, row.opponent_noise]
        assert row.difference == pytest.approx(getattr(first, row.metric) - getattr(second, row.metric), abs=1e-12)


def test_the_better_law_wins():
    rng = np.random.default_rng(7)
    dz = rng.standard_normal((200, D))
    better = HeldOut("quadratic", "full", np.full(200, 1.0), rng.standard_normal(200) + 1.0)
    worse = HeldOut("affine", "full", np.full(200, 2.0), rng.standard_normal(200))
    for row in contests([worse, better], dz, resample_weights(200, 500, rng), SETTING):
        assert (row.law, row.opponent) == ("quadratic", "affine")
        assert 0 < row.low < row.difference < row.high


def test_pairing_narrows_the_interval():
    """Two laws that fail at the same tokens differ by little, however much the tokens differ."""
    rng = np.random.default_rng(8)
    hard = 100 * rng.gamma(1.0, size=300)
    entries = [HeldOut("quadratic", "full", hard, -hard), HeldOut("affine", "full", hard + 1, -hard - 1)]
    rows = contests(entries, rng.standard_normal((300, D)), resample_weights(300, 200, rng), SETTING)
    nats = next(row for row in rows if row.metric == "log_likelihood")
    assert (nats.low, nats.high) == pytest.approx((1.0, 1.0), abs=1e-9)


def test_contests_of_a_law_that_was_not_fitted_are_left_out():
    rng = np.random.default_rng(9)
    entries = [entry for entry in random_entries(rng, 30) if entry.law != "quadratic"]
    rows = contests(entries, rng.standard_normal((30, D)), resample_weights(30, 5, rng), SETTING)
    assert {key(row)[:4] for row in rows} == {pair for pair in CONTESTS if "quadratic" not in pair}
    assert contests(entries[:1], rng.standard_normal((30, D)), resample_weights(30, 5, rng), SETTING) == []
