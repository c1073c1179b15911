"""Means and covariances of streams: updated chunk by chunk, merged in any order."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and scatter of the rows seen so far.

    ``scatter`` is Σ (x − x̄)(x − x̄)ᵀ, (d, d), or its diagonal (d,) when only variances are wanted. Deviations are taken
    from the running mean, never as a difference of raw sums, so a mean far from the origin costs no digits. Updating
    and merging return a new record; any chunking and any order of merging give the direct result up to rounding
    (Chan, Golub & LeVeque 1983).
    """

    count: int
    mean: Float64[np.ndarray, " d"]
    scatter: Float64[np.ndarray, "..."]

    @classmethod
    def empty(cls, d: int, *, full: bool = True) -> "Moments":
        """Start with no rows, of width ``d``; ``full=False`` keeps variances only, d numbers instead of d²."""
        return cls(0, np.zeros(d), np.zeros((d, d) if full else d))

    @classmethod
    def of(cls, rows: Float[np.ndarray, "n d"], *, full: bool = True) -> "Moments":
        """Take the moments of the rows of one array, (n, d)."""
        return cls.empty(rows.shape[1], full=full).update(rows)

    @property
    def full(self) -> bool:
        """Whether covariances are kept, or variances only."""
        return self.scatter.ndim == 2

    @property
    def variance(self) -> Float64[np.ndarray, " d"]:
        """Biased variance (÷ n) of each coordinate, (d,), in squared units of the rows."""
        scatter = np.diagonal(self.scatter) if self.full else self.scatter
        return scatter / self._rows()

    @property
    def covariance(self) -> Float64[np.ndarray, "d d"]:
        """Biased covariance (÷ n), (d, d), in squared units of the rows."""
        if not self.full:
            raise InputError("these moments kept variances only; start them with full=True to have a covariance")
        return self.scatter / self._rows()

    def update(self, rows: Float[np.ndarray, "n d"]) -> "Moments":
        """Count these rows as well, (n, d); there may be none.

        Raises:
            InputError: Rows of another width, or non-finite ones.
        """
        if rows.ndim != 2 or rows.shape[1] != len(self.mean):
            raise InputError(f"rows of shape {rows.shape} do not fit moments of width {len(self.mean)}; pass (n, d)")
        if len(rows) == 0:
            return self
        values = np.asarray(rows, dtype=np.float64)
        mean = values.mean(axis=0)
        if not np.isfinite(mean).all():
            raise InputError("rows hold non-finite values, and those are never averaged; leave the rows out")
        centred = values - mean
        scatter = centred.T @ centred if self.full else np.einsum("nd,nd->d", centred, centred)
        return self.merge(Moments(len(values), mean, scatter))

    def merge(self, other: "Moments") -> "Moments":
        """Take the moments of both streams together.

        Raises:
            InputError: Moments of another width, or one of the two with variances only.
        """
        if self.scatter.shape != other.scatter.shape:
            raise InputError(
                f"moments with scatter {self.scatter.shape} and {other.scatter.shape} cannot be merged; "
                "width and kind must be the same"
            )
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        outer = np.outer(gap, gap) if self.full else gap**2
        return Moments(
            count,
            self.mean + gap * (other.count / count),
            self.scatter + other.scatter + outer * (self.count * other.count / count),
        )

    def _rows(self) -> int:
        if self.count == 0:
            raise InputError("moments of no rows are not defined; update them with at least one row first")
        return self.count
