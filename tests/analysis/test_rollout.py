import itertools

import numpy as np
import pytest

from layerflow.analysis.rollout import TrainingCloud, rollout, rollouts, spread, stationary_control
from layerflow.analysis.scoring import split
from layerflow.errors import InputError
from layerflow.laws.drift import ConstantDrift, PolynomialDrift
from layerflow.laws.kramers_moyal import KramersMoyalLaw
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import DiagonalNoise, FullNoise

MIXING = np.array([[-0.4, 0.5, 0.0], [-0.5, -0.2, 0.3], [0.1, 0.0, -0.1]])
COVARIANCE = np.array([[1.0, 0.3, 0.0], [0.3, 0.4, -0.1], [0.0, -0.1, 0.05]])


def named(law="affine", noise="full", seed=0):
    return {"law": law, "noise": noise, "seed": seed}


def changing_laws(n_transitions=5):
    """Ornstein–Uhlenbeck steps, another one at each transition; no two matrices here commute."""
    return [
        GaussianLaw(
            PolynomialDrift.affine(np.array([0.5, -1.0, 0.2]), MIXING * (1 + 0.3 * transition) + 0.05 * transition),
            FullNoise(COVARIANCE * (1 + transition)),
        )
        for transition in range(n_transitions)
    ]


def trajectories(laws, n, rng):
    states = [rng.standard_normal((n, 3)) * [3.0, 1.0, 0.3]]
    for law in laws:
        states.append(law.step(states[-1], rng))
    return np.array(states)


def standard_error(states):
    """Relative error of a spread, from the moments of ‖z − z̄‖², at most over the states."""
    squares = ((states - states.mean(axis=1, keepdims=True)) ** 2).sum(axis=2)
    return (0.5 * squares.std(axis=1) / squares.mean(axis=1)).max() / np.sqrt(states.shape[1])


def test_the_true_law_gives_the_real_spread():
    rng = np.random.default_rng(0)
    laws = changing_laws()
    training, real = trajectories(laws, 20000, rng), trajectories(laws, 5000, rng)
    rows = rollout(laws, real, TrainingCloud.of(training), rng, **named("truth", "full", 3))
    assert [(row.law, row.noise, row.seed, row.state) for row in rows] == [("truth", "full", 3, s) for s in range(6)]
    tolerance = 4 * np.sqrt(2) * standard_error(real)
    assert rows[0].spread_ratio == 1.0
    assert all(row.spread_ratio == pytest.approx(1.0, abs=tolerance) for row in rows[1:])
    # The law that generated the tokens leaves the cloud as rarely as real tokens do, 1/(n+1) a token and state.
    assert rows[-1].n_escaped <= 10


def test_a_wrong_order_of_the_laws_shows():
    rng = np.random.default_rng(0)
    laws = changing_laws()
    real = trajectories(laws, 5000, rng)
    rows = rollout(laws[::-1], real, TrainingCloud.of(real), rng, **named())
    assert abs(rows[1].spread_ratio - 1.0) > 20 * standard_error(real)


def test_a_contracting_law_shrinks_by_its_factor():
    start = np.random.default_rng(0).standard_normal((400, 3)) * [3.0, 1.0, 0.1]
    real = np.array([start, start + 7.0, 2.0 * start])
    law = GaussianLaw(PolynomialDrift.affine(np.ones(3), -0.25 * np.eye(3)), FullNoise(COVARIANCE))
    rows = rollout([law, law], real, TrainingCloud.of(real), np.random.default_rng(1), **named(noise="none"))
    assert [row.spread_ratio for row in rows] == pytest.approx([1.0, 0.75, 0.75**2 / 2], rel=1e-12)


def test_a_drift_alone_draws_nothing():
    real = np.random.default_rng(0).standard_normal((6, 50, 3))
    rng = np.random.default_rng(1)
    rollout(changing_laws(), real, TrainingCloud.of(real), rng, **named(noise="none"))
    assert rng.random() == np.random.default_rng(1).random()


