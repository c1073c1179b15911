"""Sums by token: adding batch by batch, and merging in any grouping and order, equals direct sums."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.data.accumulator import Accumulator
from layerflow.data.reduce import BatchSamples, BatchSums, Reduced

N_STATES, N_TOKENS, WIDTH = 3, 7, 4


def make_sums(rng: np.random.Generator, rows: np.ndarray) -> BatchSums:
    # Multiples of 1/8 below 2^10: every sum of them is exact, so results are equal whatever the order.
    def values() -> torch.Tensor:
        return torch.from_numpy(rng.integers(-8192, 8192, (len(rows), WIDTH)).astype(np.float32) / 8)

    counts = rng.integers(1, 5, len(rows))
    count_a = rng.integers(0, counts + 1)
    return BatchSums(rows, counts, count_a, [values() for _ in range(N_STATES)], values())


def make_batches(seed: int, n_batches: int) -> list[Reduced]:
    rng = np.random.default_rng(seed)
    places = np.array_split(rng.permutation(5 * n_batches), n_batches)
    batches = []
    for index in range(n_batches):
        ordinary, sinks = (np.flatnonzero(rng.random(N_TOKENS) < share) for share in (0.6, 0.2))
        m = int(rng.integers(1, 6))
        k = len(places[index])
        batches.append(
            Reduced(
                ordinary=make_sums(rng, ordinary),
                sinks=make_sums(rng, sinks),
                norms=rng.lognormal(size=(N_STATES, m)).astype(np.float32),
                is_sink=rng.random(m) < 0.3,
                samples=BatchSamples(
                    places[index],
                    np.zeros((N_STATES, k, WIDTH), np.float32),
                    rng.integers(0, N_TOKENS, k),
                    rng.random(k) < 0.5,
                ),
                left_out=np.array([index] if rng.random() < 0.3 else [], np.int64),
            )
        )
    return batches


def empty(n_batches: int, n_sink_slots: int = 0) -> Accumulator:
    return Accumulator.zeros(
        n_tokens=N_TOKENS,
        width=WIDTH,
        n_samples=5 * n_batches,
        n_sink_slots=n_sink_slots,
        medians=np.ones(N_STATES),
    )


def added(batches: list[Reduced], n_batches: int, n_sink_slots: int = 0) -> Accumulator:
    accumulator = empty(n_batches, n_sink_slots)
    for batch in batches:
        accumulator.add(batch)
    return accumulator


def dense(accumulator: Accumulator) -> dict[str, np.ndarray]:
    """Everything by name, sinks spread over all tokens, whatever slots they have."""
    rows = accumulator.sink_rows
    arrays = {
        name: array
        for name, array in accumulator.arrays().items()
        if not name.startswith("sinks") and name not in ("sink_slots", "left_out")
    }
    for name, array in accumulator.arrays().items():
        if name.startswith("sinks"):
            arrays[name] = np.zeros((N_TOKENS, *array.shape[1:]))
            arrays[name][rows] = array[: len(rows)]
    return arrays | {"left_out": np.sort(accumulator.left_out)}


def assert_same(a: Accumulator, b: Accumulator) -> None:
    ours, theirs = dense(a), dense(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_sums_are_direct() -> None:
    batches = make_batches(0, 6)
    accumulator = added(batches, 6)
    for kind in ("ordinary", "sinks"):
        parts = [getattr(batch, kind) for batch in batches]
        counts, sums = np.zeros(N_TOKENS), np.zeros((N_STATES, N_TOKENS, WIDTH))
        for part in parts:
            for index, row in enumerate(part.rows):
                counts[row] += part.counts[index]
                sums[:, row] += np.stack([state[index].numpy() for state in part.states])
        ours = dense(accumulator)
        np.testing.assert_array_equal(ours[f"{kind}.count"], counts)
        for state in range(N_STATES):
            np.testing.assert_array_equal(ours[f"{kind}.state.{state:03d}"], sums[state])
    assert (accumulator.sample_rows >= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 2), min_size=1, max_size=9), st.randoms())
def test_merged_is_direct_in_any_grouping_and_order(seed: int, owners: list[int], random: object) -> None:
    batches = make_batches(seed, len(owners))
    direct = added(batches, len(owners))
    parts = [
        added([batch for batch, owner in zip(batches, owners, strict=True) if owner == part], len(owners))
        for part in range(3)
    ]
    random.shuffle(parts)  # type: ignore[attr-defined]
    merged = empty(len(owners))
    for part in parts:
        merged.merge(part)
    assert_same(merged, direct)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, N_TOKENS))
def test_slots_taken_late_change_nothing(seed: int, n_sink_slots: int) -> None:
    batches = make_batches(seed, 5)
    assert_same(added(batches, 5, n_sink_slots), added(batches, 5, N_TOKENS))


def test_arrays_give_the_accumulator_back() -> None:
    batches = make_batches(1, 6)
    saved = {name: array.copy() for name, array in added(batches[:3], 6).arrays().items()}
    resumed = Accumulator.from_arrays(saved)
    for batch in batches[3:]:
        resumed.add(batch)
    whole = added(batches, 6)
    assert resumed.n_batches == whole.n_batches == 6
    assert_same(resumed, whole)
