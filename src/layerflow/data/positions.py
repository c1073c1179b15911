"""Which positions are counted, to which half and sample each goes, and in which batches the model reads them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64

from layerflow.data.windows import Windows, count_targets, target_mask
from layerflow.errors import InputError

# One independent random stream for each purpose, so that none moves when another draws more.
_HALVES, _SAMPLES, _CALIBRATION = range(3)
_LOCATE_BLOCK = 1 << 24


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows the model reads at once, padded on the right, and the counted positions among them.

    Attributes:
        rows: the rows, as numbered in `Windows`.
        lengths: real tokens of each row.
        input_ids: ids, the pad id beyond a row's length.
        positions: the counted positions in row-major order, as indices into the flattened (b · t) batch.
        targets: for each, the row in the token table of the token about to be produced.
        half_a: for each, whether the occurrence falls into half A.
        samples: for each, its place among the sampled positions, or -1.
    """

    rows: Int64[np.ndarray, " b"]
    lengths: Int64[np.ndarray, " b"]
    input_ids: Int64[np.ndarray, "b t"]
    positions: Int64[np.ndarray, " m"]
    targets: Int64[np.ndarray, " m"]
    half_a: Bool[np.ndarray, " m"]
    samples: Int64[np.ndarray, " m"]

    @property
    def mask(self) -> Bool[np.ndarray, "b t"]:
        """Where the batch holds a token rather than padding."""
        return np.arange(self.input_ids.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True, eq=False)
class Positions:
    """The counted positions of a corpus: those from which the model is about to produce a kept token.

    Nothing here depends on how rows are batched, sharded or resumed: a half is drawn by a generator seeded with the
    row's number, and the sampled positions are drawn among all of them before the model reads any.

    Attributes:
        windows: the rows of the whole corpus.
        token_ids: the vocabulary ids of the kept tokens, ascending; the token table's rows.
        row_of: the token table's row of each vocabulary id, -1 where it is not kept.
        counted: for each id of ``windows.ids``, whether it is the target of a counted position.
        sampled: the sampled targets, as ascending indices into ``windows.ids``.
        seed: what the halves are drawn with.
    """

    windows: Windows
    token_ids: Int64[np.ndarray, " n"]
    row_of: Int32[np.ndarray, " V"]
    counted: Bool[np.ndarray, " t"]
    sampled: Int64[np.ndarray, " samples"]
    seed: int

    @property
    def n_first(self) -> int:
        """The number of tokens whose trajectory a first position of a row enters: sinks for certain."""
        starts = self.windows.offsets[:-1] + 1
        return len(np.unique(self.windows.ids[starts[self.counted[starts]]]))

    def batch(self, rows: Int64[np.ndarray, " b"], pad_id: int) -> Batch:
        """Lay the given rows out as one batch."""
        offsets = self.windows.offsets
        lengths = offsets[rows + 1] - offsets[rows]
        columns = np.arange(lengths.max())
        real = columns < lengths[:, None]
        source = np.where(real, offsets[rows, None] + columns, 0)
        half_a = np.zeros(source.shape, dtype=bool)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            half_a[index, :length] = _generator(self.seed, _HALVES, int(row)).random(length) < 0.5
        is_target = real & self.counted[source]
        targets = source[is_target]
        return Batch(
            rows=rows,
            lengths=lengths,
            input_ids=np.where(real, self.windows.ids[source], pad_id).astype(np.int64),
            # The state that is about to produce column i is that of column i - 1; column 0 is never a target.
            positions=np.flatnonzero(is_target) - 1,
            targets=self.row_of[self.windows.ids[targets]].astype(np.int64),
            half_a=half_a[is_target],
            samples=_places(self.sampled, targets),
        )


def find_positions(
    windows: Windows,
    special_ids: frozenset[int],
    vocabulary_size: int,
    *,
    min_count: int,
    skip_positions: int,
    n_samples: int,
    seed: int,
) -> Positions:
    """Count the targets of the whole corpus and keep the tokens that occur often enough: the first pass.

    Args:
        windows: the rows of the whole corpus.
        special_ids: ids that never count, neither as target nor as predecessor.
        vocabulary_size: size of the model's vocabulary.
        min_count: occurrences a token needs.
        skip_positions: positions at the start of each row that are not counted.
        n_samples: how many single positions to draw, uniformly and without replacement; all when there are fewer.
        seed: seeds the halves and the sample.

    Raises:
        InputError: No token occurs ``min_count`` times.

    Reference: SPEC section 2.
    """
    counts = count_targets(windows, special_ids, vocabulary_size, skip_positions=skip_positions)
    token_ids = np.flatnonzero(counts >= min_count)
    if len(token_ids) == 0:
        raise InputError(
            f"--min-count {min_count}: no token occurs that often (the most frequent one occurs "
            f"{int(counts.max()):,} times); lower --min-count or give more text"
        )
    row_of = np.full(vocabulary_size, -1, np.int32)
    row_of[token_ids] = np.arange(len(token_ids))
    counted = target_mask(windows, special_ids, vocabulary_size, skip_positions=skip_positions)
    counted &= row_of[windows.ids] >= 0
    n_counted = int(counts[token_ids].sum())
    ordinals = _generator(seed, _SAMPLES).choice(n_counted, min(n_samples, n_counted), replace=False)
    return Positions(windows, token_ids, row_of, counted, _locate(counted, np.sort(ordinals)), seed)


def in_batches(
    windows: Windows, rows: Int64[np.ndarray, " rows"], batch_tokens: int
) -> Iterator[Int64[np.ndarray, " b"]]:
    """Yield rows in batches of at most ``batch_tokens`` tokens, padding included, a row at least.

    The longest rows come first, equals in corpus order: little is padded, what does not fit into memory fails at
    once, and the estimate of the time left errs on the safe side. The order depends on nothing but the arguments, so
    the number of batches done is all that a resumed collection has to know.
    """
    lengths = windows.offsets[rows + 1] - windows.offsets[rows]
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // int(lengths[order[start]]))
        yield rows[order[start : start + size]]
        start += size


def calibration_rows(windows: Windows, seed: int, n_tokens: int) -> Int64[np.ndarray, " rows"]:
    """Draw rows uniformly until they hold ``n_tokens`` tokens, or all rows; what the median norms are read from."""
    n_rows = len(windows)
    rows = _generator(seed, _CALIBRATION).choice(n_rows, min(n_rows, n_tokens), replace=False)
    tokens = np.cumsum(windows.offsets[rows + 1] - windows.offsets[rows])
    return np.sort(rows[: np.searchsorted(tokens, n_tokens) + 1])


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _locate(counted: np.ndarray, ordinals: np.ndarray) -> np.ndarray:
    """Turn ascending ordinals among the counted positions into indices; in blocks, to spare 8 bytes a token."""
    found, before = [], 0
    for start in range(0, len(counted), _LOCATE_BLOCK):
        here = np.flatnonzero(counted[start : start + _LOCATE_BLOCK])
        first, last = np.searchsorted(ordinals, [before, before + len(here)])
        found.append(start + here[ordinals[first:last] - before])
        before += len(here)
    return np.concatenate(found)


def _places(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return where each value stands in an ascending array, -1 where it does not."""
    if len(ascending) == 0:
        return np.full(len(values), -1, np.int64)
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.where(ascending[places] == values, places, -1)