def test_noise_alone_adds_its_variance():
    rng = np.random.default_rng(0)
    start = rng.standard_normal((20000, 3))
    real = np.array([start] * 4)
    laws = [GaussianLaw(ConstantDrift(np.array([5.0, 0.0, 0.0])), DiagonalNoise(np.array([1.0, 4.0, 1.0])))] * 3
    rows = rollout(laws, real, TrainingCloud.of(real), rng, **named("null_b", "diagonal"))
    expected = [np.sqrt((3 + 6 * steps) / 3) for steps in range(4)]
    tolerance = 4 * 2 * standard_error(real) * np.array(expected)
    assert (np.abs([row.spread_ratio for row in rows] - np.array(expected)) <= tolerance).all()


def test_the_real_states_after_the_first_are_never_looked_at():
    laws = changing_laws()
    real = trajectories(laws, 100, np.random.default_rng(0))
    other = real.copy()
    other[1:-1] = 1e3 * np.random.default_rng(1).standard_normal(other[1:-1].shape)
    last = [
        rollout(laws, states, TrainingCloud.of(real), np.random.default_rng(2), **named())[-1]
        for states in (real, other)
    ]
    assert last[0] == last[1]


def exploding():
    """Z' = z + z², which leaves float64 in ten doublings of the exponent."""
    tensor = np.zeros((3, 3, 3))
    tensor[[0, 1, 2], [0, 1, 2], [0, 1, 2]] = 1.0
    return GaussianLaw(PolynomialDrift.quadratic(np.zeros(3), np.zeros((3, 3)), tensor), FullNoise(1e-8 * COVARIANCE))


def test_overflow_is_counted_and_never_hidden():
    rng = np.random.default_rng(0)
    real = np.array([rng.uniform(-0.9, -0.1, (100, 3))] * 15)
    real[0, :7] = 3.0
    cube = np.array(np.meshgrid([-1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0])).reshape(3, 8).T
    rows = rollout([exploding()] * 14, real, TrainingCloud.of(np.array([cube] * 15)), rng, **named("quadratic"))
    assert [row.n_escaped for row in rows] == [7] * 15
    # Runaway tokens blow up the spread while they are finite; the 93 others fall to 0 by z' = z (1 + z).
    assert rows[3].spread_ratio > 10
    assert rows[-1].spread_ratio < 0.2
    ratios = np.array([row.spread_ratio for row in rows])
    assert np.isfinite(ratios).all()


def test_no_spread_where_no_trajectory_is_finite():
    real = np.array([np.random.default_rng(0).uniform(2, 3, (20, 3))] * 15)
    rows = rollout([exploding()] * 14, real, TrainingCloud.of(real), np.random.default_rng(0), **named())
    assert rows[-1].spread_ratio is None
    assert rows[-1].n_escaped == 20
    assert [row.n_escaped for row in rows] == sorted(row.n_escaped for row in rows)


def test_a_spread_whose_square_overflows():
    assert spread(np.array([[3e200, 0.0], [-3e200, 0.0], [np.inf, 0.0], [np.nan, 1.0]])) == pytest.approx(3e200)
    assert spread(np.array([[4.0, 4.0], [4.0, 4.0]])) == 0.0


def test_a_real_cloud_without_extent_gives_no_ratio():
    real = np.zeros((2, 5, 3))
    rows = rollout(changing_laws(1), real, TrainingCloud.of(real), np.random.default_rng(0), **named())
    assert [row.spread_ratio for row in rows] == [None, None]
    assert [row.n_escaped for row in rows] == [0, 5]


def test_held_out_tokens_are_outside_the_cloud_at_the_stated_rate():
    """With exchangeable tokens, each held-out one is farther out than all n others with probability 1/(n+1)."""
    rng = np.random.default_rng(0)
    n, m, repeats = 30, 10, 2000
    points = rng.standard_cauchy((repeats, 1, n + m, 2))
    outside = np.array([TrainingCloud.of(cloud[:, :n]).left_by(0, cloud[0, n:]).sum() for cloud in points])
    assert outside.mean() == pytest.approx(m / (n + 1), abs=4 * outside.std() / np.sqrt(repeats))


