import numpy as np
import pytest

from layerflow.analysis.affinity import AffinityCorrected, MeanNoise, affinity, affinity_corrected
from layerflow.analysis.full_width import fit_maps
from layerflow.analysis.scoring import Split, split
from layerflow.data.trajectories import Samples


def in_order(n, n_train):
    return Split(0, np.arange(n_train), np.arange(n_train, n))


def anisotropic(n, width, rng):
    mix = rng.standard_normal((width, width)) * np.geomspace(3, 0.3, width)
    return rng.standard_normal((n, width)) @ mix.T + 2.0


def affine_flow(n=500, width=6, n_states=3, noise=0.0):
    """Matrices that are anisotropic and do not commute."""
    rng = np.random.default_rng(0)
    states = [anisotropic(n, width, rng)]
    for _ in range(n_states - 1):
        matrix = rng.standard_normal((width, width)) * np.geomspace(1.5, 0.2, width)
        states.append(states[-1] @ matrix.T + rng.standard_normal(width) + noise * rng.standard_normal((n, width)))
    return np.array(states)


def test_an_affine_flow_has_no_nonaffine_share():
    states = affine_flow()
    each = split(500, 0)
    rows = affinity(states, each, kind="mean", n_leading=3)
    assert [(row.kind, row.transition, row.n) for row in rows] == [("mean", 0, 500), ("mean", 1, 500)]
    for row in rows:
        assert 0 <= row.nonaffine_step < 1e-20
        assert 0 <= row.nonaffine_state < 1e-20
        assert abs(row.nonlinear_gain) < 1e-20


def test_noise_is_the_nonaffine_share_of_a_noisy_affine_flow():
    n, width, noise = 6000, 6, 3.0
    states = affine_flow(n=n, width=width, n_states=2, noise=noise)
    each = split(n, 0)
    (row,) = affinity(states, each, kind="individual", n_leading=2)
    following, step = states[1], states[1] - states[0]
    inflation = 1 + (width + 1) / (len(each.train) - width - 2)
    tolerance = 4 * np.sqrt(2 / (len(each.test) * width))
    for share, target in ((row.nonaffine_state, following), (row.nonaffine_step, step)):
        # The held-out rows' own total is the denominator, so that only the residual is random.
        total = target[each.test].var(axis=0).sum()
        assert share == pytest.approx(width * noise**2 * inflation / total, rel=tolerance)
    assert 0.05 < row.nonaffine_state < 0.9
    # Two scores' three products explain none of the noise; the gain of a map that adds nothing is within its error.
    assert abs(row.nonlinear_gain) < 4 * 3 / (len(each.train) * (1 - row.nonaffine_step)) + 0.002


def test_a_planted_quadratic_flow_is_all_gain():
    """h' = M h + v s², with s a leading score: the affine map leaves Var(s²) ‖v‖², the products nothing."""
    n, width = 4000, 5
    rng = np.random.default_rng(3)
    state = anisotropic(n, width, rng)
    each = split(n, 0)
    mean = state[each.train].mean(axis=0)
    axis = np.linalg.svd(state[each.train] - mean, full_matrices=False)[2][0]
    score = (state - mean) @ axis
    score /= score[each.train].std()
    matrix, push = rng.standard_normal((width, width)), rng.standard_normal(width)
    following = state @ matrix.T + np.outer(score**2, push)
    (row,) = affinity(np.array([state, following]), each, kind="mean", n_leading=2)

    residual = (score[each.test] ** 2).var() * (push @ push)
    total = following[each.test].var(axis=0).sum()
    # s² of a Gaussian is uncorrelated with the state, up to a sampling error of a few 1/sqrt(n).
    assert row.nonaffine_state == pytest.approx(residual / total, rel=0.02)
    assert row.nonaffine_state > 0.02
    # With R²_q = 1 the gain is 1 − R²_a.
    assert row.nonlinear_gain == pytest.approx(row.nonaffine_step, rel=1e-9)


def test_products_beyond_the_leading_ones_are_not_added():
    n = 2000
    rng = np.random.default_rng(4)
    state = rng.standard_normal((n, 4)) * [4.0, 2.0, 1.0, 0.5]
    following = state.copy()
    following[:, 0] += state[:, 3] ** 2
    each = split(n, 0)
    states = np.array([state, following])
    (few,) = affinity(states, each, kind="mean", n_leading=2)
    (all_four,) = affinity(states, each, kind="mean", n_leading=4)
    assert few.nonlinear_gain is None or few.nonlinear_gain < 0.02
    assert all_four.nonlinear_gain > 0.9


def test_no_row_where_the_map_would_interpolate():
    states = affine_flow(n=40)
    assert affinity(states, in_order(40, 7), kind="individual") == []
    (first, _) = affinity(states, in_order(40, 8), kind="individual")
    assert first.nonlinear_gain is None
    assert first.n == 40


def test_no_share_where_the_held_out_rows_do_not_differ():
    states = affine_flow(n=64)
    # Numbers that a mean reproduces exactly.
    still = np.round(8 * states[0]) / 8
    each = in_order(64, 48)
    (row,) = affinity(np.array([still, still]), each, kind="mean")
    assert row.nonaffine_step is None
    assert row.nonaffine_state < 1e-20
    assert row.nonlinear_gain is None
    (row,) = affinity(np.array([still, np.ones_like(still)]), each, kind="mean")
    assert row.nonaffine_state is None
    assert row.nonaffine_step < 1e-20


