from collections.abc import Iterator

import numpy as np
import pytest
from benchmarks import straightforward
from tests.flows import bent_flow, rotation
from threadpoolctl import threadpool_limits

from layerflow.analysis.scoring import LawScore, Split, split
from layerflow.analysis.transition import SharedSplit, TransitionReport, score_transition
from layerflow.laws.drift import PolynomialDrift
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import FullNoise
from layerflow.laws.nulls import fit_null_b
from layerflow.numerics.bootstrap import resample_weights
from layerflow.numerics.neighbors import nearest

N, D, WIDTHS, SEEDS, K, SWEEP, BUDGET = 700, 8, (4, 8), (0, 4), 32, (32, 128, 560), 150
TRANSITION = 1


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small matrices: a second thread only waits."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module", params=[0.0, 1000.0], ids=["bulk", "outliers"])
def reduced(request: pytest.FixtureRequest) -> np.ndarray:
    return bent_flow(N, D, 3, seed=1, outliers=request.param).astype(np.float64)


def report_of(
    reduced: np.ndarray,
    *,
    transition: int = TRANSITION,
    widths: tuple[int, ...] = WIDTHS,
    seeds: tuple[int, ...] = SEEDS,
    k: int = K,
    k_sweep: tuple[int, ...] = SWEEP,
    budget: int = BUDGET,
    spare: int = 30,
) -> TransitionReport:
    """What `study` does for one transition; ``spare`` is how many neighbours beyond k were searched."""
    n = reduced.shape[1]
    shared = []
    for seed in seeds:
        parts = split(n, seed)
        steps = np.diff(reduced[:, parts.train], axis=0)
        shared.append(
            SharedSplit(
                split=parts,
                budget=Split(seed, parts.train[:budget], parts.test),
                weights=resample_weights(len(parts.test), 20, np.random.default_rng(seed)),
                null_b={width: fit_null_b(steps[:, :, :width]) for width in widths},
            )
        )
    z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
    near = {width: nearest(z[:, :width], min(n - 1, k + spare)) for width in widths}
    return score_transition(z, dz, shared, near, transition=transition, k=k, k_sweep=k_sweep)


@pytest.fixture(scope="module")
def report(reduced: np.ndarray) -> TransitionReport:
    return report_of(reduced)


def test_every_law_scores_what_a_straightforward_computation_gives(reduced, report):
    scores = {(row.n_components, row.seed, row.law, row.noise): row for row in report.scores}
    assert len(scores) == len(report.scores) == len(WIDTHS) * len(SEEDS) * 10
    for width in WIDTHS:
        for seed in SEEDS:
            train, test = straightforward.split(seed, N)
            narrow = reduced[:, :, :width]
            step = narrow[TRANSITION + 1][test] - narrow[TRANSITION][test]
            for (law, noise), told in straightforward.predictions(narrow, TRANSITION, train, test, K).items():
                score = scores[width, seed, law, noise]
                nats = straightforward.log_density(step, told, full="full" in noise).mean()
                assert score.r2 == pytest.approx(straightforward.r_squared(step, told.mean), rel=1e-8, abs=1e-8)
                assert score.log_likelihood == pytest.approx(nats, rel=1e-5, abs=1e-7)
                assert (score.transition, score.n_train, score.n_test) == (TRANSITION, len(train), len(test))


def test_locality_is_what_a_straightforward_computation_gives(reduced, report):
    rows = {(row.n_components, row.seed, row.k): row for row in report.locality}
    assert len(rows) == len(report.locality) == len(WIDTHS) * len(SEEDS) * len(SWEEP)
    for width, seed, k in rows:
        train, test = straightforward.split(seed, N)
        expected = straightforward.locality(reduced[:, :, :width], TRANSITION, train, test, k)
        row = rows[width, seed, k]
        assert row.radius_ratio == pytest.approx(expected["radius_ratio"], rel=1e-10)
        assert row.r2 == pytest.approx(expected["r2"], rel=1e-9, abs=1e-9)


def test_locality_at_k_is_the_scored_law(report):
    km = {(row.n_components, row.seed): row.r2 for row in report.scores if row.law == "km"}
    for row in report.locality:
        if row.k == K:
            assert row.r2 == pytest.approx(km[row.n_components, row.seed], rel=1e-9, abs=1e-9)


