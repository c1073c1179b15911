"""From the sums of a whole collection to the run directory. Imports torch, through the accumulator."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from layerflow.data.accumulator import Accumulator, TokenSums
from layerflow.data.samples import SampleFile
from layerflow.data.storage import Tensor
from layerflow.data.trajectories import COMPLETE, token_table, write_run
from layerflow.errors import InputError
from layerflow.progress import say

_BLOCK = 4096  # rows in memory at once, in float64


def finish(
    out: Path,
    accumulator: Accumulator,
    samples: SampleFile,
    tokens: pa.Table,
    manifest: Mapping[str, Any],
    *,
    min_count: int,
) -> Path:
    """Write means, halves, samples and sinks, and last the manifest; memory stays flat.

    Tokens that fell below ``min_count`` because rows were left out are dropped, and that is said.

    Args:
        out: the run directory.
        accumulator: the sums over all rows.
        samples: the states of the sampled positions.
        tokens: columns token_id and text, a row a token.
        manifest: what the manifest says beside what is computed here.
        min_count: occurrences a token needs.

    Raises:
        InputError: No token has ``min_count`` occurrences left.

    Reference: SPEC sections 2 and 7.
    """
    table = _Table(accumulator, min_count)
    n_left_out, n_dropped = len(accumulator.left_out), len(accumulator.sink_slots) - len(table.rows)
    if len(table.rows) == 0:
        raise InputError(
            f"{n_left_out:,} rows gave states that are not finite and were left out; no token keeps "
            f"--min-count {min_count} occurrences; try --dtype float32, or bfloat16 for float16"
        )
    if n_left_out:
        say(
            f"{n_left_out:,} rows with states that are not finite were left out (the manifest names them); "
            f"{n_dropped:,} tokens fell below {min_count} occurrences and were dropped"
        )
    described = {
        **manifest,
        "status": COMPLETE,
        "counts": {
            **manifest["counts"],
            "rows_left_out": n_left_out,
            "tokens_counted": len(accumulator.sink_slots),
            "tokens_kept": len(table.rows),
            "tokens_dropped": n_dropped,
            "positions": int(table.counts.sum()),
            "sink_positions": accumulator.norms.n_sinks,
            "samples": len(table.sample_places),
        },
        "norms": [dataclasses.asdict(norms) for norms in accumulator.norms.table(sinks=True)],
        "norms_without_sinks": [dataclasses.asdict(norms) for norms in accumulator.norms.table(sinks=False)],
    }
    files = {
        "states": table.means(),
        "halves": table.halves(),
        "samples": table.samples(samples),
        "sinks": table.sinks(),
    }
    texts, token_ids = (tokens[name].to_numpy(zero_copy_only=False)[table.rows] for name in ("text", "token_id"))
    return write_run(
        out,
        files,
        token_table(texts, table.counts, token_ids=token_ids.astype(np.int64), count_a=table.count_a),
        described,
    )


class _Table:
    """The kept tokens of an accumulator, as tensors that are computed while they are written."""

    def __init__(self, accumulator: Accumulator, min_count: int) -> None:
        self._of = accumulator
        slots = accumulator.sink_slots
        counts, count_a = accumulator.ordinary.counts.copy(), accumulator.ordinary.count_a.copy()
        counts[slots >= 0] += accumulator.sinks.counts[slots[slots >= 0]]
        count_a[slots >= 0] += accumulator.sinks.count_a[slots[slots >= 0]]
        self.rows = np.flatnonzero(counts >= min_count)
        self.counts, self.count_a = counts[self.rows], count_a[self.rows]
        self.sample_places = np.flatnonzero(np.isin(accumulator.sample_rows, self.rows))

    def means(self) -> dict[str, Tensor]:
        """States averaged over all positions, sinks included."""
        width = self._of.ordinary.half_a.shape[1]
        return {
            f"state.{state:03d}": Tensor((len(self.rows), width), np.float32, partial(self._means, state))
            for state in range(len(self._of.medians))
        }

    def halves(self) -> dict[str, Tensor]:
        """The final state averaged over each half; zero where a half has no occurrence."""
        shape = (len(self.rows), self._of.ordinary.half_a.shape[1])
        return {half: Tensor(shape, np.float32, partial(self._half, half)) for half in ("a", "b")}

    def sinks(self) -> dict[str, Tensor]:
        """Sums over sinks, for the kept tokens they touch."""
        slots = self._of.sink_slots[self.rows]
        touched, slots = np.flatnonzero(slots >= 0), slots[slots >= 0]
        sums = self._of.sinks
        shape = (len(slots), sums.half_a.shape[1])
        named = {f"state.{state:03d}": total for state, total in enumerate(sums.states)}
        return {
            **{
                name: Tensor(shape, np.float32, partial(_in_blocks, total, slots))
                for name, total in {**named, "half_a": sums.half_a}.items()
            },
            "row": Tensor.of(touched),
            "count": Tensor.of(sums.counts[slots]),
            "count_a": Tensor.of(sums.count_a[slots]),
        }

    def samples(self, file: SampleFile) -> dict[str, Tensor]:
        """The states of the sampled positions that were read and whose token is kept."""
        places = self.sample_places
        shape = (len(places), file.width)

        def states(state: int) -> Iterator[np.ndarray]:
            return _in_blocks(file.read(state), places)

        return {
            **{
                f"state.{state:03d}": Tensor(shape, np.float32, partial(states, state))
                for state in range(file.n_states)
            },
            "row": Tensor.of(np.searchsorted(self.rows, self._of.sample_rows[places])),
            "sink": Tensor.of(self._of.sample_sinks[places]),
        }

    def _means(self, state: int) -> Iterator[np.ndarray]:
        for block in self._blocks():
            yield self._total(lambda sums: sums.states[state], block) / self.counts[block, None]

    def _half(self, half: str) -> Iterator[np.ndarray]:
        counts = self.count_a if half == "a" else self.counts - self.count_a
        for block in self._blocks():
            total = self._total(lambda sums: sums.half_a, block)
            if half == "b":
                total = self._total(lambda sums: sums.states[-1], block) - total
            # An empty half leaves the rounding of a difference that should be zero.
            total[counts[block] == 0] = 0.0
            yield total / np.maximum(counts[block, None], 1)

    def _total(self, of: Callable[[TokenSums], np.ndarray], block: slice) -> np.ndarray:
        """Some sums over sinks and ordinary positions together, for a block of kept tokens."""
        rows = self.rows[block]
        total = of(self._of.ordinary)[rows]
        slots = self._of.sink_slots[rows]
        total[slots >= 0] += of(self._of.sinks)[slots[slots >= 0]]
        return total

    def _blocks(self) -> Iterator[slice]:
        return (slice(start, start + _BLOCK) for start in range(0, len(self.rows), _BLOCK))


def _in_blocks(values: np.ndarray, index: np.ndarray) -> Iterator[np.ndarray]:
    return (values[index[start : start + _BLOCK]] for start in range(0, len(index), _BLOCK))
