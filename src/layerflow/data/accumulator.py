"""What a collection adds up: sums by token in float64, sinks apart, and counts. Imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64

from layerflow.data.reduce import BatchSums, Reduced
from layerflow.data.sinks import NormCounts


@dataclass(eq=False)
class TokenSums:
    """Sums over positions, a slot a token: of every state, and of the final state over half A.

    Attributes:
        counts: positions behind each slot's sums.
        count_a: those of half A among them.
        states: the sums, one array a state.
        half_a: the final state's sums over half A.
    """

    counts: Int64[np.ndarray, " slots"]
    count_a: Int64[np.ndarray, " slots"]
    states: list[Float64[np.ndarray, "slots D"]]
    half_a: Float64[np.ndarray, "slots D"]

    @classmethod
    def zeros(cls, n_states: int, n_slots: int, width: int) -> "TokenSums":
        """Return sums of nothing."""
        return cls(
            np.zeros(n_slots, np.int64),
            np.zeros(n_slots, np.int64),
            [np.zeros((n_slots, width)) for _ in range(n_states)],
            np.zeros((n_slots, width)),
        )

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.counts)

    def add(self, slots: Int64[np.ndarray, " u"], sums: BatchSums) -> None:
        """Add a batch's sums to slots that are all different."""
        self.counts[slots] += sums.counts
        self.count_a[slots] += sums.count_a
        index = torch.from_numpy(slots)
        for total, part in zip((*self.states, self.half_a), (*sums.states, sums.half_a), strict=True):
            # Under half the time of `total[slots] += part`, which gathers, adds and scatters.
            torch.from_numpy(total).index_add_(0, index, part.double())

    def merge(self, slots: Int64[np.ndarray, " u"], other: "TokenSums") -> None:
        """Add another's first sums to slots that are all different, one state after the other."""
        n_slots = len(slots)
        self.counts[slots] += other.counts[:n_slots]
        self.count_a[slots] += other.count_a[:n_slots]
        for total, part in zip((*self.states, self.half_a), (*other.states, other.half_a), strict=True):
            total[slots] += part[:n_slots]

    def extend(self, n_slots: int) -> None:
        """Append empty slots, one state after the other, so that only one is in memory twice."""
        self.counts = np.append(self.counts, np.zeros(n_slots, np.int64))
        self.count_a = np.append(self.count_a, np.zeros(n_slots, np.int64))
        empty = np.zeros((n_slots, self.half_a.shape[1]))
        for state, total in enumerate(self.states):
            self.states[state] = np.concatenate([total, empty])
        self.half_a = np.concatenate([self.half_a, empty])