def test_all_training_tokens_as_neighbours_predict_null_a(report):
    """At k = n the local mean is the mean."""
    null = {(row.n_components, row.seed): row.r2 for row in report.scores if row.law == "null_a"}
    everyone = [row for row in report.locality if row.k == SWEEP[-1]]
    assert len(everyone) == len(null)
    for row in everyone:
        assert row.r2 == pytest.approx(null[row.n_components, row.seed], rel=1e-9, abs=1e-9)


def test_the_equal_budget_block_trains_on_fewer_of_the_same_tokens(reduced, report):
    rows = {(row.n_components, row.seed, row.law, row.noise): row for row in report.equal_budget}
    assert {key[2] for key in rows} == {"affine", "quadratic"}
    for (width, seed, law, noise), row in rows.items():
        train, test = straightforward.split(seed, N)
        z, after = (reduced[TRANSITION + late][:, :width] for late in (0, 1))
        few, degree = train[:BUDGET], {"affine": 1, "quadratic": 2}[law]
        diagonal, full = straightforward.polynomial(z[few], (after - z)[few], z[test], degree)
        told = full if noise == "full" else diagonal
        nats = straightforward.log_density((after - z)[test], told, full=noise == "full").mean()
        assert row.r2 == pytest.approx(straightforward.r_squared((after - z)[test], told.mean), rel=1e-7, abs=1e-8)
        assert row.log_likelihood == pytest.approx(nats, rel=1e-5, abs=1e-7)
        assert (row.n_train, row.n_test) == (BUDGET, len(test))


def test_neighbours_read_off_the_whole_cloud_are_those_of_a_new_search(reduced, report):
    """Lists that hold too few training tokens are searched again: a spare of one makes that nearly all of them."""
    assert report_of(reduced, spare=1).scores == report.scores


def test_a_width_does_not_depend_on_the_others(reduced, report):
    alone = report_of(reduced[:, :, :4], widths=(4,))
    for ours, others in zip(alone.scores, (row for row in report.scores if row.n_components == 4), strict=True):
        assert (ours.law, ours.noise, ours.seed) == (others.law, others.noise, others.seed)
        assert ours.r2 == pytest.approx(others.r2, rel=1e-8, abs=1e-8)
        assert ours.log_likelihood == pytest.approx(others.log_likelihood, rel=1e-6, abs=1e-6)


def test_diagnostics_say_how_well_posed_each_fit_was(report):
    rows = {(row.n_components, row.seed, row.law): row for row in report.diagnostics}
    assert len(rows) == len(report.diagnostics) == len(WIDTHS) * len(SEEDS) * 3
    for (width, _, law), row in rows.items():
        if law == "km":
            assert (row.n_floored, row.rank) == (0, None)
        else:
            n_features = 1 + width if law == "affine" else (width + 1) * (width + 2) // 2
            assert (row.rank, row.n_features, row.n_floored) == (n_features, n_features, None)
            assert row.condition >= 1


def test_floored_variances_are_counted():
    """Tokens that all take one step, but for a far group that spreads: their local variance is zero."""
    rng = np.random.default_rng(2)
    z = rng.standard_normal((400, 3))
    z[:200] += 100.0
    dz = np.ones((400, 3))
    dz[:200] += rng.standard_normal((200, 3))
    report = report_of(np.stack([z, z + dz]), transition=0, widths=(3,), k=16, k_sweep=())
    for seed, row in zip(SEEDS, (row for row in report.diagnostics if row.law == "km"), strict=True):
        assert row.n_floored == 3 * np.count_nonzero(split(400, seed).test >= 200)


