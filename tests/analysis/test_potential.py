from dataclasses import dataclass

import numpy as np
import pytest
import scipy.linalg
from scipy.stats import spearmanr

from layerflow.analysis.potential import (
    PotentialCorrelateRow,
    PotentialReport,
    potential_correlates,
    potential_report,
    potential_values,
    shuffled_symmetric_share,
    strongest_correlate,
    symmetric_share,
)
from layerflow.analysis.scoring import split
from layerflow.errors import InputError
from layerflow.numerics.curl_free import fit_potential
from layerflow.numerics.gram import Gram, gram
from layerflow.numerics.least_squares import solve
from layerflow.numerics.polynomial import features

N, D = 4_000, 5
MEAN = np.array([3.0, -1.0, 0.5, 2.0, -4.0])
TRANSLATION = np.array([5.0, 0.0, -2.0, 1.0, 0.0])


@dataclass(frozen=True)
class Cloud:
    """An anisotropic Gaussian off the origin, and two matrices that commute with neither it nor each other."""

    z: np.ndarray
    covariance: np.ndarray
    symmetric: np.ndarray
    antisymmetric: np.ndarray


@pytest.fixture(scope="module")
def cloud() -> Cloud:
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.standard_normal((D, D)))
    covariance = (axes * np.geomspace(2.0, 0.2, D)) @ axes.T
    matrix = rng.standard_normal((D, D))
    symmetric, antisymmetric = (matrix + matrix.T) / 2, (matrix - matrix.T) / 2
    assert np.linalg.norm(symmetric @ covariance - covariance @ symmetric) > 0.5
    assert np.linalg.norm(antisymmetric @ covariance - covariance @ antisymmetric) > 0.5
    return Cloud(rng.multivariate_normal(MEAN, covariance, size=N), covariance, symmetric, antisymmetric)


def _training_gram(z: np.ndarray, dz: np.ndarray) -> Gram:
    train = split(len(z), 0).train
    return gram(z[train], dz[train])


def _report(z: np.ndarray, dz: np.ndarray) -> PotentialReport:
    parts, sums = split(len(z), 0), _training_gram(z, dz)
    affine, quadratic = (solve(sums, z[parts.train], dz[parts.train], degree=degree) for degree in (1, 2))
    rng = np.random.default_rng(1)
    return potential_report(z, dz, parts, sums, affine=affine, quadratic=quadratic, transition=4, rng=rng)


def _noise(steps: np.ndarray, *, share: float = 0.1) -> np.ndarray:
    size = np.sqrt(share * np.mean(np.var(steps, axis=0)))
    return size * np.random.default_rng(2).standard_normal(steps.shape)


