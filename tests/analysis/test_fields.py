import numpy as np
import pytest
from sklearn.decomposition import PCA
from tests.flows import rotation

from layerflow.analysis.fields import MIN_SUPPORT, N_BINS, Plane, field_arrows, in_plane_curvature, leading_plane
from layerflow.laws.drift import PolynomialDrift

D = 4
FLAT = Plane(np.zeros(2), np.eye(2))


@pytest.fixture
def cloud():
    """A Gaussian off the origin, its axes turned against the coordinates."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((600, D)) * np.array([3.0, 2.0, 0.5, 0.2]) @ rotation(D, rng).T + 10.0


def test_the_leading_plane_is_that_of_principal_components(cloud):
    plane, oracle = leading_plane(cloud), PCA(2).fit(cloud)
    np.testing.assert_allclose(plane.axes @ plane.axes.T, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(np.abs(np.sum(plane.axes * oracle.components_, axis=1)), 1.0, atol=1e-10)
    np.testing.assert_allclose(np.abs(plane(cloud)), np.abs(oracle.transform(cloud)), atol=1e-10)
    assert plane(cloud).var(axis=0)[0] > plane(cloud).var(axis=0)[1]


def quadratic(rng: np.random.Generator) -> PolynomialDrift:
    return PolynomialDrift(rng.standard_normal(((D + 1) * (D + 2) // 2, D)), 2)


def test_curvature_is_the_hessian_along_the_plane(cloud):
    """A quadratic drift's second-order part at c + x is x·H·x/2, and here only its in-plane part counts."""
    rng = np.random.default_rng(1)
    drift, plane = quadratic(rng), leading_plane(cloud)
    upper = np.zeros((D, D, D))
    upper[np.triu_indices(D)] = drift.coefficients[1 + D :]
    inside = (cloud - plane.center) @ plane.axes.T @ plane.axes
    bend = np.einsum("ni,ije,nj->ne", inside, upper, inside) @ plane.axes.T
    dz = rng.standard_normal(cloud.shape) * np.array([1.0, 5.0, 0.3, 2.0]) + 7.0
    moved = (dz - dz.mean(axis=0)) @ plane.axes.T
    expected = np.sqrt((bend**2).sum() / (moved**2).sum())
    assert in_plane_curvature(drift, cloud, dz, plane) == pytest.approx(expected, rel=1e-9)


def test_curvature_ignores_translation_and_linear_parts(cloud):
    rng = np.random.default_rng(2)
    plane, dz = leading_plane(cloud), rng.standard_normal(cloud.shape)
    straight = PolynomialDrift.affine(rng.standard_normal(D), rng.standard_normal((D, D)))
    assert in_plane_curvature(straight, cloud, dz, plane) == pytest.approx(0.0, abs=1e-10)
    bent = quadratic(rng)

    def both(z: np.ndarray) -> np.ndarray:
        return straight(z) + bent(z)

    assert in_plane_curvature(both, cloud, dz, plane) == pytest.approx(in_plane_curvature(bent, cloud, dz, plane))


def test_curvature_across_the_plane_does_not_count(cloud):
    """Bending that depends on, or points in, a direction off the plane only."""
    plane = leading_plane(cloud)
    across = np.linalg.svd(plane.axes)[2][-1]

    def depends(z: np.ndarray) -> np.ndarray:
        return ((z - plane.center) @ across)[:, None] ** 2 * plane.axes[0]

    def points(z: np.ndarray) -> np.ndarray:
        return ((z - plane.center) @ plane.axes[0])[:, None] ** 2 * across

    dz = np.random.default_rng(3).standard_normal(cloud.shape)
    assert in_plane_curvature(depends, cloud, dz, plane) == pytest.approx(0.0, abs=1e-10)
    assert in_plane_curvature(points, cloud, dz, plane) == pytest.approx(0.0, abs=1e-10)


def arrows_by_series(arrows):
    series: dict[str, dict[tuple[float, float], object]] = {}
    for arrow in arrows:
        series.setdefault(arrow.series, {})[round(arrow.x, 9), round(arrow.y, 9)] = arrow
    return series


