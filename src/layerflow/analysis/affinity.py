"""Non-affine share at full width: what the best affine map of all D dimensions leaves over (SPEC §6)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Float64, Int

from layerflow.analysis.full_width import HeldOutSquares, WideMaps, fit_maps, held_out_squares, row_blocks
from layerflow.analysis.scoring import Split
from layerflow.data.trajectories import Samples

Kind = Literal["mean", "individual"]

# Leading principal components whose products the nonlinear gain adds: 136 products, as many as at the working width.
N_LEADING = 16


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
    """Non-affine share of the means of one transition, raw and with their sampling noise taken away.

    ``nonaffine_state``, ``floor`` and ``corrected`` are of the next state, the others of the step; a floor is the part
    of the raw share that is noise. ``n_effective`` is how many positions stand behind it, (Σe)²/Σe² of their energies:
    its relative error is about 1/sqrt(n_effective).
    """

    transition: int
    nonaffine_state: float
    floor: float
    corrected: float
    nonaffine_step: float
    floor_step: float
    corrected_step: float
    n_effective: float


@dataclass(frozen=True)
class AffinityCorrected:
    """The rows of `affinity` for means, and beside them those of the correction."""

    rows: list[AffinityRow]
    corrected: list[AffinityCorrectedRow]


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
      rows' ``n_leading`` principal scores at that state to the map in all D dimensions. Where the products explain less
      than their own estimation costs on held-out rows, it is negative.

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
    fits = _fits(states, split, n_leading)
    return [_row(kind, transition, squares, split) for transition, (_, squares) in enumerate(fits)]


def affinity_corrected(
    states: Float[np.ndarray, "states n D"], split: Split, noise: "MeanNoise", *, n_leading: int = N_LEADING
) -> AffinityCorrected:
    """`affinity` of mean trajectories, and the same shares with the sampling noise of the means taken away.

    With R the residual of the map over held-out tokens, T the total it is compared with, and N_R, N_T the parts of both
    that would average away with more text,

        floor = N_R / T,   corrected = (R − N_R) / (T − N_T).

    Both maps are fitted to the noisy means all the same. One fit a transition serves both tables.

    Args:
        states: Mean states (L+1, n, D).
        split: Tokens to fit on and to score on.
        noise: Noise of the means of the held-out tokens.
        n_leading: Principal components whose products are added.

    Returns:
        The rows of `affinity`, and one corrected row a transition, left out where the held-out rows differ by no more
        than their noise.

    Raises:
        InputError: Fewer than two held-out tokens.

    """
    both = AffinityCorrected([], [])
    for transition, (maps, squares) in enumerate(_fits(states, split, n_leading)):
        both.rows.append(_row("mean", transition, squares, split))
        both.corrected.extend(_corrected(transition, squares, noise.energies(states, maps, transition)))
    return both


@dataclass(frozen=True, eq=False)
class MeanNoise:
    """Single positions of the held-out tokens, weighted so that their squares sum to the noise of those tokens' means.

    The mean over the c occurrences of token v is off by noise of mean square σ_v²/c, and σ_v² is Σ‖x_i − x̄_v‖²/(c − 1)
    over them. Samples are uniform over positions, m out of Σc, so

        Σ_v σ_v²/c_v ≈ Σ_i w_i ‖x_i − x̄_v(i)‖²   with   w_i = (Σc / m) / (c_v(i) (c_v(i) − 1))

    without bias, whatever σ_v is, for x any linear function of a position's states: the next state, the step, or the
    residual of the affine map, whose noise is the part of a token's residual that more text would average away.

    The halves of the final state alone were tried and dropped. They measure the noise of the next state, most of which
    the state before carries too, from the same occurrences, and the map follows: on SmolLM2-135M that noise is 13 % of
    the final state's variance, and the whole residual 4 %.

    A few positions can carry all the energy: with attention sinks kept, ``n_effective`` says so.
    """

    samples: Samples
    chosen: Int[np.ndarray, " s"]
    weights: Float[np.ndarray, " s"]

    @classmethod
    def of(
        cls, samples: Samples | None, counts: Int[np.ndarray, " n"], tokens: Int[np.ndarray, " m"]
    ) -> "MeanNoise | None":
        """Choose and weight the samples of these tokens.

        None where there are no samples of them, or where a token occurred once, so that its noise shows nowhere.
        """
        if samples is None or counts[tokens].min(initial=2) < 2:
            return None
        chosen = np.flatnonzero(np.isin(samples.rows, tokens))
        if len(chosen) == 0:
            return None
        occurrences = counts[samples.rows[chosen]].astype(np.float64)
        weights = counts.sum() / len(samples.rows) / (occurrences * (occurrences - 1.0))
        return cls(samples, chosen, weights)

    def energies(
        self, states: Float[np.ndarray, "states n D"], maps: WideMaps, transition: int
    ) -> Float64[np.ndarray, "3 s"]:
        """Weighted squares of each chosen position's residual, step and next state about its token's means."""
        energies = np.empty((3, len(self.chosen)))
        places = np.arange(len(self.chosen))
        for block in row_blocks(places, states.shape[2]):
            rows, tokens = self.chosen[block], self.samples.rows[self.chosen[block]]
            x, y = (
                self.samples.states[index][rows].astype(np.float64) - states[index][tokens]
                for index in (transition, transition + 1)
            )
            for part, deviation in enumerate((y - x @ maps.affine, y - x, y)):
                energies[part, block] = np.einsum("ij,ij->i", deviation, deviation)
        return energies * self.weights


def _fits(states: np.ndarray, split: Split, n_leading: int) -> Iterator[tuple[WideMaps, HeldOutSquares]]:
    """Both maps of each transition and what they leave over; nothing where the affine one would interpolate."""
    if len(split.train) <= states.shape[2] + 1:
        return
    for state, following in itertools.pairwise(states):
        maps = fit_maps(state, following, train=split.train, n_leading=n_leading)
        yield maps, held_out_squares(maps, state, following, split.test)


def _row(kind: Kind, transition: int, squares: HeldOutSquares, split: Split) -> AffinityRow:
    residual, step, state = (float(part.sum()) for part in (squares.affine, squares.step, squares.state))
    shares = _share(residual, step), _share(residual, state)
    return AffinityRow(kind, transition, *shares, _gain(squares), len(split.train) + len(split.test))


def _corrected(
    transition: int, squares: HeldOutSquares, energies: Float64[np.ndarray, "3 s"]
) -> list[AffinityCorrectedRow]:
    residual, step, state = (float(part.sum()) for part in (squares.affine, squares.step, squares.state))
    lost, lost_step, lost_state = energies.sum(axis=1).tolist()
    if lost_step >= step or lost_state >= state:
        return []
    spread = float((energies[0] ** 2).sum())
    return [
        AffinityCorrectedRow(
            transition,
            nonaffine_state=residual / state,
            floor=lost / state,
            corrected=(residual - lost) / (state - lost_state),
            nonaffine_step=residual / step,
            floor_step=lost / step,
            corrected_step=(residual - lost) / (step - lost_step),
            n_effective=lost**2 / spread if spread > 0.0 else 0.0,
        )
    ]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _gain(squares: HeldOutSquares) -> float | None:
    """(R²_q − R²_a) / R²_q from residual and total squares; None where q was not fitted or explains nothing."""
    if squares.nonlinear is None:
        return None
    explained = float((squares.step - squares.nonlinear).sum())
    return float((squares.affine - squares.nonlinear).sum()) / explained if explained > 0.0 else None