def corpus(n=3000, width=5, n_states=3, sigma=2.0, seed=6):
    """Tokens that occur 2 to 9 times, each with its own noise, most of which a position carries from state to state.

    The exact means follow a quadratic map; so do not the positions, which scatter around them.
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, 10, n)
    rows = np.repeat(np.arange(n), counts)
    exact = [anisotropic(n, width, rng)]
    noise = [sigma * rng.gamma(2.0, 0.5, n)[rows, None] * rng.standard_normal((len(rows), width))]
    for _ in range(n_states - 1):
        matrix = np.eye(width) + 0.2 * rng.standard_normal((width, width))
        exact.append(exact[-1] @ matrix.T + 0.02 * (exact[-1] - exact[-1].mean(axis=0)) ** 2)
        noise.append(noise[-1] @ matrix.T + noise[0] * rng.standard_normal((len(rows), 1)))
    exact, noise = np.array(exact), np.array(noise)
    positions = exact[:, rows] + noise
    means = np.stack([np.add.reduceat(state, np.cumsum(counts) - counts) / counts[:, None] for state in positions])
    return exact, means, counts, Samples(positions, rows, np.zeros(len(rows), bool))


def test_every_position_gives_the_noise_of_the_means_exactly():
    _, means, counts, positions = corpus(n=200)
    each = split(200, 0)
    maps = fit_maps(means[0], means[1], train=each.train, n_leading=0)
    energies = MeanNoise.of(positions, counts, each.test).energies(means, maps, 0)
    expected = np.zeros(3)
    for token in each.test:
        x, y = (positions.states[index][positions.rows == token] for index in (0, 1))
        for part, values in enumerate((y - x @ maps.affine, y - x, y)):
            expected[part] += values.var(axis=0, ddof=1).sum() / len(values)
    assert energies.sum(axis=1) == pytest.approx(expected, rel=1e-10)


def test_a_sample_of_the_positions_gives_it_without_bias():
    _, means, counts, positions = corpus(n=200)
    each = split(200, 0)
    maps = fit_maps(means[0], means[1], train=each.train, n_leading=0)
    whole = MeanNoise.of(positions, counts, each.test).energies(means, maps, 0).sum(axis=1)
    rng = np.random.default_rng(8)
    estimates = []
    for _ in range(400):
        few = rng.choice(len(positions.rows), 150, replace=False)
        sample = Samples(positions.states[:, few], positions.rows[few], positions.sinks[few])
        estimates.append(MeanNoise.of(sample, counts, each.test).energies(means, maps, 0).sum(axis=1))
    error = np.std(estimates, axis=0) / np.sqrt(len(estimates))
    assert (np.abs(np.mean(estimates, axis=0) - whole) < 4 * error).all()
    assert (error < 0.1 * whole).all()


def test_the_correction_takes_away_the_noise_of_the_means():
    exact, means, counts, positions = corpus()
    each = split(len(counts), 0)
    noise = MeanNoise.of(positions, counts, each.test)
    found = affinity_corrected(means, each, noise)
    assert found.rows == affinity(means, each, kind="mean")
    assert [row.transition for row in found.corrected] == [0, 1]
    for raw, row in zip(found.rows, found.corrected, strict=True):
        assert row.nonaffine_step == pytest.approx(raw.nonaffine_step, rel=1e-12)
        assert row.nonaffine_state == pytest.approx(raw.nonaffine_state, rel=1e-12)
        # What the same map leaves over of the exact means, and what the noise adds to it, token by token.
        maps = fit_maps(means[row.transition], means[row.transition + 1], train=each.train, n_leading=0)
        x, y = exact[row.transition][each.test], exact[row.transition + 1][each.test]
        left = y - maps.offset - (x - maps.mean) @ maps.affine
        seen = means[row.transition + 1][each.test] - maps.offset
        seen = seen - (means[row.transition][each.test] - maps.mean) @ maps.affine
        added = (seen**2).sum(axis=1) - (left**2).sum(axis=1)
        total, total_step = y.var(axis=0).sum(), (y - x).var(axis=0).sum()
        found_noise = np.zeros(len(counts))
        np.add.at(found_noise, positions.rows[noise.chosen], noise.energies(means, maps, row.transition)[0])
        error = (added - found_noise[each.test]).std() / np.sqrt(len(each.test))
        truth = (left**2).sum(axis=1).mean()
        assert row.corrected == pytest.approx(truth / total, abs=4 * error / total)
        assert row.corrected_step == pytest.approx(
            truth / total_step, abs=4 * error / total_step + 0.05 * truth / total_step
        )
        assert row.nonaffine_state - row.corrected > 8 * error / total
        assert row.floor == pytest.approx(
            added.mean() / means[row.transition + 1][each.test].var(axis=0).sum(), rel=0.3
        )


def test_no_correction_where_the_noise_shows_nowhere():
    _, _, counts, positions = corpus(n=60)
    assert MeanNoise.of(None, counts, np.arange(10)) is None
    once = counts.copy()
    once[3] = 1
    assert MeanNoise.of(positions, once, np.arange(10)) is None
    assert MeanNoise.of(positions, once, np.arange(10, 20)) is not None
    elsewhere = Samples(positions.states[:, :4], np.full(4, 50), positions.sinks[:4])
    assert MeanNoise.of(elsewhere, counts, np.arange(10)) is None


def test_no_correction_where_there_is_nothing_but_noise():
    _, means, counts, positions = corpus(n=60)
    loud = Samples(1e3 * positions.states, positions.rows, positions.sinks)
    each = in_order(60, 40)
    found = affinity_corrected(means, each, MeanNoise.of(loud, counts, each.test))
    assert len(found.rows) == 2
    assert found.corrected == []
    few = in_order(60, 6)
    assert affinity_corrected(means, few, MeanNoise.of(positions, counts, few.test)) == AffinityCorrected([], [])
