"""Non-affine share at full width: what the best affine map of all D dimensions leaves over (SPEC §6)."""

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from layerflow.analysis.full_width import held_out_residuals
from layerflow.analysis.scoring import Split
from layerflow.data.trajectories import Halves

Kind = Literal["mean", "individual"]

# Leading principal components whose products the nonlinear gain adds: 136 products, as many as at the working width.
N_LEADING = 16

_BLOCK = 2048


@dataclass(frozen=True)
class AffinityRow:
    """How far one transition is from an affine map, on held-out rows.

    ``nonaffine_step`` and ``nonaffine_state`` are 1 − R² of the step and of the next state, at least 0, and None where
    no two held-out rows differ; ``nonlinear_gain`` is None where the products cannot be fitted or explain nothing;
    ``n`` counts training and held-out rows together.
    """

    kind: str
    transition: int
    nonaffine_step: float | None
    nonaffine_state: float | None
    nonlinear_gain: float | None
    n: int


@dataclass(frozen=True)
class AffinityCorrectedRow:
    """Non-affine share of the next state before and after the sampling noise of the means is taken away."""

    transition: int
    nonaffine_state: float
    floor: float
    corrected: float


def affinity(
    states: Float[np.ndarray, "states n D"],
    split: Split,
    *,
    kind: Kind,
    n_leading: int = N_LEADING,
) -> list[AffinityRow]:
    """Non-affine share of every transition, of the step and of the next state, and the nonlinear gain.

    With h' ≈ A h + b by least squares on training rows (the step's map is the same one, A − 1), and sums over held-out
    rows,

    - nonaffine_step = 1 − R² = Σ‖h' − Ah − b‖² / Σ‖Δ − mean Δ‖², with Δ = h' − h;
    - nonaffine_state = the same residual / Σ‖h' − mean h'‖²;
    - nonlinear_gain = (R²_q − R²_a) / R²_q of the step, where q adds the products s_i s_j, i ≤ j, of the training
      rows' ``n_leading`` principal scores at that state to the map in all D dimensions.

    The abstract of v2 gives 3 % for means and 17 % for individual states without a formula; these are the readings.

    A least-squares map of D + 1 coefficients an output leaves a held-out residual about 1 + (D + 1)/(n_train − D − 2)
    times the smallest possible, so shares at very different n are not the same measure. With n_train ≤ D + 1 it
    interpolates, and what it leaves over says nothing of the flow: there are no rows then. With too few for the
    products as well there is no gain. A ridge was declined: its strength would decide the result.

    Args:
        states: Mean states (L+1, n, D), or individual ones; a memory map is read two states at a time.
        split: Rows to fit on and to score on; of individual states, a split of the samples, not of the tokens.
        kind: ``mean`` or ``individual``, for the table.
        n_leading: Principal components whose products are added.

    Returns:
        One row a transition; none when there are too few training rows.

    Raises:
        InputError: Fewer than two held-out rows.

    """
    if len(split.train) <= states.shape[2] + 1:
        return []
    rows, n = [], len(split.train) + len(split.test)
    for transition, (state, following) in enumerate(itertools.pairwise(states)):
        held_out = held_out_residuals(state, following, train=split.train, test=split.test, n_leading=n_leading)
        affine, step, reached = (float(part.sum()) for part in (held_out.affine, held_out.step, held_out.state))
        gain = None if held_out.nonlinear is None else _gain(affine, float(held_out.nonlinear.sum()), step)
        rows.append(AffinityRow(kind, transition, _share(affine, step), _share(affine, reached), gain, n))
    return rows


def affinity_corrected(
    states: Float[np.ndarray, "states n D"],
    halves: Halves,
    split: Split,
) -> list[AffinityCorrectedRow]:
    """Non-affine share of the final state's means with their sampling noise taken away, beside the raw one.

    A mean over finitely many occurrences is off by noise that no map can know. Two half means over c_A and c_B of them
    measure its mean square without bias, e = ‖h_A − h_B‖² c_A c_B / (c_A + c_B)². With sums over held-out tokens,

        floor = Σe / Σ‖h' − mean h'‖²,   corrected = (raw − floor) / (1 − floor).

    Noise that the state before carries too, from the same occurrences, is partly predicted and so is not all in the
    residual: the corrected share is a lower bound, and falls below 0 where noise is most of what is left over. Only
    the final state has halves, so there is one row, of the last transition: no correction for other states or for
    steps. All three numbers are over the held-out tokens whose halves both hold occurrences, so that the raw share can
    differ a little from `affinity`'s.

    Args:
        states: Mean states (L+1, n, D).
        halves: The two half means of the final state.
        split: Tokens to fit on and to score on.

    Returns:
        One row; none when there are too few training rows, as for `affinity`, or when the held-out states differ by no
        more than their noise.

    Raises:
        InputError: Fewer than two held-out tokens with both halves.

    """
    if len(split.train) <= states.shape[2] + 1:
        return []
    measured = split.test[(halves.count_a[split.test] > 0) & (halves.count_b[split.test] > 0)]
    held_out = held_out_residuals(states[-2], states[-1], train=split.train, test=measured, n_leading=0)
    total = float(held_out.state.sum())
    noise = _noise_energy(halves, measured)
    if noise >= total:
        return []
    raw, floor = float(held_out.affine.sum()) / total, noise / total
    return [AffinityCorrectedRow(len(states) - 2, raw, floor, (raw - floor) / (1.0 - floor))]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _gain(affine: float, nonlinear: float, step: float) -> float | None:
    """(R²_q − R²_a) / R²_q from residual and total squares; None where q explains nothing."""
    explained = step - nonlinear
    return (affine - nonlinear) / explained if explained > 0.0 else None


def _noise_energy(halves: Halves, rows: np.ndarray) -> float:
    """Sum over rows of the unbiased mean square of the noise of the whole mean."""
    energy = 0.0
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        gap = halves.a[block].astype(np.float64) - halves.b[block]
        count_a, count_b = halves.count_a[block].astype(np.float64), halves.count_b[block].astype(np.float64)
        weight = count_a * count_b / (count_a + count_b) ** 2
        energy += float(weight @ np.einsum("ij,ij->i", gap, gap))
    return energy
