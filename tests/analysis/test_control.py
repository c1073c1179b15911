import numpy as np
import pytest

from layerflow.analysis.control import (
    DRIFT_TO_NOISE,
    ControlCloud,
    anisotropic_diffusion,
    calibration_rows,
    control_cloud,
    control_report,
    matched_ratio,
    ornstein_uhlenbeck,
)
from layerflow.analysis.gradient import density_direction, mean_cosine
from layerflow.errors import InputError
from layerflow.numerics.bootstrap import resample_weights
from layerflow.numerics.neighbors import nearest

N, D = 4_000, 6


def _covariance(*, condition: float = 10.0) -> np.ndarray:
    axes, _ = np.linalg.qr(np.random.default_rng(10).standard_normal((D, D)))
    return (axes * np.geomspace(4.0, 4.0 / condition, D)) @ axes.T


@pytest.fixture(scope="module")
def states() -> np.ndarray:
    return np.random.default_rng(0).multivariate_normal(np.arange(D, dtype=float), _covariance(), size=N)


@pytest.fixture(scope="module")
def cloud(states: np.ndarray) -> ControlCloud:
    return control_cloud(states, np.random.default_rng(1))


@pytest.mark.parametrize("ratio", [0.9, 10.0, 106.0])
@pytest.mark.parametrize("isotropic", [True, False])
def test_process_has_the_drift_and_the_ratio_it_promises(*, ratio: float, isotropic: bool) -> None:
    rng = np.random.default_rng(2)
    covariance, mean = _covariance(), np.arange(D, dtype=float)
    diffusion = np.eye(D) if isotropic else anisotropic_diffusion(D, rng)
    assert isotropic or np.linalg.norm(diffusion @ covariance - covariance @ diffusion) > 0.1
    law = ornstein_uhlenbeck(mean, covariance, diffusion, drift_to_noise=ratio)
    z = rng.multivariate_normal(mean, covariance, size=20_000)
    drift = law.drift(z)
    noise = law.at(z).draw(rng) - drift
    measured = np.mean(np.sum(drift**2, axis=1)) / np.mean(np.sum(noise**2, axis=1))
    assert measured == pytest.approx(ratio, rel=0.05)  # 20,000 tokens: 1 % standard error of either mean
    # Drift is D times the exact score and noise covariance 2 t D, with one t.
    expected = -(z - mean) @ np.linalg.inv(covariance) @ diffusion
    length = np.sum(drift * expected) / np.sum(expected**2)
    np.testing.assert_allclose(drift, length * expected, atol=1e-9 * np.abs(drift).max())
    np.testing.assert_allclose(law.noise.covariance, 2 * length * diffusion, rtol=1e-9)


def test_process_leaves_its_gaussian_unchanged() -> None:
    """Short steps: covariance after a step is C + O(t^2) even where D and C do not commute."""
    covariance, mean = _covariance(), np.ones(D)
    diffusion = anisotropic_diffusion(D, np.random.default_rng(3))
    moved = []
    for ratio in (1e-2, 5e-3):
        law = ornstein_uhlenbeck(mean, covariance, diffusion, drift_to_noise=ratio)
        step = np.eye(D) + law.drift.matrix
        after = step @ covariance @ step.T + law.noise.covariance
        np.testing.assert_allclose(law.drift(mean[None]), 0.0, atol=1e-12)
        moved.append(np.linalg.norm(after - covariance))
    assert moved[0] / moved[1] == pytest.approx(4.0, rel=1e-6)


