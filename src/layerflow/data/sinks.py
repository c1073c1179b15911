"""Attention sinks: which positions are, and how long the vectors of every state are with and without them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from layerflow.data.trajectories import StateNorms

# A position is a sink when its norm at a raw state exceeds this many times the state's median (SPEC §2).
SINK_FACTOR = 10.0

# Norms are counted in bins read off the bits of the float32: 2^10 bins an octave, at most 0.1 % wide, from 2^-16 to
# 2^32. What lies outside, zero too, goes to the outermost bins; the maximum is kept exactly.
_SHIFT = 23 - 10
_LOWEST = (127 - 16) << 10
_N_BINS = 48 << 10


def find_sinks(
    norms: Float32[np.ndarray, "states m"],
    medians: Float[np.ndarray, " states"],
    is_first: Bool[np.ndarray, " m"],
) -> Bool[np.ndarray, " m"]:
    """Say which positions are sinks: the first of their row, or over 10 × the median norm at any raw state.

    Args:
        norms: norm of every state at every position.
        medians: each state's calibrated median.
        is_first: whether a position is the first of its row.

    Reference: SPEC section 2. The final state, which comes after the final norm, calls no sink.
    """
    return is_first | over_threshold(norms, medians).any(axis=0)


def over_threshold(
    norms: Float32[np.ndarray, "states m"], medians: Float[np.ndarray, " states"]
) -> Bool[np.ndarray, "states m"]:
    """Say at which states a position's norm exceeds 10 × the median; never at the final one."""
    over = norms > SINK_FACTOR * medians[:, None]
    over[-1] = False
    return over


@dataclass(frozen=True, eq=False)
class NormCounts:
    """Mergeable counts of the norms of every state, of sinks and of all other positions apart.

    Integers and maxima only, so any order of updates and merges gives the same.

    Attributes:
        bins: counts by kind (0 ordinary, 1 sink), state and bin of norm.
        maxima: largest norm by kind and state; zero where there is none.
        n_over: positions over the threshold, by state.
    """

    bins: Int64[np.ndarray, "2 states bins"]
    maxima: Float32[np.ndarray, "2 states"]
    n_over: Int64[np.ndarray, " states"]

    @classmethod
    def zeros(cls, n_states: int) -> "NormCounts":
        """Return counts of nothing."""
        return cls(
            np.zeros((2, n_states, _N_BINS), np.int64),
            np.zeros((2, n_states), np.float32),
            np.zeros(n_states, np.int64),
        )

    @staticmethod
    def nbytes(n_states: int) -> int:
        """Return the memory that counts of so many states take."""
        return 2 * n_states * _N_BINS * 8

    def update(
        self,
        norms: Float32[np.ndarray, "states m"],
        is_sink: Bool[np.ndarray, " m"],
        medians: Float[np.ndarray, " states"],
    ) -> None:
        """Count the norms of some positions, in place."""
        n_states = len(norms)
        table = is_sink * n_states + np.arange(n_states)[:, None]
        # Over one flat index: over three, `np.add.at` takes four times as long.
        np.add.at(self.bins.reshape(-1), (table * _N_BINS + _bin(norms)).reshape(-1), 1)
        for kind, chosen in enumerate((~is_sink, is_sink)):
            np.maximum(self.maxima[kind], norms[:, chosen].max(axis=1, initial=0), out=self.maxima[kind])
        self.n_over[:] += over_threshold(norms, medians).sum(axis=1)

    def merge(self, other: "NormCounts") -> None:
        """Add another's counts, in place."""
        self.bins[:] += other.bins
        np.maximum(self.maxima, other.maxima, out=self.maxima)
        self.n_over[:] += other.n_over

    @property
    def n_sinks(self) -> int:
        """The number of sink positions."""
        return int(self.bins[1, 0].sum())

    def table(self, *, sinks: bool) -> tuple[StateNorms, ...]:
        """Summarise every state's norms, sinks included or not; medians and p99 to 0.05 %."""
        bins = self.bins.sum(axis=0) if sinks else self.bins[0]
        maxima = self.maxima.max(axis=0) if sinks else self.maxima[0]
        return tuple(
            StateNorms(
                state=state,
                # The middle of the bin that holds the maximum may lie above it.
                median=min(_quantile(bins[state], 0.5), float(maxima[state])),
                p99=min(_quantile(bins[state], 0.99), float(maxima[state])),
                maximum=float(maxima[state]),
                n_sinks=int(self.n_over[state]) if sinks else 0,
            )
            for state in range(len(bins))
        )


def _bin(norms: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(norms, np.float32).view(np.int32)
    bins: np.ndarray = np.clip((bits >> _SHIFT) - _LOWEST, 0, _N_BINS - 1)
    return bins


def _quantile(bins: np.ndarray, share: float) -> float:
    """Return the middle of the bin in which the share is reached; zero when nothing was counted."""
    reached = np.cumsum(bins)
    if reached[-1] == 0:
        return 0.0
    index = int(np.searchsorted(reached, share * reached[-1]))
    edges = (np.array([index, index + 1], np.int32) + _LOWEST << _SHIFT).view(np.float32)
    return float(edges.mean(dtype=np.float64))