@dataclass(eq=False)
class Accumulator:
    """The additive state of a collection: adding batches, or merging accumulators, gives that of all their rows.

    Attributes:
        ordinary: sums over positions that are no sinks; slot = row of the token table.
        sinks: sums over sinks; tokens take slots as they turn up.
        sink_slots: the slot of each row of the token table, -1 while it has none.
        norms: counts of the norms of every state.
        medians: each state's calibrated median norm, which says what is a sink.
        sample_rows: the row of each sampled position's target, -1 where it was not read.
        sample_sinks: whether it is a sink.
        left_out: rows of `Windows` left out for a state that is not finite.
        n_batches: batches added so far.
    """

    ordinary: TokenSums
    sinks: TokenSums
    sink_slots: Int64[np.ndarray, " n"]
    norms: NormCounts
    medians: Float64[np.ndarray, " states"]
    sample_rows: Int64[np.ndarray, " samples"]
    sample_sinks: Bool[np.ndarray, " samples"]
    left_out: Int64[np.ndarray, " r"]
    n_batches: int

    @classmethod
    def zeros(
        cls, *, n_tokens: int, width: int, n_samples: int, n_sink_slots: int, medians: Float[np.ndarray, " states"]
    ) -> "Accumulator":
        """Return an accumulator of nothing.

        Args:
            n_tokens: rows of the token table.
            width: the model's hidden size.
            n_samples: sampled positions.
            n_sink_slots: tokens that sinks are expected to touch; more are taken as needed.
            medians: each state's calibrated median norm.
        """
        n_states = len(medians)
        return cls(
            ordinary=TokenSums.zeros(n_states, n_tokens, width),
            sinks=TokenSums.zeros(n_states, n_sink_slots, width),
            sink_slots=np.full(n_tokens, -1, np.int64),
            norms=NormCounts.zeros(n_states),
            medians=np.asarray(medians, np.float64),
            sample_rows=np.full(n_samples, -1, np.int64),
            sample_sinks=np.zeros(n_samples, bool),
            left_out=np.zeros(0, np.int64),
            n_batches=0,
        )

    @property
    def sink_rows(self) -> Int64[np.ndarray, " r"]:
        """The rows of the token table that sinks touch, in the order of their slots."""
        rows: np.ndarray = np.flatnonzero(self.sink_slots >= 0)
        return rows[np.argsort(self.sink_slots[rows])]

    def add(self, batch: Reduced) -> None:
        """Add one batch."""
        self.ordinary.add(batch.ordinary.rows, batch.ordinary)
        self.sinks.add(self._slots(batch.sinks.rows), batch.sinks)
        self.norms.update(batch.norms, batch.is_sink, self.medians)
        self.sample_rows[batch.samples.places] = batch.samples.rows
        self.sample_sinks[batch.samples.places] = batch.samples.sinks
        self.left_out = np.append(self.left_out, batch.left_out)
        self.n_batches += 1

    def merge(self, other: "Accumulator") -> None:
        """Add what another accumulator of the same tokens and samples has read from other rows."""
        self.ordinary.merge(np.arange(len(self.ordinary)), other.ordinary)
        self.sinks.merge(self._slots(other.sink_rows), other.sinks)
        self.norms.merge(other.norms)
        read = other.sample_rows >= 0
        self.sample_rows[read] = other.sample_rows[read]
        self.sample_sinks[read] = other.sample_sinks[read]
        self.left_out = np.append(self.left_out, other.left_out)
        self.n_batches += other.n_batches

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything as named arrays, without a copy; what `from_arrays` takes."""
        named = {
            "sink_slots": self.sink_slots,
            "norms.bins": self.norms.bins,
            "norms.maxima": self.norms.maxima,
            "norms.n_over": self.norms.n_over,
            "medians": self.medians,
            "sample_rows": self.sample_rows,
            "sample_sinks": self.sample_sinks,
            "left_out": self.left_out,
            "n_batches": np.array([self.n_batches]),
        }
        for kind, sums in (("ordinary", self.ordinary), ("sinks", self.sinks)):
            named |= {f"{kind}.state.{state:03d}": total for state, total in enumerate(sums.states)}
            named |= {f"{kind}.half_a": sums.half_a, f"{kind}.count": sums.counts, f"{kind}.count_a": sums.count_a}
        return named

    @classmethod
    def from_arrays(cls, named: Mapping[str, np.ndarray]) -> "Accumulator":
        """Return the accumulator that `arrays` came from; it takes the arrays as they are, memory maps too."""
        n_states = len(named["medians"])
        ordinary, sinks = (
            TokenSums(
                named[f"{kind}.count"],
                named[f"{kind}.count_a"],
                [named[f"{kind}.state.{state:03d}"] for state in range(n_states)],
                named[f"{kind}.half_a"],
            )
            for kind in ("ordinary", "sinks")
        )
        return cls(
            ordinary,
            sinks,
            named["sink_slots"],
            NormCounts(named["norms.bins"], named["norms.maxima"], named["norms.n_over"]),
            named["medians"],
            named["sample_rows"],
            named["sample_sinks"],
            named["left_out"],
            int(named["n_batches"][0]),
        )

    def _slots(self, rows: Int64[np.ndarray, " u"]) -> Int64[np.ndarray, " u"]:
        """Return the sink slots of some rows, giving new ones to those that have none."""
        new = rows[self.sink_slots[rows] < 0]
        n_taken = int(self.sink_slots.max()) + 1
        self.sink_slots[new] = np.arange(n_taken, n_taken + len(new))
        missing = n_taken + len(new) - len(self.sinks)
        if missing > 0:
            # In proportion, so that all copies together stay a few times the final size.
            self.sinks.extend(max(missing, len(self.sinks) // 8))
        slots: np.ndarray = self.sink_slots[rows]
        return slots
