import numpy as np
import pytest
from scipy.optimize import minimize

from layerflow.errors import InputError
from layerflow.numerics.semidefinite import TOLERANCE, fit_free, fit_semidefinite


def _problem(d: int, *, condition: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An ill-conditioned gram and a cross moment that is neither symmetric nor commutes with it."""
    rng = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(rng.standard_normal((d, d)))
    return (axes * np.geomspace(1.0, 1.0 / condition, d)) @ axes.T, rng.standard_normal((d, d))


def _objective(matrix: np.ndarray, gram: np.ndarray, cross: np.ndarray) -> float:
    return float(0.5 * np.trace(matrix @ gram @ matrix.T) - np.sum(matrix * cross))


def test_free_fit_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    g, y = rng.standard_normal((200, 5)) @ rng.standard_normal((5, 5)), rng.standard_normal((200, 5))
    expected = np.linalg.lstsq(g, y, rcond=None)[0].T
    np.testing.assert_allclose(fit_free(g.T @ g / 200, y.T @ g / 200), expected, rtol=1e-10)


@pytest.mark.parametrize(("d", "condition"), [(3, 1.0), (8, 1e2), (16, 1e4), (32, 1e6)])
def test_semidefinite_fit_satisfies_its_optimality_conditions(d: int, condition: float) -> None:
    gram, cross = _problem(d, condition=condition, seed=d)
    fit = fit_semidefinite(gram, cross)
    values = np.linalg.eigvalsh(fit.matrix)
    np.testing.assert_allclose(fit.matrix, fit.matrix.T, atol=1e-12 * values[-1])
    assert values[0] >= -1e-10 * values[-1]
    assert fit.residual <= TOLERANCE
    gradient = (fit.matrix @ gram + gram @ fit.matrix - cross - cross.T) / 2.0
    size = np.linalg.norm(cross)
    assert np.linalg.eigvalsh(gradient)[0] >= -1e-6 * size
    assert abs(np.sum(gradient * fit.matrix)) <= 1e-6 * size * np.linalg.norm(fit.matrix)


def test_semidefinite_fit_equals_a_general_optimiser_over_factors() -> None:
    gram, cross = _problem(4, condition=30.0, seed=1)

    def objective(flat: np.ndarray) -> float:
        factor = flat.reshape(4, 4)
        return _objective(factor @ factor.T, gram, cross)

    starts = np.random.default_rng(2).standard_normal((5, 16))
    best = min((minimize(objective, start, tol=1e-14) for start in starts), key=lambda result: result.fun)
    factor = best.x.reshape(4, 4)
    np.testing.assert_allclose(
        fit_semidefinite(gram, cross).matrix, factor @ factor.T, atol=2e-4 * np.abs(factor).max() ** 2
    )
    assert _objective(fit_semidefinite(gram, cross).matrix, gram, cross) <= best.fun + 1e-10


def test_a_semidefinite_truth_is_found_exactly() -> None:
    gram, _ = _problem(6, condition=1e3, seed=3)
    truth, _ = _problem(6, condition=10.0, seed=4)
    np.testing.assert_allclose(fit_semidefinite(gram, truth @ gram).matrix, truth, atol=1e-8)


def test_a_truth_that_is_a_rotation_or_runs_downhill_gives_zero() -> None:
    gram, noise = _problem(6, condition=1.0, seed=5)
    assert np.abs(fit_semidefinite(gram, noise - noise.T).matrix).max() < 1e-12
    assert np.abs(fit_semidefinite(gram, -gram).matrix).max() < 1e-12


def test_unusable_moments_are_named() -> None:
    with pytest.raises(InputError, match="non-finite"):
        fit_semidefinite(np.eye(2), np.full((2, 2), np.nan))
    with pytest.raises(InputError, match="every direction is zero"):
        fit_semidefinite(np.zeros((2, 2)), np.eye(2))
