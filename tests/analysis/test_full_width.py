import numpy as np
import pytest

from layerflow.analysis import full_width
from layerflow.analysis.full_width import HeldOutSquares, fit_maps, held_out_squares, solve
from layerflow.errors import InputError


def transition(n=400, width=7, noise=0.3, seed=0):
    """States with a mean and unequal, correlated coordinates; a quadratic map between matrices that do not commute."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((width, width)) * np.geomspace(20, 0.05, width)
    state = 5.0 + rng.standard_normal((n, width)) @ mix.T
    matrix = np.eye(width) + 0.3 * rng.standard_normal((width, width))
    bend = rng.standard_normal((width, width))
    following = 1.0 + state @ matrix.T + 0.02 * (state @ bend) ** 2 + noise * rng.standard_normal((n, width))
    split = rng.permutation(n)
    return state, following, split[: int(0.8 * n)], split[int(0.8 * n) :]


def held_out_residuals(state, following, *, train, test, n_leading) -> HeldOutSquares:
    return held_out_squares(fit_maps(state, following, train=train, n_leading=n_leading), state, following, test)


def products(state, train, n_leading):
    """Products of principal scores by a route of its own: the SVD of the training rows."""
    mean = state[train].mean(axis=0)
    axes = np.linalg.svd(state[train] - mean, full_matrices=False)[2][:n_leading]
    scores = (state - mean) @ axes.T
    i, j = np.triu_indices(n_leading)
    return scores[:, i] * scores[:, j]


def residuals(regressors, following, train, test):
    design = np.hstack([np.ones((len(regressors), 1)), regressors])
    design /= np.linalg.norm(design[train], axis=0)
    coefficients = np.linalg.lstsq(design[train], following[train], rcond=None)[0]
    return ((following[test] - design[test] @ coefficients) ** 2).sum(axis=1)


@pytest.mark.parametrize("block_numbers", [7, 250, 2**22])
def test_both_maps_agree_with_a_direct_least_squares(monkeypatch, block_numbers):
    monkeypatch.setattr(full_width, "_BLOCK_NUMBERS", block_numbers)
    state, following, train, test = transition()
    held_out = held_out_residuals(state, following, train=train, test=test, n_leading=4)
    np.testing.assert_allclose(held_out.affine, residuals(state, following, train, test), rtol=1e-8)
    extended = np.hstack([state, products(state, train, 4)])
    np.testing.assert_allclose(held_out.nonlinear, residuals(extended, following, train, test), rtol=1e-8)
    assert held_out.nonlinear.sum() < 0.9 * held_out.affine.sum()
    step, reached = (following - state)[test], following[test]
    np.testing.assert_allclose(held_out.step, ((step - step.mean(axis=0)) ** 2).sum(axis=1), rtol=1e-9)
    np.testing.assert_allclose(held_out.state, ((reached - reached.mean(axis=0)) ** 2).sum(axis=1), rtol=1e-9)


def test_memory_maps_of_float32_give_the_same(tmp_path):
    state, following, train, test = transition()
    for name, rows in (("a", state), ("b", following)):
        np.save(tmp_path / f"{name}.npy", rows.astype(np.float32))
    a, b = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab")
    mapped = held_out_residuals(a, b, train=train, test=test, n_leading=3)
    rounded = [rows.astype(np.float32).astype(np.float64) for rows in (state, following)]
    direct = held_out_residuals(*rounded, train=train, test=test, n_leading=3)
    np.testing.assert_allclose(mapped.affine, direct.affine, rtol=1e-9)
    np.testing.assert_allclose(mapped.nonlinear, direct.nonlinear, rtol=1e-9)


def test_coefficients_of_a_planted_affine_map():
    state, _, train, _ = transition()
    rng = np.random.default_rng(1)
    matrix, offset = rng.standard_normal((7, 7)), rng.standard_normal(7)
    maps = fit_maps(state, state @ matrix.T + offset, train=train, n_leading=0)
    np.testing.assert_allclose(maps.affine, matrix.T, atol=1e-10 * np.abs(matrix).max())
    np.testing.assert_allclose(maps.offset - maps.mean @ maps.affine, offset, atol=1e-9)
    assert maps.nonlinear is None


def test_scores_of_the_training_rows_have_unit_covariance():
    state, following, train, _ = transition()
    maps = fit_maps(state, following, train=train, n_leading=3)
    regressors = maps.regressors(state[train])
    scores = regressors[:, :7] @ maps.directions
    np.testing.assert_allclose(scores.T @ scores / len(train), np.eye(3), atol=1e-10)
    np.testing.assert_allclose(regressors.mean(axis=0), 0.0, atol=1e-10)


@pytest.mark.parametrize("defect", ["constant", "copy", "combination"])
def test_regressors_that_say_nothing_new_do_no_harm(defect):
    state, following, train, test = transition()
    state[:, 2] = {"constant": 4.1, "copy": state[:, 5], "combination": state[:, 0] - 3 * state[:, 4]}[defect]
    held_out = held_out_residuals(state, following, train=train, test=test, n_leading=2)
    without = np.delete(state, 2, axis=1)
    np.testing.assert_allclose(held_out.affine, residuals(without, following, train, test), rtol=1e-5)
    extended = np.hstack([without, products(state, train, 2)])
    np.testing.assert_allclose(held_out.nonlinear, residuals(extended, following, train, test), rtol=1e-5)


def test_one_direction_that_holds_nearly_all_variance():
    """As at the states of a model with attention sinks, where one coordinate is a thousand times the others."""
    state, following, train, test = transition()
    state[:, 3] = 3e4 * np.random.default_rng(5).standard_normal(len(state)) + 0.7 * state[:, 0]
    held_out = held_out_residuals(state, following, train=train, test=test, n_leading=3)
    np.testing.assert_allclose(held_out.affine, residuals(state, following, train, test), rtol=1e-6)


def test_products_of_directions_without_variance_are_left_out():
    rng = np.random.default_rng(0)
    state = np.zeros((200, 5))
    state[:, :2] = rng.standard_normal((200, 2))
    maps = fit_maps(state, state**2, train=np.arange(150), n_leading=4)
    assert maps.directions.shape == (5, 2)
    nonlinear = maps.regressors(state) @ maps.nonlinear + maps.offset
    np.testing.assert_allclose(nonlinear, state**2, atol=1e-10)


def test_too_few_rows_for_the_products_leave_the_affine_map():
    # Seven coordinates and ten products want more than 18 rows.
    for n_train, fitted in ((18, False), (19, True)):
        state, following, train, test = transition()
        held_out = held_out_residuals(state, following, train=train[:n_train], test=test, n_leading=4)
        assert (held_out.nonlinear is not None) == fitted


def test_solve_on_well_and_badly_conditioned_systems():
    rng = np.random.default_rng(0)
    design = rng.standard_normal((60, 5)) * [1e6, 1.0, 1e-6, 1.0, 1.0]
    target = rng.standard_normal((60, 3))
    unit = design / np.linalg.norm(design, axis=0)
    for columns, rtol in ((design, 1e-9), (np.hstack([design, design[:, :1] / 1e3]), 1e-9)):
        coefficients = solve(columns.T @ columns, columns.T @ target)
        predicted = unit @ np.linalg.lstsq(unit, target, rcond=None)[0]
        np.testing.assert_allclose(columns @ coefficients, predicted, rtol=rtol, atol=1e-9)


def test_an_interpolating_map_is_refused():
    state, following, train, test = transition()
    with pytest.raises(InputError, match="8 training rows of width 7"):
        held_out_residuals(state, following, train=train[:8], test=test, n_leading=0)
    with pytest.raises(InputError, match="1 held-out rows"):
        held_out_residuals(state, following, train=train, test=test[:1], n_leading=0)
