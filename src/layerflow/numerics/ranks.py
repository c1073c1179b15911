"""Spearman's rank correlation, ties averaged."""

import numpy as np
import scipy.stats
from jaxtyping import Float, Float64, Num

from layerflow.errors import InputError


def spearman(x: Num[np.ndarray, " n"], y: Num[np.ndarray, " n"]) -> float:
    """Rank correlation of two samples: Pearson's correlation of their ranks, tied values sharing the mean rank.

    Between −1 and 1; NaN when either sample is constant, for it then has no ranking. SPEC §6.

    Raises:
        InputError: Unequal lengths, fewer than 2 values, or non-finite ones.
    """
    return float(spearman_rows(np.atleast_2d(x), np.atleast_2d(y))[0])


def spearman_rows(a: Num[np.ndarray, "m n"], b: Num[np.ndarray, "m n"]) -> Float64[np.ndarray, " m"]:
    """``spearman`` of each row of ``a`` with the same row of ``b``: state by state, (m,). Cost: m n log n.

    Raises:
        InputError: As ``spearman``.
    """
    if a.shape != b.shape or a.shape[-1] < 2:
        raise InputError(
            f"samples of shape {a.shape} and {b.shape} cannot be ranked against each other; "
            "they must have one shape and at least 2 values"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("a sample to be ranked holds non-finite values, and those have no rank; leave them out")
    return _correlation(_centred_ranks(a), _centred_ranks(b))


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    # Mean rank is (n + 1) / 2 whatever the ties.
    ranks: np.ndarray = scipy.stats.rankdata(values, axis=-1) - (values.shape[-1] + 1) / 2.0
    return ranks


def _correlation(a: Float[np.ndarray, "m n"], b: Float[np.ndarray, "m n"]) -> Float64[np.ndarray, " m"]:
    product = np.einsum("mn,mn->m", a, b)
    size = np.sqrt(np.einsum("mn,mn->m", a, a) * np.einsum("mn,mn->m", b, b))
    correlation = np.full(len(a), np.nan)
    np.divide(product, size, out=correlation, where=size > 0.0)
    return np.clip(correlation, -1.0, 1.0)
