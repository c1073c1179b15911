import numpy as np
import pytest
from sklearn.decomposition import PCA

import layerflow as lf
from layerflow.errors import InputError


@pytest.fixture
def states():
    """Three clouds of growing size, each anisotropic in its own directions."""
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((3, 12, 12)) * np.array([1.0, 10.0, 300.0])[:, None, None]
    return np.einsum("lnd,lde->lne", rng.standard_normal((3, 400, 12)), mixing) + rng.standard_normal((3, 1, 12)) * 50


def standardised(states):
    centred = states - states.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).sum(axis=2).mean(axis=1))[:, None, None]


def test_components_are_the_pca_of_the_standardised_stack(states):
    oracle = PCA(5, svd_solver="full").fit(standardised(states).reshape(-1, 12))
    basis = lf.SharedBasis(5).fit(states)
    np.testing.assert_allclose(np.abs(np.sum(basis.components_ * oracle.components_, axis=1)), 1, atol=1e-10)
    np.testing.assert_allclose(basis.explained_variance_ratio_, oracle.explained_variance_ratio_, atol=1e-10)


def test_a_seeded_sample_of_tokens_is_used(states):
    sample = np.sort(np.random.default_rng(7).choice(400, 100, replace=False))
    oracle = PCA(3, svd_solver="full").fit(standardised(states)[:, sample].reshape(-1, 12))
    basis = lf.SharedBasis(3, n_tokens=100, random_state=7).fit(states)
    np.testing.assert_allclose(basis.explained_variance_ratio_, oracle.explained_variance_ratio_, atol=1e-10)


def test_transform_projects_the_raw_states(states):
    basis = lf.SharedBasis(4).fit(states)
    np.testing.assert_allclose(basis.transform(states), states @ basis.components_.T, rtol=1e-12)


def test_widths_are_nested(states):
    narrow, wide = lf.SharedBasis(2).fit(states), lf.SharedBasis(8).fit(states)
    np.testing.assert_allclose(narrow.components_, wide.components_[:2], atol=1e-12)


def test_retained_variance_follows_its_formula(states):
    basis = lf.SharedBasis(6).fit(states)
    centred = states - states.mean(axis=1, keepdims=True)
    projected = centred @ basis.components_[:3].T
    retained = basis.retained(basis.transform(states), 3)
    np.testing.assert_allclose(retained.per_state, (projected**2).sum((1, 2)) / (centred**2).sum((1, 2)), rtol=1e-10)
    assert retained.pooled == pytest.approx(basis.explained_variance_ratio_[:3].sum())
    assert basis.retained(basis.transform(states)).pooled < 1


def test_all_components_keep_everything(states):
    basis = lf.SharedBasis(12).fit(states)
    retained = basis.retained(basis.transform(states))
    assert retained.pooled == pytest.approx(1)
    np.testing.assert_allclose(retained.per_state, 1)


def test_trajectories_are_accepted(states):
    trajectories = lf.Trajectories.from_arrays(states)
    basis = lf.SharedBasis(4).fit(trajectories)
    assert basis.transform(trajectories).shape == (3, 400, 4)


def test_a_state_without_spread_is_harmless(states):
    states[0] = 1.0
    retained = (basis := lf.SharedBasis(4).fit(states)).retained(basis.transform(states))
    assert np.isfinite(basis.components_).all()
    assert retained.per_state[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n_components", [0, 13])
def test_impossible_widths_are_refused(states, n_components):
    with pytest.raises(InputError, match=f"n_components is {n_components}; .* between 1 and 12"):
        lf.SharedBasis(n_components).fit(states)


def test_another_width_is_refused(states):
    with pytest.raises(InputError, match="states have width 5; this basis was fitted at 12"):
        lf.SharedBasis(4).fit(states).transform(states[:, :, :5])


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_states_without_any_spread_explain_nothing(value):
    constant = np.full((3, 40, 12), value)
    basis = lf.SharedBasis(4).fit(constant)
    np.testing.assert_array_equal(basis.explained_variance_ratio_, 0)
    np.testing.assert_array_equal(basis.radii_, 0)
    np.testing.assert_array_equal(basis.means_, value)
    retained = basis.retained(basis.transform(constant))
    assert retained.pooled == 0
    np.testing.assert_allclose(retained.per_state, 0, atol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_finite_are_refused(states, value):
    basis = lf.SharedBasis(4).fit(states)
    states[1, [7, 9], 3] = value
    for use in (lf.SharedBasis(4).fit, basis.transform):
        with pytest.raises(InputError, match=r"token row 7 is not finite in state 1 \(2 such rows\)"):
            use(states)


def test_another_number_of_axes_is_refused(states, untyped):
    basis = lf.SharedBasis(4).fit(states)
    for use in (lf.SharedBasis(4).fit, basis.transform):
        with pytest.raises(InputError, match=r"states have shape \(400, 12\); they need three axes"):
            use(states[0])