def test_cloud_has_the_moments_asked_for(states: np.ndarray, cloud: ControlCloud) -> None:
    np.testing.assert_allclose(cloud.mean, states.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(cloud.covariance, np.cov(states.T, bias=True), atol=1e-12)
    error = np.sqrt(np.diag(cloud.covariance) / N)
    assert (np.abs(cloud.states.mean(axis=0) - cloud.mean) < 5 * error).all()
    expected = -np.linalg.solve(cloud.covariance, (cloud.states - cloud.mean).T).T
    np.testing.assert_allclose(cloud.score, expected, atol=1e-10)


def test_reading_some_of_the_tokens_reads_them_as_the_flow_is_read(states: np.ndarray) -> None:
    whole = control_cloud(states, np.random.default_rng(4), n_read=N)
    some = control_cloud(states, np.random.default_rng(4), n_read=300)
    np.testing.assert_array_equal(some.states, whole.states[:300])
    np.testing.assert_allclose(some.direction, whole.direction[:300], atol=1e-12)
    as_flow = density_direction(whole.states, nearest(whole.states, 48).indices)
    np.testing.assert_allclose(whole.direction, as_flow, atol=1e-12)


def test_control_passes_both_tests(cloud: ControlCloud) -> None:
    rng = np.random.default_rng(5)
    weights = resample_weights(N, 300, rng)
    report = control_report(cloud, weights, drift_to_noise=10.0, transition=3, rng=rng)
    assert report.gradient.gap > 0.5
    assert report.gradient.low > 0.5
    assert report.gradient.energy_share > 0.5
    assert [row.constraint for row in report.diffusion] == ["free", "psd"] * 2
    assert [row.subject for row in report.diffusion] == ["control"] * 2 + ["control_centred"] * 2
    for row in report.diffusion:
        assert row.r2 > row.r2_shuffled + 0.4
    assert report.gradient.subject == "control"
    assert {row.transition for row in (report.gradient, *report.diffusion)} == {3}


def test_an_anisotropic_diffusion_weakens_the_plain_test(cloud: ControlCloud) -> None:
    rng = np.random.default_rng(6)
    readings = []
    for diffusion in (np.eye(D), anisotropic_diffusion(D, rng)):
        law = ornstein_uhlenbeck(cloud.mean, cloud.covariance, diffusion, drift_to_noise=50.0)
        readings.append(mean_cosine(cloud.direction, law.at(cloud.states).draw(rng)))
    assert readings[1] < readings[0] - 0.2


def test_alignment_follows_direction_agreement_and_the_ratio(states: np.ndarray) -> None:
    rng = np.random.default_rng(7)
    steps = rng.standard_normal(states.shape) + np.array([2.0, 0, 0, -1, 0, 0])
    rows = calibration_rows(states, steps, rng)
    plain = [row for row in rows if not row.translated]
    assert [row.drift_to_noise for row in plain] == pytest.approx(np.geomspace(0.9, 106.0, len(DRIFT_TO_NOISE)))
    for row in plain:
        predicted = row.direction_agreement * np.sqrt(row.drift_to_noise / (1 + row.drift_to_noise))
        # The law holds on average over tokens of one drift size; sizes vary, and small drifts lose more to noise.
        assert row.alignment == pytest.approx(predicted, abs=0.05)
    alignments = [row.alignment for row in plain]
    assert alignments == sorted(alignments)
    assert plain[-1].alignment == pytest.approx(plain[-1].direction_agreement, abs=0.02)


def test_a_shared_translation_hides_the_gradient(states: np.ndarray) -> None:
    rng = np.random.default_rng(8)
    steps = 0.3 * rng.standard_normal(states.shape) + np.array([2.0, 0, 0, -1, 0, 0])
    rows = calibration_rows(states, steps, rng, ratios=(20.0,))
    plain, translated = rows
    assert (plain.translated, translated.translated) == (False, True)
    assert translated.alignment < plain.alignment / 2
    assert translated.energy_share < plain.energy_share


def test_ratio_of_a_flow_is_explained_over_unexplained() -> None:
    assert matched_ratio(0.8) == pytest.approx(4.0)
    assert matched_ratio(-3.0) == pytest.approx(0.01 / 0.99)
    assert matched_ratio(1.0) == pytest.approx(999.0)


def test_a_ratio_that_is_no_ratio_is_named() -> None:
    with pytest.raises(InputError, match="drift-to-noise ratio is 0"):
        ornstein_uhlenbeck(np.zeros(2), np.eye(2), np.eye(2), drift_to_noise=0.0)
