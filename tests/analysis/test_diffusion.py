import numpy as np
import pytest

from layerflow.analysis.control import ControlCloud, anisotropic_diffusion, control_cloud, ornstein_uhlenbeck
from layerflow.analysis.diffusion import GradientDiffusionRow, diffusion_rows, fit_diffusion

N, D = 5_000, 6


@pytest.fixture(scope="module")
def cloud() -> ControlCloud:
    """A mildly anisotropic Gaussian cloud, in which the estimated direction is close to the exact one."""
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.standard_normal((D, D)))
    covariance = (axes * np.geomspace(1.0, 0.2, D)) @ axes.T
    return control_cloud(rng.multivariate_normal(np.ones(D), covariance, size=N), rng, n_read=N)


def _rows(direction: np.ndarray, steps: np.ndarray, *, subject: str = "control") -> dict[str, GradientDiffusionRow]:
    """The rows of one subject by constraint; ``control_centred`` are those that grant a translation."""
    train, test = np.split(np.random.default_rng(1).permutation(N), [int(0.8 * N)])
    rows = diffusion_rows(direction, steps, train, test, transition=2, subject="control", rng=np.random.default_rng(2))
    return {row.constraint: row for row in rows if row.subject == subject}


def _planted(cloud: ControlCloud, diffusion: np.ndarray, *, ratio: float = 20.0) -> np.ndarray:
    law = ornstein_uhlenbeck(cloud.mean, cloud.covariance, diffusion, drift_to_noise=ratio)
    return law.at(cloud.states).draw(np.random.default_rng(3))


def test_a_constant_matrix_acting_on_the_direction_is_recovered(cloud: ControlCloud) -> None:
    diffusion = anisotropic_diffusion(D, np.random.default_rng(4))
    free, semidefinite = fit_diffusion(cloud.direction, cloud.direction @ diffusion)
    np.testing.assert_allclose(free, diffusion, atol=1e-10)
    np.testing.assert_allclose(semidefinite, diffusion, atol=1e-7)


def test_fitted_matrices_are_recovered_within_their_standard_errors(cloud: ControlCloud) -> None:
    rng = np.random.default_rng(5)
    diffusion = anisotropic_diffusion(D, rng, condition=10.0)
    noise = 0.1
    steps = cloud.direction @ diffusion + noise * rng.standard_normal((N, D))
    gram = cloud.direction.T @ cloud.direction
    free, semidefinite = fit_diffusion(cloud.direction, steps)
    errors = noise * np.sqrt(np.tile(np.diag(np.linalg.inv(gram)), (D, 1)))
    assert (np.abs(free - diffusion) < 4.5 * errors).all()
    assert (np.abs(semidefinite - diffusion) < 4.5 * np.maximum(errors, errors.T)).all()


@pytest.mark.parametrize("isotropic", [True, False])
def test_a_gradient_flow_passes_whatever_its_diffusion(cloud: ControlCloud, *, isotropic: bool) -> None:
    diffusion = np.eye(D) if isotropic else anisotropic_diffusion(D, np.random.default_rng(6))
    if not isotropic:
        covariance = cloud.covariance
        assert np.linalg.norm(diffusion @ covariance - covariance @ diffusion) > 0.05
    rows = _rows(cloud.direction, _planted(cloud, diffusion))
    for constraint in ("free", "psd"):
        assert rows[constraint].r2 > 0.6
        assert abs(rows[constraint].r2_shuffled) < 0.02
    assert rows["free"].r2 >= rows["psd"].r2 - 0.01


def test_a_flow_down_the_density_fails_the_semidefinite_test_only(cloud: ControlCloud) -> None:
    rows = _rows(cloud.direction, -_planted(cloud, np.eye(D)))
    assert rows["free"].r2 > 0.6
    assert rows["psd"].r2 < 0.01


def test_a_circulation_is_let_through_by_the_free_matrix_and_not_by_the_semidefinite_one(
    cloud: ControlCloud,
) -> None:
    matrix = np.random.default_rng(7).standard_normal((D, D))
    rows = _rows(cloud.direction, cloud.score @ (matrix - matrix.T).T)
    assert rows["free"].r2 > 0.6
    assert rows["psd"].r2 < 0.1


def test_steps_that_ignore_the_density_score_as_shuffled_ones(cloud: ControlCloud) -> None:
    rows = _rows(cloud.direction, np.random.default_rng(8).standard_normal((N, D)))
    for row in rows.values():
        # d^2 coefficients fitted to noise cost about d^2 / (n d) of R2, give or take as much.
        assert abs(row.r2 - row.r2_shuffled) < 5 * D / N


def test_a_shared_translation_is_no_gradient_and_is_not_fitted(cloud: ControlCloud) -> None:
    """R2 is negative: the mean step is in the error and not in the denominator."""
    steps = 0.1 * np.random.default_rng(9).standard_normal((N, D)) + np.array([1.0, 0, 0, 0, 0, 0])
    assert _rows(cloud.direction, steps)["free"].r2 < -10.0
    assert abs(_rows(cloud.direction, steps, subject="control_centred")["free"].r2) < 0.02


def test_centred_rows_see_the_gradient_through_a_translation(cloud: ControlCloud) -> None:
    planted = _planted(cloud, anisotropic_diffusion(D, np.random.default_rng(6)))
    translated = planted + 10 * np.std(planted) * np.array([1.0, 0, -1, 0, 2, 0])
    assert _rows(cloud.direction, translated)["psd"].r2 < -10.0
    seen = _rows(cloud.direction, translated, subject="control_centred")
    plain = _rows(cloud.direction, planted)
    for constraint in ("free", "psd"):
        assert seen[constraint].r2 == pytest.approx(plain[constraint].r2, abs=0.01)
        assert abs(seen[constraint].r2_shuffled) < 0.02


def test_rows_name_what_they_are(cloud: ControlCloud) -> None:
    rows = _rows(cloud.direction, _planted(cloud, np.eye(D)))
    assert list(rows) == ["free", "psd"]
    assert {(row.n_components, row.transition, row.subject) for row in rows.values()} == {(D, 2, "control")}