def _cubic_descent(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V and -grad V for V = b.y + y.Sy/2 + sum_m w_m (a_m.y)^3 / 3, y being the state less the cloud's mean."""
    rng = np.random.default_rng(3)
    matrix, slope = rng.standard_normal((D, D)), rng.standard_normal(D)
    stiffness = matrix @ matrix.T / D
    weights, rays = 0.1 * rng.standard_normal(8), rng.standard_normal((8, D))
    y = z - MEAN
    along = y @ rays.T
    value = y @ slope + np.einsum("ni,ij,nj->n", y, stiffness, y) / 2 + along**3 @ weights / 3
    return value, -(slope + y @ stiffness + (along**2 * weights) @ rays)


def test_a_cubic_potential_is_all_potential(cloud: Cloud) -> None:
    _, descent = _cubic_descent(cloud.z)
    row = _report(cloud.z, TRANSLATION + descent + _noise(descent)).row
    assert row.r2_potential > row.r2_affine + 0.02
    assert row.rotational_share < 0.03
    assert row.symmetric_share > 0.95
    assert (row.n_components, row.transition) == (D, 4)


def test_a_linear_gradient_flow_is_all_potential(cloud: Cloud) -> None:
    steps = TRANSLATION + cloud.z @ cloud.symmetric
    row = _report(cloud.z, steps + _noise(steps)).row
    assert row.rotational_share < 0.03
    assert row.symmetric_share > 0.99


def test_a_rotation_is_no_potential_and_is_the_antisymmetric_part() -> None:
    """On an isotropic cloud: in an anisotropic one a rotation correlates with a stretch."""
    z = MEAN + np.random.default_rng(4).standard_normal((N, D))
    matrix = np.random.default_rng(5).standard_normal((D, D))
    steps = TRANSLATION + (z - MEAN) @ (matrix.T - matrix)
    row = _report(z, steps + _noise(steps)).row
    assert row.rotational_share > 0.9
    assert row.symmetric_share < 0.05
    assert row.r2_potential_antisymmetric == pytest.approx(row.r2_quadratic, abs=0.01)


def test_steps_along_the_level_sets_are_rotation_whatever_the_cloud(cloud: Cloud) -> None:
    """Steps A C^-1 (z - m), A antisymmetric, leave the Gaussian unchanged; the antisymmetric part makes up for it."""
    field = cloud.antisymmetric @ np.linalg.inv(cloud.covariance)
    steps = (cloud.z - MEAN) @ field.T
    row = _report(cloud.z, steps + _noise(steps)).row
    assert row.rotational_share == pytest.approx(1 - _linear_potential_share(field, cloud.covariance), abs=0.03)
    assert row.r2_potential_antisymmetric == pytest.approx(row.r2_quadratic, abs=0.01)


def _linear_potential_share(field: np.ndarray, covariance: np.ndarray) -> float:
    """What the best symmetric M explains of tr(B C B^T), C the cloud's covariance: M C + C M = B C + C B^T."""
    best = scipy.linalg.solve_continuous_lyapunov(covariance, field @ covariance + covariance @ field.T)
    missed = field - best
    return 1.0 - np.trace(missed @ covariance @ missed.T) / np.trace(field @ covariance @ field.T)


@pytest.mark.parametrize("angle", np.deg2rad([10, 30, 45, 60, 80]))
def test_mixtures_are_recovered_within_their_standard_errors(cloud: Cloud, angle: float) -> None:
    field = np.cos(angle) * cloud.symmetric + np.sin(angle) * cloud.antisymmetric
    steps = (cloud.z - MEAN) @ field.T
    noise = _noise(steps)
    row = _report(cloud.z, steps + noise).row
    truth = _linear_potential_share(field, cloud.covariance)
    # Standard error of a ratio of held-out means, from the tokens' own contributions.
    best = scipy.linalg.solve_continuous_lyapunov(
        cloud.covariance, field @ cloud.covariance + cloud.covariance @ field.T
    )
    test = split(N, 0).test
    y, seen = cloud.z[test] - MEAN, (steps + noise)[test]
    total = np.sum(seen**2, axis=1)
    gained = total - np.sum((seen - y @ best) ** 2, axis=1)
    possible = total - np.sum((seen - y @ field.T) ** 2, axis=1)
    error = np.std(gained - truth * possible) / np.mean(possible) / np.sqrt(len(test))
    assert row.potential_share == pytest.approx(truth, abs=4 * error + 0.003)
    assert row.r2_potential_antisymmetric == pytest.approx(row.r2_quadratic, abs=0.01)
    share = np.sum(((field + field.T) / 2) ** 2) / np.sum(field**2)
    assert row.symmetric_share == pytest.approx(share, abs=0.02)


def test_row_agrees_with_least_squares_over_an_explicit_basis_of_curl_free_fields(cloud: Cloud) -> None:
    """Gradients of every monomial of degree 1 to 3, by dense least squares in raw coordinates."""
    _, descent = _cubic_descent(cloud.z)
    steps = descent + (cloud.z - MEAN) @ cloud.antisymmetric.T + np.prod(cloud.z[:, :2] - MEAN[:2], axis=1)[:, None]
    steps = steps + _noise(steps)
    row = _report(cloud.z, steps).row
    parts = split(N, 0)
    y = cloud.z - MEAN
    columns = []
    for power in _exponents(3):
        gradient = np.zeros((N, D))
        for axis in np.flatnonzero(power):
            lowered = power - np.eye(D, dtype=int)[axis]
            gradient[:, axis] = power[axis] * np.prod(y**lowered, axis=1)
        columns.append(gradient)
    rotations = [np.outer(y[:, j], np.eye(D)[i]) - np.outer(y[:, i], np.eye(D)[j]) for i in range(D) for j in range(i)]
    for basis, measured in ((columns, row.r2_potential), (columns + rotations, row.r2_potential_antisymmetric)):
        design = np.stack(basis, axis=-1)
        fitted = np.linalg.lstsq(design[parts.train].reshape(-1, len(basis)), steps[parts.train].ravel(), rcond=None)[0]
        errors = np.sum((steps[parts.test] - design[parts.test] @ fitted) ** 2)
        total = np.sum((steps[parts.test] - steps[parts.test].mean(axis=0)) ** 2)
        assert measured == pytest.approx(1 - errors / total, abs=1e-6)


def _exponents(degree: int) -> list[np.ndarray]:
    grid = np.stack(np.meshgrid(*[np.arange(degree + 1)] * D, indexing="ij"), axis=-1).reshape(-1, D)
    return [power for power in grid if 1 <= power.sum() <= degree]


def test_symmetric_share_of_known_matrices(cloud: Cloud) -> None:
    assert symmetric_share(cloud.symmetric) == pytest.approx(1.0)
    assert symmetric_share(cloud.antisymmetric) == pytest.approx(0.0)
    assert symmetric_share(np.array([[1.0, 2.0], [0.0, 1.0]])) == pytest.approx(4 / 6)
    assert np.isnan(symmetric_share(np.zeros((2, 2))))
    random = np.random.default_rng(6).standard_normal((4_000, D, D))
    shares = [symmetric_share(matrix) for matrix in random]
    expected = np.mean((random**2).sum(axis=(1, 2)) + np.einsum("mij,mji->m", random, random)) / 2 / D**2
    assert np.mean(shares) == pytest.approx(expected, abs=0.01)
    assert expected == pytest.approx((1 + 1 / D) / 2, abs=0.01)


def test_shuffled_share_is_that_of_affine_fits_to_shuffled_steps(cloud: Cloud) -> None:
    steps = TRANSLATION + cloud.z @ cloud.symmetric
    rng = np.random.default_rng(7)
    fits = [np.linalg.lstsq(features(cloud.z, 1), steps[rng.permutation(N)], rcond=None)[0][1:].T for _ in range(30)]
    direct = [symmetric_share(matrix) for matrix in fits]
    shuffled = shuffled_symmetric_share(cloud.z, steps, np.random.default_rng(8), n_shuffles=30)
    assert shuffled == pytest.approx(np.mean(direct), abs=4 * np.std(direct) * np.sqrt(2 / 30))


def test_shares_of_steps_nothing_explains_are_nan(cloud: Cloud) -> None:
    row = _report(cloud.z, np.random.default_rng(9).standard_normal((N, D))).row
    assert row.r2_quadratic < 0.0
    assert np.isnan(row.potential_share)
    assert np.isnan(row.rotational_share)


def test_values_are_the_planted_potential_of_the_centred_steps(cloud: Cloud) -> None:
    value, descent = _cubic_descent(cloud.z)
    steps = TRANSLATION + descent
    sums = _training_gram(cloud.z, steps)
    fitted = potential_values(_report(cloud.z, steps).fit, sums.step_center, cloud.z)
    # V is defined up to a constant; centring the steps takes the tilt -mean_step.z out of it.
    planted = value - (TRANSLATION - sums.step_center) @ cloud.z.T
    np.testing.assert_allclose(fitted - fitted.mean(), planted - planted.mean(), atol=1e-5 * np.ptp(planted))


def test_correlates_are_spearman_correlations_by_name(cloud: Cloud) -> None:
    rng = np.random.default_rng(10)
    potential = rng.standard_normal(N)
    quantities = {
        "log_frequency": potential + rng.standard_normal(N),
        "norm": rng.standard_normal(N),
        "flat": np.ones(N),
    }
    rows = potential_correlates(potential, quantities, n_components=D, transition=1)
    assert [row.quantity for row in rows] == list(quantities)
    for row in rows[:2]:
        assert row.spearman == pytest.approx(spearmanr(potential, quantities[row.quantity]).statistic, abs=1e-12)
    assert rows[2] == PotentialCorrelateRow(D, 1, "flat", None)
    assert potential_correlates(potential, {}, n_components=D, transition=1) == []


def test_the_strongest_correlate_is_largest_in_size_over_transitions() -> None:
    rows = [
        PotentialCorrelateRow(16, 0, "norm", 0.5),
        PotentialCorrelateRow(16, 1, "norm", -0.7),
        PotentialCorrelateRow(16, 0, "cosine", 0.4),
        PotentialCorrelateRow(16, 1, "cosine", 0.4),
        PotentialCorrelateRow(16, 1, "flat", None),
    ]
    found = strongest_correlate(rows)
    assert (found.quantity, found.mean_size, found.mean) == ("norm", pytest.approx(0.6), pytest.approx(-0.1))
    with pytest.raises(InputError, match="no quantity"):
        strongest_correlate(rows[4:])


def test_field_equals_stochastic_force_inference() -> None:
    """At unit time steps its Kramers-Moyal preset, given the gradients of all monomials, is the same regression."""
    sfi = pytest.importorskip("SFI")
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(11)
    states = [rng.standard_normal((300, 2)) * [1.5, 0.7] + [1.0, -2.0]]
    for _ in range(3):
        pushed = states[-1] @ np.array([[0.8, -0.2], [0.3, 0.7]]) + 0.1 * np.sin(states[-1])
        states.append(pushed + 0.3 * rng.standard_normal((300, 2)))
    trajectories = np.array(states)
    z, dz = trajectories[:-1].reshape(-1, 2), np.diff(trajectories, axis=0).reshape(-1, 2)
    inference = sfi.OverdampedLangevinInference(sfi.TrajectoryCollection.from_arrays(X=trajectories, dt=1.0))
    inference.compute_diffusion_constant(method="MSD")
    inference.A_inv = jax.numpy.eye(2)  # it weights by the noise, which matters where outputs share coefficients
    powers = [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (2, 1), (1, 2), (0, 3)]

    def gradients(x):
        return jax.jacobian(lambda y: jax.numpy.stack([y[0] ** a * y[1] ** b for a, b in powers]))(x).T

    basis = sfi.statefunc.make_basis(gradients, dim=2, rank=1, n_features=len(powers))
    inference.infer_force_linear(basis, preset="KM")
    expected = np.asarray(inference.force_inferred(z[:50]))  # in float32
    np.testing.assert_allclose(fit_potential(gram(z, dz)).predict(z[:50]), expected, atol=1e-5)


def test_symmetric_share_equals_that_of_pysindy(cloud: Cloud) -> None:
    pysindy = pytest.importorskip("pysindy")
    steps = cloud.z @ (cloud.symmetric + 0.5 * cloud.antisymmetric).T
    steps = steps + _noise(steps)
    train = split(N, 0).train
    optimizer = pysindy.STLSQ(threshold=0.0, alpha=0.0)
    library = pysindy.PolynomialLibrary(degree=1).fit(cloud.z)
    optimizer.fit(np.asarray(library.transform(cloud.z[train])), steps[train])
    assert _report(cloud.z, steps).row.symmetric_share == pytest.approx(
        symmetric_share(np.asarray(optimizer.coef_)[:, 1:]), abs=1e-9
    )
