"""Norms by state: how long single states are, and how many are attention sinks (SPEC §2)."""

import numpy as np
from jaxtyping import Float, Float64

from layerflow.data.sinks import SINK_FACTOR
from layerflow.data.trajectories import Samples, StateNorms, Trajectories

_BLOCK = 4096


def norms(trajectories: Trajectories) -> list[StateNorms]:
    """Norms of single positions, one record a state.

    What the collection measured over all its positions, where it did; otherwise what the samples of single positions
    show; nothing where there are neither, since the norm of a mean is not that of the states it averages.
    """
    if trajectories.norms is not None:
        return list(trajectories.norms)
    if trajectories.samples is None or len(trajectories.samples.rows) == 0:
        return []
    return sample_norms(trajectories.samples)


def sample_norms(samples: Samples) -> list[StateNorms]:
    """Median, 99th percentile and maximum of ‖h‖ over sampled positions, and how many exceed 10 × the median.

    The count reads a sample as `StateNorms` reads a collection: by the norm at that state alone, with the sample's own
    median for the calibrated one, and zero at the final state, which is normalised and calls no sink. A first
    position of a row whose norm is ordinary is a sink by SPEC §2 and yet not counted here. Units are the residual
    stream's own.
    """
    records = []
    final = len(samples.states) - 1
    for index, state in enumerate(samples.states):
        lengths = _lengths(state)
        median, p99 = np.quantile(lengths, [0.5, 0.99])
        n_sinks = 0 if index == final else int(np.count_nonzero(lengths > SINK_FACTOR * median))
        records.append(StateNorms(index, float(median), float(p99), float(lengths.max()), n_sinks))
    return records


def _lengths(state: Float[np.ndarray, "m D"]) -> Float64[np.ndarray, " m"]:
    lengths = np.empty(len(state))
    for start in range(0, len(state), _BLOCK):
        rows = np.asarray(state[start : start + _BLOCK], np.float64)
        lengths[start : start + _BLOCK] = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return lengths