def test_the_farthest_training_token_is_inside():
    states = np.random.default_rng(0).standard_normal((1, 5000, 16)) * np.geomspace(10, 0.1, 16)
    assert not TrainingCloud.of(states).left_by(0, states[0]).any()
    cloud = TrainingCloud.of(states.astype(np.float32))
    assert cloud.left_by(0, np.vstack([states[0, :1] + 1e3, np.full((1, 16), np.nan), states[0, :1]])).tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("noise", ["local_diagonal", "local_full"])
def test_kramers_moyal_from_far_outside_its_training_states(noise):
    rng = np.random.default_rng(0)
    states, steps = rng.standard_normal((200, 3)), rng.standard_normal((200, 3))
    law = KramersMoyalLaw(states, steps, k=8, noise=noise)
    real = np.array([1e12 * rng.standard_normal((10, 3))] * 3)
    rows = rollout([law, law], real, TrainingCloud.of(np.array([states] * 3)), rng, **named("km", noise))
    assert [row.n_escaped for row in rows] == [10, 10, 10]
    assert rows[2].spread_ratio == pytest.approx(1.0, rel=1e-9)


def test_the_control_is_stationary_and_steps_like_the_flow():
    rng = np.random.default_rng(0)
    n = 20000
    states = trajectories(changing_laws(), n, rng)
    control = stationary_control(states, rng)
    centred = states - states.mean(axis=1, keepdims=True)
    unit = centred / np.sqrt((centred**2).sum(axis=2).mean(axis=1))[:, None, None]
    covariance = np.mean([state.T @ state / n for state in unit], axis=0)
    # Each entry of a covariance of a Gaussian has a standard error of sqrt((c_ii c_jj + c_ij²) / n).
    error = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / n)
    for state in control:
        assert (np.abs(state.mean(axis=0)) < 4 * np.sqrt(np.diag(covariance) / n)).all()
        assert (np.abs(np.cov(state.T, bias=True) - covariance) < 4 * error).all()
    wanted = np.einsum("lij,lij->l", unit[:-1], unit[1:]) / n
    matched = np.einsum("lij,lij->l", control[:-1], control[1:]) / n
    assert matched == pytest.approx(np.maximum(wanted, 0.0), abs=4 * np.sqrt(2 / n))
    assert wanted.max() - wanted.min() > 0.1


def test_the_control_under_its_own_law_keeps_its_spread():
    rng = np.random.default_rng(0)
    control = stationary_control(trajectories(changing_laws(), 8000, rng), rng)
    train, test = np.arange(6000), np.arange(6000, 8000)
    laws = []
    for before, after in itertools.pairwise(control):
        persistence = (before * after).sum() / (before * before).sum()
        noise = (1 - persistence**2) * np.cov(before.T, bias=True)
        laws.append(GaussianLaw(PolynomialDrift.affine(np.zeros(3), (persistence - 1) * np.eye(3)), FullNoise(noise)))
    rows = rollout(laws, control[:, test], TrainingCloud.of(control[:, train]), rng, **named())
    tolerance = 4 * np.sqrt(2) * standard_error(control[:, test])
    assert [row.spread_ratio for row in rows] == pytest.approx([1.0] * 6, abs=tolerance)


