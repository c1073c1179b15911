"""Polynomials of degree 1 and 2 in several variables: monomials, evaluation, change of coordinates.

Monomials come in the order 1, z_i, z_i z_j for i <= j (row by row: 00, 01, …, 0d, 11, …). That is the order of all
pairs i <= j of the *extended* state (1, z_1, …, z_d), which is how this package thinks of them.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from layerflow.errors import InputError

_BLOCK = 2048  # rows whose monomials are held at once: 35 MB at d = 64


def n_features(d: int, degree: int) -> int:
    """Count the monomials of `d` variables up to `degree`: 1 + d, or (d + 1)(d + 2) / 2.

    Raises:
        InputError: the degree is neither 1 nor 2.
    """
    if degree not in (1, 2):
        raise InputError(f"degree is {degree}: affine (1) and quadratic (2) maps are offered; choose one of them")
    return d + 1 if degree == 1 else (d + 1) * (d + 2) // 2


def features(z: Float[np.ndarray, "n d"], degree: int) -> Float64[np.ndarray, "n f"]:
    """Evaluate the monomials (1, z) or (1, z, z_i z_j for i <= j) at each state.

    Shapes: (n, d) to (n, `n_features(d, degree)`), float64.
    """
    return feature_rows(z, degree).T


def feature_rows(z: Float[np.ndarray, "n d"], degree: int) -> Float64[np.ndarray, "f n"]:
    """Evaluate the monomials, one contiguous row each: `features` transposed, and how they are computed."""
    n, d = z.shape
    extended = np.empty((d + 1, n))
    extended[0] = 1.0
    extended[1:] = z.T
    if n_features(d, degree) == d + 1:
        return extended
    rows = np.empty((n_features(d, degree), n))
    start = 0
    for i in range(d + 1):
        stop = start + d + 1 - i
        np.multiply(extended[i:], extended[i], out=rows[start:stop])
        start = stop
    return rows


def evaluate(
    coefficients: Float64[np.ndarray, "f c"], z: Float[np.ndarray, "n d"], degree: int
) -> Float64[np.ndarray, "n c"]:
    """Evaluate polynomials at each state, `features(z, degree) @ coefficients`, in bounded memory."""
    if len(coefficients) != n_features(z.shape[1], degree):
        raise InputError(
            f"coefficients have {len(coefficients)} rows: degree {degree} in {z.shape[1]} variables has "
            f"{n_features(z.shape[1], degree)} monomials; fit and evaluate at the same width"
        )
    values = np.empty((len(z), coefficients.shape[1]))
    for block in row_blocks(len(z)):
        values[block] = feature_rows(z[block], degree).T @ coefficients
    return values


def row_blocks(n: int) -> list[slice]:
    """Cut n rows into blocks whose monomials fit in memory."""
    return [slice(start, min(start + _BLOCK, n)) for start in range(0, n, _BLOCK)]


def pairs(d: int) -> tuple[Int64[np.ndarray, " f"], Int64[np.ndarray, " f"]]:
    """Name the two extended variables (0 is the constant 1) whose product each monomial of degree 2 is."""
    first, second = np.triu_indices(d + 1)
    return first.astype(np.int64), second.astype(np.int64)


def require_finite(rows: Float[np.ndarray, "n d"], name: str) -> Float64[np.ndarray, "n d"]:
    """Convert to float64.

    Raises:
        InputError: a value is not finite.
    """
    bad = int((~np.isfinite(rows)).any(axis=1).sum())
    if bad:
        raise InputError(f"{bad} of {len(rows)} {name} are not finite: leave those rows out")
    return np.asarray(rows, dtype=np.float64)


@dataclass(frozen=True)
class Scaler:
    """Standard coordinates of a cloud, (z - center) * inverse, coordinate by coordinate.

    Not a whitening: only a change that leaves each coordinate on its own keeps the first d' standard coordinates
    those of the first d', so that one Gram matrix serves every width. `inverse` is 1 / standard deviation, and 0
    for a coordinate that does not vary, whose monomials then drop out.
    """

    center: Float64[np.ndarray, " d"]
    inverse: Float64[np.ndarray, " d"]

    @classmethod
    def of(cls, z: Float[np.ndarray, "n d"]) -> "Scaler":
        """Measure mean and standard deviation of each coordinate.

        Raises:
            InputError: a coordinate is not finite.
        """
        z = require_finite(z, "states")
        center = z.mean(axis=0)
        deviation = z.std(axis=0)
        rounding = len(z) * np.finfo(np.float64).eps * np.abs(z).max(axis=0, initial=0.0)
        varies = deviation > rounding  # the mean of equal numbers errs by as much
        return cls(center, np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies))

    def __call__(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n d"]:
        """Move states to standard coordinates."""
        return np.asarray((z - self.center) * self.inverse)

    def narrow(self, width: int) -> "Scaler":
        """Keep the first `width` coordinates."""
        return Scaler(self.center[:width], self.inverse[:width])

    def raw_coefficients(self, standard: Float64[np.ndarray, "f c"]) -> Float64[np.ndarray, "f c"]:
        """Rewrite polynomials in standard coordinates as polynomials in the raw ones.

        With w = R (z - m): b + b₁·w + wᵀQw = (b - m·Rb₁ + mᵀRQRm) + (Rb₁ - 2RQRm)·z + zᵀ(RQR)z.
        """
        d, outputs = len(self.center), standard.shape[1]
        linear = standard[1 : d + 1] * self.inverse[:, None]
        if len(standard) == d + 1:
            return np.vstack([standard[:1] - self.center @ linear, linear])
        first, second = np.triu_indices(d)
        upper = standard[d + 1 :] * (self.inverse[first] * self.inverse[second])[:, None]
        # The gradient of the quadratic part at m is 2RQRm; each pair adds to both its variables.
        slope = np.zeros((d, outputs))
        np.add.at(slope, first, upper * self.center[second, None])
        np.add.at(slope, second, upper * self.center[first, None])
        constant = standard[0] - self.center @ (linear - slope / 2)
        return np.vstack([constant[None], linear - slope, upper])
