import numpy as np
import pytest
import scipy.stats

from layerflow.analysis.conserved import conserved, local_density, observables
from layerflow.errors import InputError
from layerflow.numerics.neighbors import nearest


def flow(n=700, width=12, n_states=4):
    """Anisotropic clouds, each turned and stretched by its own matrix, with a mean and a few outliers."""
    rng = np.random.default_rng(0)
    states = [rng.standard_normal((n, width)) * np.geomspace(8, 0.1, width) + 3.0]
    for _ in range(n_states - 1):
        matrix = np.eye(width) + 0.4 * rng.standard_normal((width, width))
        states.append(states[-1] @ matrix.T + 0.5 * rng.standard_normal((n, width)))
    states = np.array(states)
    states[:, :5] *= 40
    return states


def test_observables_by_hand():
    state = np.array([[3.0, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, -2.0, 0.0, 0.0]])
    seen = observables(state)
    direction = np.array([4.0, 3.0, 1.0, 1.0]) / np.sqrt(27)
    assert seen.norm == pytest.approx([5, 2, 0, 2])
    assert seen.cosine == pytest.approx([24 / 5 / np.sqrt(27), 9 / 2 / np.sqrt(27), 0, -direction[1]])
    assert seen.participation_ratio == pytest.approx([625 / 337, 4, 0, 1])


def test_observables_leave_their_input_alone_and_do_not_depend_on_blocks():
    state = flow(n=1300)[1]
    before = state.copy()
    seen = observables(state)
    assert np.array_equal(state, before)
    mean = state.mean(axis=0)
    cosine = state @ mean / np.linalg.norm(mean) / np.linalg.norm(state, axis=1)
    ratio = (state**2).sum(axis=1) ** 2 / (state**4).sum(axis=1)
    np.testing.assert_allclose(seen.cosine, cosine, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(seen.norm, np.linalg.norm(state, axis=1), rtol=1e-12)
    np.testing.assert_allclose(seen.participation_ratio, ratio, rtol=1e-11)


def test_large_float32_states_do_not_overflow():
    # ‖h‖⁴ of an attention sink is beyond float32.
    state = np.full((3, 4), 1e12, np.float32)
    assert observables(state).participation_ratio == pytest.approx([4, 4, 4])


def test_against_scipy(tmp_path):
    states = flow()
    np.save(tmp_path / "states.npy", states.astype(np.float32))
    mapped = np.load(tmp_path / "states.npy", mmap_mode="r")
    distances = np.stack([nearest(state[:, :3], 48).distances[:, -1] for state in states])
    rows = conserved(mapped, distances)

    means = states.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(states, axis=2)
    expected = {
        "cosine": (states * means).sum(axis=2) / norm / np.linalg.norm(means, axis=2),
        "norm": norm,
        "participation_ratio": (states**2).sum(axis=2) ** 2 / (states**4).sum(axis=2),
        "local_density": -np.log(distances),
    }
    assert [row.observable for row in rows] == [name for name in expected for _ in states]
    for row in rows:
        values = expected[row.observable]
        first = scipy.stats.spearmanr(values[0], values[row.state]).statistic
        assert row.from_first == pytest.approx(first, abs=1e-5)
        if row.state:
            previous = scipy.stats.spearmanr(values[row.state - 1], values[row.state]).statistic
            assert row.from_previous == pytest.approx(previous, abs=1e-5)
            assert abs(row.from_first) < 0.999
        else:
            assert row.from_first == pytest.approx(1.0, abs=1e-12)
            assert row.from_previous is None


def test_a_rotation_keeps_norms_and_reversal_reverses_them():
    rng = np.random.default_rng(1)
    first = rng.standard_normal((300, 6)) * np.geomspace(3, 0.3, 6)
    turned = first @ np.linalg.qr(rng.standard_normal((6, 6)))[0]
    inverted = first / np.linalg.norm(first, axis=1, keepdims=True) ** 2
    rows = conserved(np.array([first, turned, inverted]), np.ones((3, 300)) * rng.random(300))
    norm = {row.state: row for row in rows if row.observable == "norm"}
    assert norm[1].from_first == pytest.approx(1.0)
    assert norm[2].from_first == pytest.approx(-1.0)
    assert norm[2].from_previous == pytest.approx(-1.0)
    density = {row.state: row for row in rows if row.observable == "local_density"}
    assert density[2].from_first == pytest.approx(1.0)


def test_what_does_not_vary_has_no_rank():
    states = np.ones((2, 5, 3))
    rows = conserved(states, np.tile(np.arange(5.0), (2, 1)))
    assert [row.from_first for row in rows if row.observable == "norm"] == [None, None]
    assert [row.from_first for row in rows if row.observable == "local_density"] == pytest.approx([1.0, 1.0])
    alone = conserved(states[:, :1], np.ones((2, 1)))
    assert {row.from_first for row in alone} == {None}


def test_copies_of_a_token_tie_as_the_densest():
    density = local_density(np.array([1.0, 0.0, np.e, 0.0]))
    assert density[1] == density[3] == density.max()
    assert density[[0, 2]] == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_distances_that_are_none_are_refused(bad):
    with pytest.raises(InputError, match="finite and not negative"):
        local_density(np.array([1.0, bad]))


@pytest.mark.usefixtures("untyped")
def test_distances_of_another_shape_are_refused():
    with pytest.raises(InputError, match=r"\(2, 4\).*\(3, 5\)"):
        conserved(np.ones((3, 5, 2)), np.ones((2, 4)))
