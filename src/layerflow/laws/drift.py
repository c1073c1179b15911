"""Drifts: the mean step as a function of the state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError
from layerflow.numerics.least_squares import LeastSquaresFit
from layerflow.numerics.polynomial import Scaler, evaluate, n_features

Drift = Callable[[np.ndarray], np.ndarray]
"""Any callable from states (n, d) to mean steps (n, d)."""


@dataclass(frozen=True, eq=False)
class ConstantDrift:
    """a(z) = step: the same step everywhere. ``step`` has shape (d,)."""

    step: Float64[np.ndarray, " e"]

    def __call__(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n e"]:
        """Mean steps at states ``z`` (n, d): (n, d)."""
        return np.tile(self.step, (len(z), 1))


@dataclass(frozen=True, eq=False)
class PolynomialDrift:
    """A polynomial of degree 1 or 2 in the state: a(z) = coefficientsᵀ (1, z, z_i z_j for i ≤ j).

    Build one from its parts with ``affine`` or ``quadratic``, from raw coefficients (F, d) in the order of
    ``numerics.polynomial.features`` with ``PolynomialDrift(coefficients, degree)``, or from a least-squares fit with
    ``from_fit``. A fitted drift stays in the standard coordinates of its ``scaler``, where ``standard`` are its
    coefficients, because raw monomials of a cloud far from the origin cancel; ``coefficients`` are always the raw ones.

    Raises:
        InputError: Another degree, or an F that fits no state width at that degree.
    """

    standard: Float64[np.ndarray, "f e"]
    degree: int
    scaler: Scaler | None = None

    def __post_init__(self) -> None:
        if n_features(self.width, self.degree) != len(self.standard):
            raise InputError(
                f"{len(self.standard)} rows of coefficients fit no state width at degree {self.degree}; there must be "
                "1 + d rows at degree 1 and (d + 1)(d + 2) / 2 at degree 2"
            )

    @classmethod
    def from_fit(cls, fit: LeastSquaresFit) -> "PolynomialDrift":
        """Take the drift that a least-squares fit found."""
        return cls(fit.standard, fit.degree, fit.scaler)

    @classmethod
    def affine(cls, offset: np.ndarray, matrix: np.ndarray) -> "PolynomialDrift":
        """a(z) = offset + matrix @ z, with ``offset`` (d,) and ``matrix`` (d, d)."""
        return cls(np.vstack([_row(offset), np.asarray(matrix, dtype=np.float64).T]), 1)

    @classmethod
    def quadratic(cls, offset: np.ndarray, matrix: np.ndarray, tensor: np.ndarray) -> "PolynomialDrift":
        """a_c(z) = offset_c + Σ_i matrix_ci z_i + Σ_ij tensor_cij z_i z_j, with ``tensor`` (d, d, d)."""
        given = np.asarray(tensor, dtype=np.float64)
        both = given + np.swapaxes(given, 1, 2)  # z_i z_j and z_j z_i are one monomial
        i, j = np.triu_indices(given.shape[1])
        products = both[:, i, j] / np.where(i == j, 2.0, 1.0)
        return cls(np.vstack([_row(offset), np.asarray(matrix, dtype=np.float64).T, products.T]), 2)

    @property
    def width(self) -> int:
        """Width d of the states."""
        if self.degree == 1:
            return len(self.standard) - 1
        # F = (d + 1)(d + 2) / 2
        return round((np.sqrt(8.0 * len(self.standard) + 1.0) - 3.0) / 2.0)

    @cached_property
    def coefficients(self) -> Float64[np.ndarray, "f e"]:
        """Coefficients of the raw monomials, (F, d)."""
        return self.standard if self.scaler is None else self.scaler.raw_coefficients(self.standard)

    @property
    def offset(self) -> Float64[np.ndarray, " e"]:
        """Mean step at the origin, (d,)."""
        return self.coefficients[0]

    @property
    def matrix(self) -> Float64[np.ndarray, "e d"]:
        """Linear part at the origin, (d, d): it acts as ``matrix @ z``."""
        return self.coefficients[1 : 1 + self.width].T

    def __call__(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n e"]:
        """Mean steps at states ``z`` (n, d): (n, d).

        Raises:
            InputError: States of another width.
        """
        if z.shape[1] != self.width:
            raise InputError(
                f"states have {z.shape[1]} coordinates and the drift was made for {self.width}; "
                "use states of the basis it was fitted in"
            )
        states = np.asarray(z, dtype=np.float64)
        if self.scaler is not None:
            states = self.scaler(states)
        return evaluate(self.standard, states, self.degree)


def _row(offset: np.ndarray) -> np.ndarray:
    return np.asarray(offset, dtype=np.float64)[None, :]
