"""Rotation and stretch: the map that turns one cloud's principal axes into the next one's."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from layerflow.laws.drift import PolynomialDrift
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import residual_noise
from layerflow.laws.pairs import require_pairs


@dataclass(frozen=True, eq=False)
class RotationStretchFit:
    """The law and the parts its matrix is made of.

    ``axes`` U and ``next_axes`` U′ (d, d) hold one principal axis a column, ``stretch`` (d,) the ratios of singular
    values S′_i / S_i: the centred next state is U′ diag(stretch) Uᵀ times the centred state. ``rank`` counts the axes
    along which the cloud has extent; the others have a stretch of zero.
    """

    law: GaussianLaw
    axes: Float64[np.ndarray, "d d"]
    next_axes: Float64[np.ndarray, "d d"]
    stretch: Float64[np.ndarray, " d"]
    rank: int


def fit_rotation_stretch(z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n d"]) -> RotationStretchFit:
    """Rotation and stretch between two consecutive clouds, after Sarfati et al. 2025.

    With centred clouds, tokens in columns, X = U S Vᵀ and X′ = U′ S′ V′ᵀ, axes matched in order of decreasing singular
    value, M = U′ S′ S⁻¹ Uᵀ and a(z) = m′ + M (z − m) − z, where m and m′ are the clouds' means. An SVD leaves the sign
    of every axis open: that of axis i of U′ is chosen so that the tokens' scores on axis i in the two clouds correlate
    positively, V_i · V′_i ≥ 0, which makes the formula exact when the map is a rotation and stretch. Noise is
    isotropic: the mean squared training residual over tokens and coordinates.

    Shapes: states ``z`` (n, d), steps ``dz`` (n, d). Cost: two QR factorisations, 2 n d² each. SPEC §4.

    Raises:
        InputError: Rows that do not pair up, fewer than 2 of them, or non-finite values.
    """
    states, steps = require_pairs(z, dz, n_minimum=2)
    next_states = states + steps
    mean, next_mean = states.mean(axis=0), next_states.mean(axis=0)
    centred, next_centred = states - mean, next_states - next_mean
    (axes, extent), (next_axes, next_extent) = _principal(centred), _principal(next_centred)
    # The scores' agreement V_i . V'_i, up to the positive S_i S'_i, without forming n scores.
    agreement = np.einsum("ei,ed,di->i", next_axes, next_centred.T @ centred, axes, optimize=True)
    next_axes = next_axes * np.where(agreement < 0.0, -1.0, 1.0)
    # Same cut-off as matrix_rank: below it an axis holds rounding, and a ratio of rounding is not a stretch.
    extended = extent > extent[0] * max(states.shape) * np.finfo(np.float64).eps
    stretch = np.divide(next_extent, extent, out=np.zeros_like(extent), where=extended)
    turned = (next_axes * stretch) @ axes.T
    drift = PolynomialDrift.affine(next_mean - turned @ mean, turned - np.eye(len(mean)))
    law = GaussianLaw(drift, residual_noise(steps - drift(states), "isotropic"))
    return RotationStretchFit(law, axes, next_axes, stretch, int(extended.sum()))


def _principal(centred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Principal axes in columns (d, d) and singular values (d,), zero-padded when n < d.

    The triangle of a QR factorisation has the same ones as all n rows, at a fraction of the cost.
    """
    d = centred.shape[1]
    _, extent, rows = np.linalg.svd(np.linalg.qr(centred, mode="r"), full_matrices=False)
    missing = d - len(extent)
    return np.vstack([rows, np.zeros((missing, d))]).T, np.pad(extent, (0, missing))
