"""Paired percentile bootstrap as matrix products over shared resampling weights.

A resample of n held-out tokens is a row of counts w, and every statistic here is a function of weighted sums
Σ wᵢ xᵢ. So one matrix of weights serves every contest of a split: the comparison is paired by construction, and
the work is one matrix product.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError


@dataclass(frozen=True, eq=False)
class Interval:
    """Estimates on the data as they are, (c,), and the percentile bounds of their resampled values."""

    estimate: Float64[np.ndarray, " c"]
    low: Float64[np.ndarray, " c"]
    high: Float64[np.ndarray, " c"]


def resample_weights(n: int, n_resamples: int, rng: np.random.Generator) -> Float64[np.ndarray, "b n"]:
    """Count how often each of ``n`` items is drawn in each of ``n_resamples`` resamples of size n with replacement.

    Shape (n_resamples, n); each row sums to n. Memory: 8 bytes an entry, 40 MB for 1,000 × 5,000.

    Raises:
        InputError: Either number below 1.
    """
    if n < 1 or n_resamples < 1:
        raise InputError(f"{n_resamples} resamples of {n} items asked for, and both must be at least 1")
    weights = np.empty((n_resamples, n))
    for row in weights:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return weights


def mean_interval(
    values: Float[np.ndarray, "n c"], weights: Float64[np.ndarray, "b n"], *, level: float = 0.95
) -> Interval:
    """Percentile interval of the mean over rows of each column of ``values`` (n, c).

    Pass the difference of two laws' log-densities for a paired difference of log-likelihoods, one contest a column.

    Raises:
        InputError: Lengths that differ, non-finite values, or a level outside 0…1.
    """
    _require_rows("values", values, weights)
    resampled = weights @ np.asarray(values, dtype=np.float64) / len(values)
    return _interval(np.asarray(np.mean(values, axis=0, dtype=np.float64)), resampled, level)


def r2_difference_interval(
    steps: Float[np.ndarray, "n d"],
    errors: Float[np.ndarray, "n c"],
    opponent_errors: Float[np.ndarray, "n c"],
    weights: Float64[np.ndarray, "b n"],
    *,
    level: float = 0.95,
) -> Interval:
    """Percentile interval of a law's R² minus its opponent's over the held-out steps, one contest a column.

    With R² = 1 − Σe / Σ‖Δ − mean(Δ)‖² and e = ‖Δ − â‖² the difference is (Σe_opponent − Σe) / Σ‖Δ − mean(Δ)‖². Within
    each resample the sums and the mean are that resample's own. NaN where all steps are equal. SPEC §5.

    Args:
        steps: Held-out steps Δ (n, d).
        errors: Squared errors e of each law, token by token (n, c); see ``r2.squared_errors``.
        opponent_errors: The same of each opponent.
        weights: From ``resample_weights(n, …)``, one matrix for all contests of a split.
        level: Share of resampled values inside.

    Raises:
        InputError: As ``mean_interval``.
    """
    _require_rows("steps", steps, weights)
    _require_rows("errors", errors, weights)
    _require_rows("opponent_errors", opponent_errors, weights)
    ones = np.ones((1, len(steps)))
    total, resampled_total = _total_squares(steps, ones), _total_squares(steps, weights)
    gained = np.asarray(opponent_errors, dtype=np.float64) - errors
    estimate = _ratio(ones @ gained, total)[0]
    return _interval(estimate, _ratio(weights @ gained, resampled_total), level)


def _total_squares(steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ wᵢ‖Δᵢ − m‖², with m the weighted mean, for each row of weights: (b,).

    ‖Δ‖² minus ‖m‖² loses digits when the mean is large; the steps are centred once so that m is near zero.
    """
    centred = np.asarray(steps, dtype=np.float64) - np.mean(steps, axis=0, dtype=np.float64)
    squares = weights @ np.einsum("nd,nd->n", centred, centred)
    sums = weights @ centred
    spread: np.ndarray = squares - np.einsum("bd,bd->b", sums, sums) / len(steps)
    # A resample that drew equal steps only has no spread; the subtraction leaves rounding there.
    return np.where(spread > 1e-12 * squares, spread, 0.0)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """(b, c) over (b,), NaN where the denominator is not positive."""
    ratio = np.full(numerator.shape, np.nan)
    column = np.broadcast_to(denominator[:, None], numerator.shape)
    np.divide(numerator, column, out=ratio, where=column > 0.0)
    return ratio


def _interval(estimate: np.ndarray, resampled: np.ndarray, level: float) -> Interval:
    if not 0.0 < level < 1.0:
        raise InputError(f"the level of an interval is {level}, and it must lie between 0 and 1; 0.95 is usual")
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail], axis=0)
    return Interval(estimate, low, high)


def _require_rows(name: str, values: np.ndarray, weights: np.ndarray) -> None:
    if len(values) != weights.shape[1]:
        raise InputError(
            f"{name} holds {len(values)} rows and the weights are for {weights.shape[1]} tokens; make them with "
            f"resample_weights({len(values)}, ...)"
        )
    if not np.isfinite(values).all():
        raise InputError(f"{name} holds non-finite values, and an interval needs finite ones; leave the tokens out")
