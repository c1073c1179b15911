import numpy as np
import pytest

from layerflow.analysis.affinity import affinity, affinity_corrected
from layerflow.analysis.scoring import Split, split
from layerflow.data.trajectories import Halves
from layerflow.errors import InputError


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


def noisy_halves(n=6000, width=5, sigma=4.0, seed=6):
    """Final states that are a quadratic map of the state before, and means of them over few occurrences."""
    rng = np.random.default_rng(seed)
    state = anisotropic(n, width, rng)
    exact = state @ rng.standard_normal((width, width)).T + 0.05 * (state - state.mean(axis=0)) ** 2
    count_a, count_b = rng.integers(0, 6, n), rng.integers(1, 6, n)
    a, b = (
        exact + sigma * rng.standard_normal((n, width)) / np.sqrt(np.maximum(count, 1))[:, None]
        for count in (count_a, count_b)
    )
    a[count_a == 0] = 0.0
    final = (a * count_a[:, None] + b * count_b[:, None]) / (count_a + count_b)[:, None]
    return state, exact, final, Halves(a, b, count_a, count_b)


def test_the_correction_takes_away_the_noise_of_the_means():
    state, exact, final, halves = noisy_halves()
    each = split(len(state), 0)
    (corrected,) = affinity_corrected(np.array([state, final]), halves, each)
    measured = each.test[halves.count_a[each.test] > 0]
    (truth,) = affinity(np.array([state, exact]), Split(0, each.train, measured), kind="mean")
    assert corrected.transition == 0
    # What the correction misses, token by token: (r + ε)² − r² − e, with r the exact residual, ε the noise of the mean.
    noise = (final - exact)[measured]
    design = np.hstack([np.ones((len(state), 1)), state])
    residual = (
        exact[measured] - design[measured] @ np.linalg.lstsq(design[each.train], exact[each.train], rcond=None)[0]
    )
    count_a, count_b = halves.count_a[measured], halves.count_b[measured]
    energy = ((halves.a - halves.b)[measured] ** 2).sum(axis=1) * count_a * count_b / (count_a + count_b) ** 2
    missed = ((residual + noise) ** 2).sum(axis=1) - (residual**2).sum(axis=1) - energy
    tolerance = 4 * missed.std() / np.sqrt(len(measured)) / exact[measured].var(axis=0).sum()
    assert corrected.corrected == pytest.approx(truth.nonaffine_state, abs=tolerance)
    assert corrected.nonaffine_state - truth.nonaffine_state > 3 * tolerance


def test_the_raw_share_is_that_of_affinity_where_every_token_has_both_halves():
    state, _, final, halves = noisy_halves()
    both = np.flatnonzero(halves.count_a > 0)
    each = split(len(state), 0)
    test = each.test[np.isin(each.test, both)]
    each = Split(0, each.train, test)
    states = np.array([state, final])
    (raw,) = affinity(states, each, kind="mean")
    (corrected,) = affinity_corrected(states, halves, each)
    assert corrected.nonaffine_state == pytest.approx(raw.nonaffine_state, rel=1e-12)
    counts = halves.count_a[each.test] + halves.count_b[each.test]
    gap = ((halves.a - halves.b)[each.test] ** 2).sum(axis=1)
    energy = (gap * halves.count_a[each.test] * halves.count_b[each.test] / counts**2).sum()
    assert corrected.floor == pytest.approx(energy / (final[each.test].var(axis=0).sum() * len(each.test)), rel=1e-9)


def test_no_correction_where_there_is_no_map_or_nothing_but_noise():
    state, _, final, halves = noisy_halves(n=60)
    assert affinity_corrected(np.array([state, final]), halves, in_order(60, 6)) == []
    loud = Halves(halves.a + 1e6, halves.b - 1e6, halves.count_a, halves.count_b)
    assert affinity_corrected(np.array([state, final]), loud, in_order(60, 40)) == []


def test_halves_nobody_has_are_refused():
    state, _, final, halves = noisy_halves(n=60)
    empty = Halves(halves.a, halves.b, np.zeros(60, int), halves.count_b)
    with pytest.raises(InputError, match="0 held-out rows"):
        affinity_corrected(np.array([state, final]), empty, in_order(60, 40))
