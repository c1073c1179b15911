"""A batch through the model, reduced on its device to sums by token. Imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64

from layerflow.data.models import LanguageModel
from layerflow.data.positions import Batch
from layerflow.data.sinks import find_sinks


@dataclass(frozen=True, eq=False)
class BatchSums:
    """Sums of the states over some of a batch's positions, by token.

    Attributes:
        rows: the tokens' rows in the token table, each once, ascending.
        counts: positions behind each sum.
        count_a: those of half A among them.
        states: the sums (u, D), float32, one tensor a state, in host memory.
        half_a: the final state's sums (u, D) over half A.
    """

    rows: Int64[np.ndarray, " u"]
    counts: Int64[np.ndarray, " u"]
    count_a: Int64[np.ndarray, " u"]
    states: Sequence[torch.Tensor]
    half_a: torch.Tensor


@dataclass(frozen=True, eq=False)
class BatchSamples:
    """The sampled positions of a batch: places among all sampled ones, states, targets' rows, whether sinks."""

    places: Int64[np.ndarray, " k"]
    states: Float32[np.ndarray, "states k D"]
    rows: Int64[np.ndarray, " k"]
    sinks: Bool[np.ndarray, " k"]


@dataclass(frozen=True, eq=False)
class Reduced:
    """All that is kept of a batch.

    Attributes:
        ordinary: sums over the positions that are no sinks.
        sinks: sums over those that are.
        norms: norm of every state at each counted position.
        is_sink: whether the position is a sink.
        samples: the sampled positions.
        left_out: rows with a state that is not finite, as numbered in `Windows`; nothing of them is in the rest.
    """

    ordinary: BatchSums
    sinks: BatchSums
    norms: Float32[np.ndarray, "states m"]
    is_sink: Bool[np.ndarray, " m"]
    samples: BatchSamples
    left_out: Int64[np.ndarray, " r"]


@torch.inference_mode()
def reduce_batch(model: LanguageModel, batch: Batch, medians: Float[np.ndarray, " states"]) -> Reduced:
    """Run the model over a batch and reduce its states to sums by token.

    Only the norms come back to the host before the sums: they say which rows are finite and which positions are
    sinks, and from then on every sum is over a plain list of positions.

    Args:
        model: the language model.
        batch: what it reads.
        medians: each state's calibrated median norm.

    Reference: SPEC section 2.
    """
    states = _read(model, batch)
    norms = _norms(states)
    length = batch.input_ids.shape[1]
    is_bad = ~(np.isfinite(norms) | ~batch.mask).all(axis=(0, 2))
    good = ~is_bad[batch.positions // length]
    positions, targets, half_a = batch.positions[good], batch.targets[good], batch.half_a[good]
    norms = norms.reshape(len(states), -1)[:, positions]
    is_sink = find_sinks(norms, medians, positions % length == 0)
    is_sample = batch.samples[good] >= 0
    return Reduced(
        ordinary=_sum(states, positions[~is_sink], targets[~is_sink], half_a[~is_sink]),
        sinks=_sum(states, positions[is_sink], targets[is_sink], half_a[is_sink]),
        norms=norms,
        is_sink=is_sink,
        samples=BatchSamples(
            places=batch.samples[good][is_sample],
            states=_select(states, positions[is_sample]),
            rows=targets[is_sample],
            sinks=is_sink[is_sample],
        ),
        left_out=batch.rows[is_bad],
    )


@torch.inference_mode()
def median_norms(model: LanguageModel, batches: Sequence[Batch]) -> Float[np.ndarray, " states"]:
    """Return each state's median norm over all finite positions of some batches; infinite when there is none."""
    norms = np.concatenate([_norms(_read(model, batch))[:, batch.mask] for batch in batches], axis=1)
    finite = np.isfinite(norms).all(axis=0)
    if not finite.any():
        return np.full(len(norms), np.inf)
    return np.asarray(np.median(norms[:, finite], axis=1), np.float64)


def _read(model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, ...]:
    ids = torch.from_numpy(batch.input_ids).to(model.device)
    mask = batch.mask
    # Full rows need no mask, and attention without one is the faster.
    return model.states(ids, None if mask.all() else torch.from_numpy(mask).to(model.device, torch.int64))


def _norms(states: Sequence[torch.Tensor]) -> np.ndarray:
    """Norms (L+1, b, t), in float32; not finite where a value is not, or where its square overflows."""
    norms = [torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32) for state in states]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).cpu().numpy()


def _sum(states: Sequence[torch.Tensor], positions: np.ndarray, targets: np.ndarray, half_a: np.ndarray) -> BatchSums:
    rows, group = np.unique(targets, return_inverse=True)
    counts = np.bincount(group, minlength=len(rows))
    order = torch.from_numpy(positions[np.argsort(group, kind="stable")])
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    weights = torch.from_numpy(half_a[np.argsort(group, kind="stable")].astype(np.float32))
    return BatchSums(
        rows=rows,
        counts=counts,
        count_a=np.bincount(group[half_a], minlength=len(rows)),
        states=[_segment_sum(state, order, starts) for state in states],
        half_a=_segment_sum(states[-1], order, starts, weights),
    )


def _segment_sum(
    state: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum a state over runs of positions, in float32.

    `embedding_bag` gathers and sums in one sweep without a copy, and adds the entries of a bag one after the other on
    every device. On a CPU it took a quarter of the time of `segment_reduce` and a sixth of that of `np.add.reduceat`,
    whose input has to be gathered first.
    """
    device = state.device
    return torch.nn.functional.embedding_bag(
        order.to(device),
        state.flatten(0, 1).float(),
        starts.to(device),
        mode="sum",
        per_sample_weights=None if weights is None else weights.to(device),
        include_last_offset=True,
    ).cpu()


def _select(states: Sequence[torch.Tensor], positions: np.ndarray) -> np.ndarray:
    selected = np.empty((len(states), len(positions), states[0].shape[-1]), np.float32)
    for state, values in zip(states, selected, strict=True):
        values[:] = state.flatten(0, 1)[torch.from_numpy(positions).to(state.device)].float().cpu()
    return selected