def test_arrows_are_means_over_the_tokens_of_each_bin(cloud):
    rng = np.random.default_rng(4)
    plane, drift = leading_plane(cloud), quadratic(rng)
    dz = rng.standard_normal(cloud.shape)
    found = arrows_by_series(field_arrows({"quadratic": drift}, cloud, dz, plane, transition=5))
    where = plane(cloud)
    edges = [np.linspace(*np.quantile(where[:, axis], [0.01, 0.99]), N_BINS + 1) for axis in (0, 1)]
    n_arrows = 0
    for column in range(N_BINS):
        for row in range(N_BINS):
            inside = np.ones(len(cloud), bool)
            for axis, index in ((0, column), (1, row)):
                inside &= (where[:, axis] >= edges[axis][index]) & (where[:, axis] < edges[axis][index + 1])
            center = tuple(round(edges[axis][[index, index + 1]].mean(), 9) for axis, index in ((0, column), (1, row)))
            if inside.sum() < MIN_SUPPORT:
                assert all(center not in arrows for arrows in found.values()), "a bin without support is masked"
                continue
            n_arrows += 1
            for series, steps in (("observed", dz), ("quadratic", drift(cloud))):
                arrow = found[series][center]
                expected = (steps @ plane.axes.T)[inside].mean(axis=0)
                assert (arrow.u, arrow.v) == pytest.approx(tuple(expected), rel=1e-9)
                assert (arrow.n, arrow.transition, arrow.state) == (inside.sum(), 5, 5)
    assert n_arrows == len(found["observed"]) == len(found["quadratic"]) > 20


def test_a_drift_that_is_the_step_draws_the_observed_arrows():
    """A linear field on a plane: the mean step of a bin is the field's mean there, for the data and for the drift."""
    rng = np.random.default_rng(5)
    z = rng.uniform(-1, 1, (4000, 2))
    turn = np.array([[0.0, -1.0], [1.0, 0.5]])

    def drift(states: np.ndarray) -> np.ndarray:
        return states @ turn.T

    found = arrows_by_series(field_arrows({"affine": drift}, z, drift(z), FLAT, transition=0))
    assert found["observed"].keys() == found["affine"].keys()
    for center, arrow in found["observed"].items():
        assert (arrow.u, arrow.v) == pytest.approx((found["affine"][center].u, found["affine"][center].v))
        # Tokens lie within half a bin of its centre, and the field changes by at most 1.5 a unit.
        assert (arrow.u, arrow.v) == pytest.approx(tuple(turn @ center), abs=1.5 / N_BINS)


def test_outliers_do_not_stretch_the_grid():
    rng = np.random.default_rng(6)
    z = rng.uniform(-1, 1, (3000, 2))
    dz = rng.standard_normal((3000, 2))
    z[:10] *= 1000.0
    found = arrows_by_series(field_arrows({}, z, dz, FLAT, transition=0))["observed"]
    assert len(found) > 0.9 * N_BINS**2
    assert np.abs(list(found)).max() < 1.0


def test_too_few_tokens_leave_no_arrow():
    z = np.random.default_rng(7).standard_normal((MIN_SUPPORT - 1, 2))
    assert field_arrows({}, z, z, FLAT, transition=0) == []


def test_signs_of_the_axes_do_not_move_arrows_relative_to_tokens(cloud):
    """Turning the plane's axes round turns positions and steps alike."""
    dz = np.random.default_rng(8).standard_normal(cloud.shape)
    plane = leading_plane(cloud)
    mirrored = Plane(plane.center, -plane.axes)
    ours = field_arrows({}, cloud, dz, plane, transition=0)
    theirs = arrows_by_series(field_arrows({}, cloud, dz, mirrored, transition=0))["observed"]
    matched = [theirs[round(-arrow.x, 9) + 0.0, round(-arrow.y, 9) + 0.0] for arrow in ours]
    np.testing.assert_allclose([(-arrow.u, -arrow.v) for arrow in ours], [(other.u, other.v) for other in matched])