def test_every_law_and_both_controls_are_rolled_out():
    rng = np.random.default_rng(0)
    laws = changing_laws()
    states = trajectories(laws, 4000, rng)
    each = split(4000, 2)
    rows = rollouts(states, each, np.random.default_rng(1), k=64)
    found = {
        name: [row for row in rows if (row.law, row.noise) == name] for name in {(row.law, row.noise) for row in rows}
    }
    assert set(found) == {
        ("km", "local_diagonal"),
        ("km", "local_full"),
        ("affine", "diagonal"),
        ("affine", "full"),
        ("affine", "none"),
        ("quadratic", "diagonal"),
        ("quadratic", "full"),
        ("null_a", "diagonal"),
        ("null_b", "diagonal"),
        ("null_c", "full"),
        ("rotation_stretch", "isotropic"),
        ("stationary_control", "local_diagonal"),
    }
    for path in found.values():
        assert [(row.seed, row.state) for row in path] == [(2, state) for state in range(6)]
        assert path[0].spread_ratio == 1.0
    tolerance = 4 * np.sqrt(2) * standard_error(states[:, each.test])
    # The flow is affine with full noise: that law generates it, fitted or not; without the noise it falls short.
    for name in (("affine", "full"), ("quadratic", "full")):
        assert [row.spread_ratio for row in found[name]] == pytest.approx([1.0] * 6, abs=tolerance + 0.01)
    last = states[0, each.test]
    for law in laws:
        last = last + law.drift(last)
    expected = spread(last) / spread(states[-1, each.test])
    assert found["affine", "none"][-1].spread_ratio == pytest.approx(expected, rel=0.05)
    assert expected < 0.5


def test_the_control_goes_through_the_kramers_moyal_law_of_its_own_steps():
    rng = np.random.default_rng(0)
    states = [rng.standard_normal((3000, 8))]
    for _ in range(5):
        states.append(0.7 * states[-1] + np.sqrt(1 - 0.7**2) * rng.standard_normal((3000, 8)))
    states = np.array(states)
    each = split(3000, 1)
    rows = rollouts(states, each, np.random.default_rng(5), k=64)[-6:]
    control = stationary_control(states, np.random.default_rng(5))
    laws = [KramersMoyalLaw(a[each.train], (b - a)[each.train], k=64) for a, b in itertools.pairwise(control)]
    cloud = TrainingCloud.of(control[:, each.train])
    name = named("stationary_control", "local_diagonal", 1)
    by_hand = rollout(laws, control[:, each.test], cloud, np.random.default_rng(7), **name)
    tolerance = 4 * np.sqrt(2) * standard_error(control[:, each.test])
    assert [row.spread_ratio for row in rows] == pytest.approx([row.spread_ratio for row in by_hand], abs=tolerance)
    # Neighbours of a token at the rim lie inside: averaging over them weakens the pull back, and the cloud grows.
    assert 1.0 + tolerance < rows[-1].spread_ratio < 2.5


def test_polynomials_that_the_training_tokens_do_not_determine_are_left_out():
    states = trajectories(changing_laws(2), 12, np.random.default_rng(0))
    laws = {row.law for row in rollouts(states, split(12, 0), np.random.default_rng(1), k=3)}
    assert "affine" in laws
    assert "quadratic" not in laws
    with pytest.raises(InputError, match="k is 64"):
        rollouts(states, split(12, 0), np.random.default_rng(1), k=64)


def test_a_state_in_which_nothing_differs_gives_no_shape_to_the_control():
    rng = np.random.default_rng(0)
    states = np.array([np.ones((5000, 3)), rng.standard_normal((5000, 3)) * [2.0, 1.0, 0.0]])
    control = stationary_control(states, rng)
    assert np.cov(control[1].T, bias=True) == pytest.approx(np.diag([0.4, 0.1, 0.0]), abs=4 * 0.4 * np.sqrt(2 / 5000))
    assert (control[0] * control[1]).sum(axis=1).mean() == pytest.approx(0.0, abs=4 * 0.5 / np.sqrt(5000))
    assert not stationary_control(np.zeros((2, 5, 3)), rng).any()


def test_a_law_too_few_is_refused():
    real = np.zeros((6, 5, 3))
    with pytest.raises(InputError, match="4 laws and a cloud of 6 states were given for 6 states"):
        rollout(changing_laws(4), real, TrainingCloud.of(real), np.random.default_rng(0), **named())