@pytest.mark.parametrize("seed", [3, 7, 8, 11])
def test_a_collinear_coordinate_is_reported_and_changes_no_polynomial(seed):
    """The fourth coordinate is the sum of two others up to rounding: noise along that direction must not be fitted."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((400, 4)) * np.array([1.0, 10.0, 0.1, 1.0])
    z[:, 3] = z[:, 0] + z[:, 1]
    dz = rng.standard_normal((400, 4)) + np.sin(z)
    report = report_of(np.stack([z, z + dz]), transition=0, widths=(4,), k=16, k_sweep=())
    for row in (row for row in report.diagnostics if row.law != "km"):
        n_features, rank = {"affine": (5, 4), "quadratic": (15, 10)}[row.law]
        assert (row.n_features, row.rank, row.condition) == (n_features, rank, None)
    for row in (row for row in report.scores if row.law in ("affine", "quadratic")):
        train, test = straightforward.split(row.seed, 400)
        degree = {"affine": 1, "quadratic": 2}[row.law]
        told = straightforward.polynomial(z[train, :3], dz[train], z[test, :3], degree)[row.noise == "full"]
        nats = straightforward.log_density(dz[test], told, full=row.noise == "full").mean()
        assert row.r2 == pytest.approx(straightforward.r_squared(dz[test], told.mean), abs=1e-9)
        assert row.log_likelihood == pytest.approx(nats, abs=1e-9)


@pytest.mark.parametrize(("n_tokens", "fitted"), [(56, False), (58, True)])
def test_a_polynomial_needs_more_training_tokens_than_monomials(n_tokens, fitted):
    """The quadratic of 8 components has 45 monomials; 56 tokens leave 44 to train on, 58 leave 46."""
    flow = bent_flow(n_tokens, D, 3, seed=4).astype(np.float64)
    report = report_of(flow, widths=(8,), k=8, k_sweep=(), budget=9)
    assert ("quadratic" in {row.law for row in report.scores}) is fitted
    assert ("quadratic" in {row.law for row in report.contests}) is fitted
    assert ("quadratic" in {row.law for row in report.diagnostics}) is fitted
    # Nine training tokens cannot give the nine coefficients of an affine map an error.
    assert report.equal_budget == []


def by_law(scores: list[LawScore]) -> dict[tuple[str, str], LawScore]:
    return {(row.law, row.noise): row for row in scores}


def test_an_ornstein_uhlenbeck_law_is_recognised():
    """Affine drift, constant correlated noise: the affine law with full noise is the truth, and scores as the truth."""
    rng = np.random.default_rng(5)
    matrix = 0.5 * rng.standard_normal((4, 4)) - 0.4 * np.eye(4)
    axes = rotation(4, rng)
    law = GaussianLaw(
        PolynomialDrift.affine(rng.standard_normal(4), matrix), FullNoise(axes * np.geomspace(2.0, 0.05, 4) @ axes.T)
    )
    z = rng.standard_normal((8000, 4)) @ np.diag([3.0, 2.0, 1.0, 0.5]) @ rotation(4, rng)
    following = law.step(z, rng)
    found = by_law(report_of(np.stack([z, following]), transition=0, widths=(4,), seeds=(0,), k_sweep=()).scores)
    parts = split(8000, 0)
    density = law.at(z[parts.test]).log_density((following - z)[parts.test])
    # An estimate with p parameters from n tokens costs p / 2n nats on average, 4 e-3 at most here.
    assert found["affine", "full"].log_likelihood == pytest.approx(density.mean(), abs=0.01)
    assert found["quadratic", "full"].log_likelihood == pytest.approx(density.mean(), abs=0.02)
    assert found["affine", "full"].r2 == pytest.approx(found["quadratic", "full"].r2, abs=0.005)
    for law_noise in set(found) - {("affine", "full"), ("quadratic", "full")}:
        assert found[law_noise].log_likelihood < density.mean() - 0.05
    assert found["null_a", "diagonal"].r2 < 0.001 < found["km", "local_full"].r2 < found["affine", "full"].r2


def test_a_rotation_and_stretch_is_recognised():
    """The cloud is turned and stretched along its own axes, in order: Sarfati's formula is then the map itself."""
    rng = np.random.default_rng(6)
    z = rng.standard_normal((3000, 4)) * np.array([4.0, 2.0, 1.0, 0.5]) @ rotation(4, rng).T
    axes = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)[2].T
    turned = rotation(4, rng) * np.array([1.5, 1.2, 1.1, 0.9]) @ axes.T
    following = z @ turned.T + 0.01 * rng.standard_normal(z.shape) + 5.0
    found = by_law(report_of(np.stack([z, following]), transition=0, widths=(4,), seeds=(0,), k_sweep=()).scores)
    assert found["rotation_stretch", "isotropic"].r2 > 0.999
    assert found["rotation_stretch", "isotropic"].r2 == pytest.approx(found["affine", "full"].r2, abs=1e-3)
