import warnings

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import PolynomialFeatures

from layerflow.errors import InputError
from layerflow.numerics.gram import gram
from layerflow.numerics.least_squares import fit_polynomial, solve
from layerflow.numerics.polynomial import evaluate, features, n_features


def cloud(n, d, seed=0, *, outliers=0, far=1000.0):
    """Anisotropic, correlated, off-centre; outliers as attention sinks make them, far out in one dimension."""
    rng = np.random.default_rng(seed)
    mix = np.linalg.qr(rng.normal(size=(d, d)))[0]
    z = rng.standard_t(5, size=(n, d)) * np.geomspace(3.0, 0.3, d) @ mix + rng.normal(size=d)
    z[:outliers, 0] += far * rng.uniform(0.9, 1.0, outliers)
    planted = rng.normal(size=(n_features(d, 2), d)) * 0.1
    return z, evaluate(planted, z, 2) + rng.normal(size=(n, d)), planted


def relative(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("degree", [1, 2])
def test_coefficients_are_scikit_learns(degree):
    z, dz, _ = cloud(4000, 8)
    design = PolynomialFeatures(degree, include_bias=False).fit_transform(z)
    oracle = LinearRegression().fit(design, dz)
    expected = np.vstack([oracle.intercept_, oracle.coef_.T])
    fit = fit_polynomial(z, dz, degree=degree)
    np.testing.assert_allclose(fit.coefficients, expected, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(fit.predict(z), oracle.predict(design), rtol=1e-8, atol=1e-8)
    assert fit.rank == n_features(8, degree)
    assert fit.n_rows == 4000


@pytest.mark.parametrize("degree", [1, 2])
def test_coefficients_are_numpys(degree):
    z, dz, _ = cloud(2000, 5, seed=1)
    expected = np.linalg.lstsq(features(z, degree), dz)[0]
    np.testing.assert_allclose(fit_polynomial(z, dz, degree=degree).coefficients, expected, rtol=1e-8, atol=1e-8)


def test_coefficients_are_pysindys():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pysindy

        z, dz, _ = cloud(2000, 4, seed=2)
        library = pysindy.PolynomialLibrary(degree=2)
        model = pysindy.SINDy(optimizer=pysindy.STLSQ(threshold=0, alpha=0), feature_library=library)
        model.fit(z, t=1.0, x_dot=dz)
        expected = model.coefficients().T
    np.testing.assert_allclose(fit_polynomial(z, dz).coefficients, expected, rtol=1e-8, atol=1e-8)


def test_a_planted_map_is_recovered():
    z, _, planted = cloud(3000, 10, seed=3)
    fit = fit_polynomial(z, evaluate(planted, z, 2))
    np.testing.assert_allclose(fit.coefficients, planted, atol=1e-10)


def test_recovery_error_is_that_of_the_noise():
    """Standard error of least squares: sqrt of the diagonal of (XᵀX)⁻¹, at unit noise."""
    z, dz, planted = cloud(5000, 6, seed=4)
    design = features(z, 2)
    error = np.sqrt(np.linalg.inv(design.T @ design).diagonal())[:, None]
    scores = (fit_polynomial(z, dz).coefficients - planted) / error
    assert abs(scores.std() - 1) < 4 / np.sqrt(2 * scores.size)
    assert np.abs(scores).max() < 5


@pytest.mark.parametrize("degree", [1, 2])
def test_residual_covariance(degree):
    z, dz, _ = cloud(3000, 5, seed=5)
    fit = fit_polynomial(z, dz, degree=degree)
    residual = dz - fit.predict(z)
    np.testing.assert_allclose(fit.residual_covariance, residual.T @ residual / 3000, rtol=1e-9, atol=1e-9)


def test_the_affine_fit_inside_a_quadratic_gram_matrix():
    z, dz, _ = cloud(1000, 5, seed=6)
    inside = solve(gram(z, dz), z, dz, degree=1)
    alone = fit_polynomial(z, dz, degree=1)
    np.testing.assert_allclose(inside.coefficients, alone.coefficients, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(inside.residual_covariance, alone.residual_covariance, rtol=1e-10)
    assert inside.degree == 1


def test_a_narrow_fit_inside_a_wide_gram_matrix():
    z, dz, _ = cloud(1000, 9, seed=7)
    inside = solve(gram(z, dz).narrow(4), z[:, :4], dz[:, :4])
    np.testing.assert_allclose(
        inside.coefficients, fit_polynomial(z[:, :4], dz[:, :4]).coefficients, rtol=1e-9, atol=1e-10
    )


def extended_precision(z, dz):
    """Predict by least squares in 80-bit arithmetic: Gram-Schmidt, done twice, about the median."""
    x, y = (z - np.median(z, axis=0)).astype(np.longdouble), dz.astype(np.longdouble)
    first, second = np.triu_indices(z.shape[1])
    q = np.column_stack([np.ones(len(x), dtype=np.longdouble), x, x[:, first] * x[:, second]])
    for column in range(q.shape[1]):
        for _ in range(2):
            q[:, column] -= q[:, :column] @ (q[:, :column].T @ q[:, column])
            q[:, column] /= np.sqrt((q[:, column] ** 2).sum())
    return q @ (q.T @ y)


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="this machine's longdouble is no longer than float64")
def test_outliers_do_not_spoil_the_bulk():
    """Steps of the outliers are 10⁷ times those of the bulk here; scikit-learn drops a rank and errs by 30."""
    z, dz, _ = cloud(3000, 6, seed=8, outliers=30, far=1e4)
    exact, bulk = extended_precision(z, dz), slice(30, None)
    error = {
        refine: float(np.abs(solve(gram(z, dz), z, dz, refine=refine).predict(z) - exact)[bulk].max())
        for refine in (True, False)
    }
    assert error[True] < 5e-9
    assert error[False] < 5e-6
    assert error[True] < error[False] / 10


def test_without_refinement_an_ordinary_cloud_loses_nothing():
    z, dz, _ = cloud(3000, 8, seed=12)
    sums = gram(z, dz)
    plain, refined = solve(sums, z, dz, refine=False), solve(sums, z, dz)
    assert plain.refinements == 0
    assert refined.refinements == 1
    np.testing.assert_allclose(plain.coefficients, refined.coefficients, rtol=1e-9, atol=1e-9)


def test_nearly_collinear_coordinates_are_refined_in_any_case():
    z, dz, _ = cloud(3000, 3, seed=13)
    z = np.column_stack([z, z[:, 0] + 1e-5 * np.random.default_rng(13).normal(size=3000)])
    fit = solve(gram(z, dz), z, dz, degree=1, refine=False)
    assert fit.refinements > 1
    assert fit.condition > 1e5
    design = features(fit.scaler(z), 1)
    expected = np.linalg.lstsq(design, dz)[0]
    assert relative(fit.standard, expected) < 1e-8
    np.testing.assert_allclose(fit.predict(z), design @ expected, atol=1e-9 * np.abs(dz).max())


def test_a_copied_coordinate_is_seen_in_every_cloud():
    """LAPACK's own cut-off takes the copy for a coordinate of its own in some."""
    for seed in range(40):
        z, dz, _ = cloud(300, 4, seed=seed)
        assert fit_polynomial(copied_coordinate(z), dz, degree=1).rank == 5


def test_prediction_of_a_far_off_cloud_keeps_its_digits():
    z, dz, _ = cloud(2000, 3, seed=9)
    near = fit_polynomial(z, dz)
    far = fit_polynomial(z + 1e5, dz)
    np.testing.assert_allclose(far.predict(z + 1e5), near.predict(z), rtol=1e-7, atol=1e-8)


def minimum_norm(fit, z, dz):
    """Of the unit columns of the standardised design, as documented."""
    design = features(fit.scaler(z), fit.degree)
    norms = np.linalg.norm(design, axis=0)
    unit = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    solution, _, rank, _ = np.linalg.lstsq(design * unit, dz - dz.mean(axis=0))
    standard = solution * unit[:, None]
    standard[0] += dz.mean(axis=0)
    return standard, rank


def copied_coordinate(z):
    return np.column_stack([z, z[:, 0]])


def summed_coordinate(z):
    return np.column_stack([z, z @ np.arange(1.0, z.shape[1] + 1)])


def constant_coordinate(z):
    return np.column_stack([z, np.full(len(z), 7.0)])


def too_few_rows(z):
    return z[:9]


@pytest.mark.parametrize("spoil", [copied_coordinate, summed_coordinate, constant_coordinate, too_few_rows])
@pytest.mark.parametrize("degree", [1, 2])
def test_rank_deficient_clouds_get_the_minimum_norm_solution(spoil, degree):
    z, dz, _ = cloud(300, 4, seed=10)
    z = spoil(z)
    dz = dz[: len(z)]
    fit = fit_polynomial(z, dz, degree=degree)
    expected, rank = minimum_norm(fit, z, dz)
    assert fit.rank == rank
    if not (spoil is too_few_rows and degree == 1):
        assert fit.rank < n_features(z.shape[1], degree)
        assert fit.condition == np.inf
    np.testing.assert_allclose(fit.predict(z), evaluate(expected, fit.scaler(z), degree), atol=1e-8)
    np.testing.assert_allclose(fit.standard, expected, atol=1e-7)
    residual = dz - fit.predict(z)
    np.testing.assert_allclose(fit.residual_covariance, residual.T @ residual / len(z), atol=1e-8)


def test_condition_of_an_easy_problem_is_that_of_its_design():
    z, dz, _ = cloud(4000, 3, seed=11)
    fit = fit_polynomial(z, dz)
    design = features(fit.scaler(z), 2)
    exact = np.linalg.cond(design / np.linalg.norm(design, axis=0))
    assert exact / 3 < fit.condition < exact * 3


def test_two_states_make_a_line():
    fit = fit_polynomial(np.array([[0.0], [2.0]]), np.array([[1.0], [5.0]]), degree=1)
    np.testing.assert_allclose(fit.coefficients, [[1.0], [2.0]], atol=1e-12)


def test_a_single_state_predicts_its_own_step():
    fit = fit_polynomial(np.array([[3.0, 4.0]]), np.array([[1.0, 5.0]]))
    np.testing.assert_allclose(fit.predict(np.zeros((1, 2))), [[1.0, 5.0]])
    assert fit.rank == 1


def test_other_rows_than_were_summed_are_refused():
    z, dz, _ = cloud(100, 3)
    with pytest.raises(InputError, match="99 states"):
        solve(gram(z, dz), z[1:], dz[1:])
