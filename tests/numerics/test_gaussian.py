"""Log-densities against SciPy, draws against their moments, factorisation at its limits."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import multivariate_normal

from layerflow.errors import InputError
from layerflow.numerics.gaussian import (
    JITTERS,
    Gaussian,
    SingularCovarianceError,
    safe_cholesky,
    shrink_off_diagonal,
)


def random_covariances(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """Anisotropic, non-commuting, well conditioned."""
    factors = rng.standard_normal((n, d, 3 * d)) * np.geomspace(0.3, 3.0, d)[:, None]
    return factors @ factors.transpose(0, 2, 1) / d


def test_density_by_hand():
    # N(0, diag(4, 1)) at (2, 1): -log(2 pi) - log(2) - (1 + 1) / 2
    gaussian = Gaussian.diagonal(np.zeros((1, 2)), np.array([4.0, 1.0]))
    assert_allclose(gaussian.log_density(np.array([[2.0, 1.0]])), -np.log(2 * np.pi) - np.log(2.0) - 1.0)


@pytest.mark.parametrize("d", [1, 2, 7, 64])
def test_full_density_equals_scipy(d):
    rng = np.random.default_rng(0)
    covariances = random_covariances(rng, 9, d)
    mean, x = rng.standard_normal((2, 9, d)) * 3.0
    expected = [multivariate_normal(m, c).logpdf(v) for m, c, v in zip(mean, covariances, x, strict=True)]
    assert_allclose(Gaussian.full(mean, covariances).log_density(x), expected, rtol=1e-12)
    shared = [multivariate_normal(m, covariances[0]).logpdf(v) for m, v in zip(mean, x, strict=True)]
    assert_allclose(Gaussian.full(mean, covariances[0]).log_density(x), shared, rtol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 7, 64])
def test_diagonal_density_equals_scipy_and_full(d):
    rng = np.random.default_rng(1)
    variance = rng.uniform(0.01, 100.0, (9, d))
    mean, x = rng.standard_normal((2, 9, d)) * 3.0
    expected = [multivariate_normal(m, np.diag(v)).logpdf(p) for m, v, p in zip(mean, variance, x, strict=True)]
    assert_allclose(Gaussian.diagonal(mean, variance).log_density(x), expected, rtol=1e-12)
    one = Gaussian.diagonal(mean, variance[0]).log_density(x)
    assert_allclose(Gaussian.full(mean, np.diag(variance[0])).log_density(x), one, rtol=1e-12)


def test_float32_input_is_computed_in_float64():
    rng = np.random.default_rng(2)
    mean, x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    covariance = random_covariances(rng, 1, 3)[0].astype(np.float32)
    single = Gaussian.full(mean, covariance).log_density(x)
    double = Gaussian.full(mean.astype(float), covariance.astype(float)).log_density(x.astype(float))
    assert single.dtype == np.float64
    assert_allclose(single, double, rtol=1e-14)


@pytest.mark.parametrize("rows", ["one", "each"])
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_draws_have_the_moments(form, rows):
    rng = np.random.default_rng(3)
    n, d = 40_000, 3
    covariance = random_covariances(rng, 1, d)[0]
    if form == "diagonal":
        covariance = np.diag(np.diag(covariance))
    mean = np.tile([1.0, -2.0, 0.5], (n, 1))
    noise = np.diag(covariance) if form == "diagonal" else covariance
    if rows == "each":
        noise = np.broadcast_to(noise, (n, *noise.shape))
    gaussian = Gaussian.diagonal(mean, noise) if form == "diagonal" else Gaussian.full(mean, noise)
    draws = gaussian.draw(rng)
    error = np.sqrt(np.diag(covariance) / n)
    assert (np.abs(draws.mean(axis=0) - mean[0]) < 4.5 * error).all()
    # Var of a sample covariance entry of a Gaussian: (C_ii C_jj + C_ij^2) / n
    variance = np.diag(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / n)
    assert (np.abs(np.cov(draws.T, bias=True) - covariance) < 4.5 * error).all()
    assert_allclose(gaussian.marginal_variance, np.broadcast_to(variance, (n, d)))


def test_draws_follow_the_generator():
    gaussian = Gaussian.full(np.zeros((4, 2)), np.array([[2.0, 1.0], [1.0, 3.0]]))
    first, again = (gaussian.draw(np.random.default_rng(5)) for _ in range(2))
    assert_array_equal(first, again)
    assert not np.array_equal(first, gaussian.draw(np.random.default_rng(6)))


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_one_noise_for_all_rows_is_the_same_noise_in_each(form):
    rng = np.random.default_rng(4)
    covariance = random_covariances(rng, 1, 3)[0]
    mean, x = rng.standard_normal((2, 6, 3))
    noise = np.diag(covariance) if form == "diagonal" else covariance
    build = getattr(Gaussian, form)
    one, each = build(mean, noise), build(mean, np.broadcast_to(noise, (6, *noise.shape)))
    assert_allclose(one.log_density(x), each.log_density(x), rtol=1e-13)
    assert_allclose(one.draw(np.random.default_rng(0)), each.draw(np.random.default_rng(0)), rtol=1e-13)


def test_zero_variance_draws_the_mean_and_has_no_density():
    mean = np.arange(6.0).reshape(3, 2)
    gaussian = Gaussian.diagonal(mean, np.zeros(2))
    assert_array_equal(gaussian.draw(np.random.default_rng(0)), mean)
    with pytest.raises(SingularCovarianceError, match="coordinate 0 is 0"):
        gaussian.log_density(mean)


def test_cholesky_of_a_sound_batch_needs_no_jitter():
    covariances = random_covariances(np.random.default_rng(7), 6, 5).reshape(2, 3, 5, 5)
    result = safe_cholesky(covariances)
    assert_array_equal(result.jitter, np.zeros((2, 3)))
    assert_allclose(result.factor @ np.swapaxes(result.factor, -1, -2), covariances, rtol=1e-12)
    assert_array_equal(np.triu(result.factor, 1), 0.0)


@pytest.mark.parametrize("units", [1.0, 1e-8, 1e8])
def test_cholesky_jitters_only_the_singular_matrix_and_says_so(units):
    rng = np.random.default_rng(8)
    covariances = random_covariances(rng, 3, 6)
    low_rank = rng.standard_normal((6, 3))
    covariances[1] = low_rank @ low_rank.T
    scale = np.geomspace(1e-3, 1e3, 6) * units
    covariances *= np.outer(scale, scale)
    result = safe_cholesky(covariances)
    assert result.jitter[0] == result.jitter[2] == 0.0
    assert 0.0 < result.jitter[1] <= JITTERS[-1]
    expected = covariances[1] + result.jitter[1] * np.diag(np.diag(covariances[1]))
    error = np.abs(result.factor[1] @ result.factor[1].T - expected) / np.outer(scale, scale)
    assert error.max() < 1e-13 * np.abs(covariances[1] / np.outer(scale, scale)).max()


def test_a_pivot_of_rounding_is_not_a_variance():
    """NumPy factorises this matrix, and its determinant is nothing but the last bit of one entry."""
    singular = np.array([[1.0, 1.0], [1.0, 1.0 + np.finfo(float).eps]])
    assert np.linalg.cholesky(singular)[1, 1] > 0.0
    assert safe_cholesky(singular).jitter == JITTERS[0]


def test_cholesky_symmetrises():
    skewed = np.array([[2.0, 1.5], [0.5, 3.0]])
    assert_allclose(safe_cholesky(skewed).factor, np.linalg.cholesky([[2.0, 1.0], [1.0, 3.0]]))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 2.0], [2.0, 1.0]], "smallest eigenvalue"),
        ([[1.0, 0.0], [0.0, -1.0]], "coordinate 1 is -1"),
        ([[1.0, 0.0], [0.0, 0.0]], "coordinate 1 is 0"),
        ([[1.0, np.nan], [np.nan, 1.0]], "is nan"),
        ([[np.inf, 0.0], [0.0, 1.0]], "coordinate 0 is inf"),
    ],
)
def test_cholesky_refuses_what_has_no_density(matrix, message):
    for covariance in (np.array(matrix), np.stack([np.eye(2), np.array(matrix)])):
        with pytest.raises(SingularCovarianceError, match=message) as caught:
            safe_cholesky(covariance)
        assert isinstance(caught.value, np.linalg.LinAlgError)
        assert isinstance(caught.value, InputError)
        assert "\n" not in str(caught.value)


def test_shrinkage_by_hand():
    covariance = np.array([[4.0, 2.0], [2.0, 3.0]])
    assert_allclose(shrink_off_diagonal(covariance), [[4.0, 1.8], [1.8, 3.0]])
    assert_allclose(shrink_off_diagonal(covariance, factor=0.0), [[4.0, 0.0], [0.0, 3.0]])
    assert_array_equal(shrink_off_diagonal(covariance, factor=1.0), covariance)
    with pytest.raises(InputError, match=r"is 1\.5"):
        shrink_off_diagonal(covariance, factor=1.5)


def test_shrinkage_makes_a_rank_deficient_covariance_positive_definite():
    # k = 64 neighbours in d = 64: centring leaves rank 63.
    rng = np.random.default_rng(9)
    steps = rng.standard_normal((64, 64)) * np.geomspace(1e-3, 1.0, 64)
    covariance = np.cov(steps.T, bias=True)
    assert np.linalg.matrix_rank(covariance) < 64
    shrunk = shrink_off_diagonal(covariance)
    result = safe_cholesky(shrunk)
    assert result.jitter == 0.0
    x = steps[:5]
    expected = multivariate_normal(np.zeros(64), shrunk).logpdf(x)
    assert_allclose(Gaussian.full(np.zeros((5, 64)), shrunk).log_density(x), expected, rtol=1e-10)


@pytest.mark.parametrize("shape", [(3,), (4, 2), (1, 1)])
def test_shapes_that_do_not_fit_are_refused(untyped, shape):
    with pytest.raises(InputError, match="variance has shape"):
        Gaussian.diagonal(np.zeros((5, 2)), np.ones(shape))
    with pytest.raises(InputError, match="covariance has shape"):
        Gaussian.full(np.zeros((5, 2)), np.ones((*shape, shape[-1])))


def test_points_of_another_shape_are_refused(untyped):
    gaussian = Gaussian.diagonal(np.zeros((5, 2)), np.ones(2))
    with pytest.raises(InputError, match="x has shape"):
        gaussian.log_density(np.zeros((1, 2)))
