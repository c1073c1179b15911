"""Null laws: drifts and noises that know nothing of the state."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from layerflow.errors import InputError
from layerflow.laws.drift import ConstantDrift
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import DiagonalNoise, FullNoise
from layerflow.numerics.moments import Moments


def fit_null_a(dz: Float[np.ndarray, "n d"]) -> GaussianLaw:
    """Null A: the transition's mean step with per-coordinate variance, biased (÷ n).

    ``dz`` are the training steps (n, d) of one transition. SPEC §4.

    Raises:
        InputError: No rows, or non-finite ones.
    """
    return _diagonal(Moments.of(dz, full=False))


def fit_null_b(steps: Sequence[np.ndarray] | np.ndarray) -> GaussianLaw:
    """Null B: one mean step and one per-coordinate variance for all transitions, their training steps pooled.

    ``steps`` is one array (n, d) a transition, or all of them as (transitions, n, d). SPEC §4.

    Raises:
        InputError: No transitions, widths that differ, or non-finite rows.
    """
    if len(steps) == 0:
        raise InputError(
            "null B was given no transitions, and it pools at least one; pass the steps of each transition"
        )
    moments = Moments.empty(steps[0].shape[-1], full=False)
    for dz in steps:
        moments = moments.update(dz)
    return _diagonal(moments)


def fit_null_c(dz: Float[np.ndarray, "n d"]) -> GaussianLaw:
    """Null C: the transition's mean step with the steps' full covariance, biased (÷ n).

    ``dz`` are the training steps (n, d) of one transition. SPEC §4.

    Raises:
        InputError: No rows, or non-finite ones.
    """
    moments = Moments.of(dz)
    return GaussianLaw(ConstantDrift(moments.mean), FullNoise(moments.covariance))


def _diagonal(moments: Moments) -> GaussianLaw:
    return GaussianLaw(ConstantDrift(moments.mean), DiagonalNoise(moments.variance))
