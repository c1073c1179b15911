"""Counted positions and their batches: nothing lost, nothing twice, nothing that depends on the batching."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.data.positions import Positions, calibration_rows, find_positions, in_batches
from layerflow.data.windows import Windows
from layerflow.errors import InputError

VOCABULARY_SIZE = 12
SPECIAL = frozenset({0})


def make_windows(rows: list[list[int]]) -> Windows:
    lengths = np.array([len(row) for row in rows])
    return Windows(
        ids=np.concatenate(rows).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        documents=np.arange(len(rows)),
        n_documents_read=len(rows),
        n_documents_short=0,
        n_documents_used=len(rows),
        n_documents_truncated=0,
        n_documents_replaced=0,
    )


def random_rows(n_rows: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY_SIZE, rng.integers(2, 20)).tolist() for _ in range(n_rows)]


def positions_of(rows: list[list[int]], *, min_count: int = 1, n_samples: int = 0, seed: int = 0) -> Positions:
    return find_positions(
        make_windows(rows),
        SPECIAL,
        VOCABULARY_SIZE,
        min_count=min_count,
        skip_positions=0,
        n_samples=n_samples,
        seed=seed,
    )


def all_positions(positions: Positions, batch_tokens: int) -> set[tuple[int, int, int, bool, int]]:
    """Every counted position as (row, position, token id of the target, half, place in the sample)."""
    found = []
    for rows in in_batches(positions.windows, np.arange(len(positions.windows)), batch_tokens):
        batch = positions.batch(rows, pad_id=1)
        row, column = np.divmod(batch.positions, batch.input_ids.shape[1])
        targets = positions.token_ids[batch.targets]
        found += zip(
            batch.rows[row].tolist(),
            column.tolist(),
            targets.tolist(),
            batch.half_a.tolist(),
            batch.samples.tolist(),
            strict=True,
        )
    assert len(found) == len(set(found))
    return set(found)


def test_positions_are_those_before_kept_targets() -> None:
    rows = [[3, 3, 4, 0, 3, 3], [4, 3], [5, 6, 3]]
    # Targets: 3 4 (0 and what follows it never), 3; 3; 6 3. Token 3 occurs 4 times, 4 and 6 once.
    assert positions_of(rows, min_count=2).token_ids.tolist() == [3]
    found = {(row, position, target) for row, position, target, _, _ in all_positions(positions_of(rows), 6)}
    assert found == {(0, 0, 3), (0, 1, 4), (0, 4, 3), (1, 0, 3), (2, 0, 6), (2, 1, 3)}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 100))
def test_positions_do_not_depend_on_the_batching(seed: int, batch_tokens: int) -> None:
    positions = positions_of(random_rows(15, seed), n_samples=20, seed=seed)
    assert all_positions(positions, batch_tokens) == all_positions(positions, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(20, 100))
def test_batches_hold_every_row_once_within_the_budget(seed: int, batch_tokens: int) -> None:
    windows = make_windows(random_rows(40, seed))
    batches = list(in_batches(windows, np.arange(40), batch_tokens))
    assert sorted(np.concatenate(batches).tolist()) == list(range(40))
    assert all(len(rows) * windows.lengths[rows].max() <= batch_tokens for rows in batches)
    lengths = [windows.lengths[rows].max() for rows in batches]
    assert lengths == sorted(lengths, reverse=True)


def test_batch_of_a_row_beyond_the_budget_is_that_row() -> None:
    windows = make_windows([[2] * 9, [2] * 3, [2] * 3])
    assert [rows.tolist() for rows in in_batches(windows, np.arange(3), 6)] == [[0], [1, 2]]


def test_padding_is_on_the_right_and_masked() -> None:
    batch = positions_of([[3, 4, 5], [6, 7]]).batch(np.array([0, 1]), pad_id=11)
    assert batch.input_ids.tolist() == [[3, 4, 5], [6, 7, 11]]
    assert batch.mask.tolist() == [[True, True, True], [True, True, False]]


def test_halves_are_fair_and_differ_between_rows() -> None:
    rows = [[2] * 50 for _ in range(100)]
    half_a = positions_of(rows).batch(np.arange(100), pad_id=1).half_a
    # Binomial with n = 4,900: four standard errors.
    assert abs(half_a.mean() - 0.5) < 4 * 0.5 / np.sqrt(half_a.size)
    by_row = half_a.reshape(100, 49).mean(axis=1)
    assert 0.5 < by_row.std() / (0.5 / np.sqrt(49)) < 1.5


def test_sample_is_uniform_over_positions() -> None:
    rows = random_rows(6, seed=1)
    n_positions = int(positions_of(rows).counted.sum())
    n_draws, n_samples = 400, 5
    hits = np.zeros(n_positions)
    ordinal = np.cumsum(positions_of(rows).counted) - 1
    for seed in range(n_draws):
        sampled = positions_of(rows, n_samples=n_samples, seed=seed).sampled
        assert len(np.unique(sampled)) == n_samples
        hits[ordinal[sampled]] += 1
    expected = n_draws * n_samples / n_positions
    chi_square = ((hits - expected) ** 2 / expected).sum()
    # Of n - 1 degrees of freedom: mean n - 1, standard deviation sqrt(2 (n - 1)); four of them.
    assert chi_square < n_positions - 1 + 4 * np.sqrt(2 * (n_positions - 1))


def test_sample_of_more_than_there_is_takes_all() -> None:
    positions = positions_of(random_rows(3), n_samples=10_000)
    assert np.array_equal(positions.sampled, np.flatnonzero(positions.counted))
    places = [place for *_, place in all_positions(positions, 30)]
    assert sorted(places) == list(range(len(positions.sampled)))


def test_min_count_nobody_reaches() -> None:
    with pytest.raises(InputError, match=r"--min-count 9: .* most frequent one occurs 2 times"):
        positions_of([[2, 3, 3]], min_count=9)


def test_calibration_rows_hold_the_tokens_asked_for() -> None:
    windows = make_windows(random_rows(200))
    rows = calibration_rows(windows, 0, 300)
    total = windows.lengths[rows].sum()
    assert 300 <= total < 300 + 20
    assert len(np.unique(rows)) == len(rows)
    assert not np.array_equal(rows, calibration_rows(windows, 1, 300))
    assert len(calibration_rows(windows, 0, 10**6)) == 200
