"""Figure 2: what each drift says beside what held-out tokens do, in the plane where the flow bends most."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from layerflow.laws.drift import Drift

N_BINS = 14
MIN_SUPPORT = 3

# The outermost tokens would stretch the grid until the bulk shares a few bins.
_COVERED = (0.01, 0.99)


@dataclass(frozen=True)
class FieldArrow:
    """The mean step of the held-out tokens of one bin: as observed, or as one drift predicts it.

    ``x``, ``y`` is the bin's centre and ``u``, ``v`` the step, in the leading principal plane of ``state``.
    """

    transition: int
    state: int
    x: float
    y: float
    series: str
    u: float
    v: float
    n: int


@dataclass(frozen=True)
class Plane:
    """The two leading principal axes of a cloud: centre (d,) and orthonormal rows (2, d)."""

    center: Float64[np.ndarray, " d"]
    axes: Float64[np.ndarray, "2 d"]

    def __call__(self, z: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n 2"]:
        """In-plane coordinates of states."""
        return (z - self.center) @ self.axes.T


def leading_plane(z: Float[np.ndarray, "n d"]) -> Plane:
    """The plane of the two largest variances of a cloud with d ≥ 2."""
    center = z.mean(axis=0)
    _, vectors = np.linalg.eigh(np.cov(z.T))
    return Plane(center, vectors[:, :-3:-1].T)


def in_plane_curvature(drift: Drift, z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n d"], plane: Plane) -> float:
    """How much a quadratic drift bends within a plane, relative to the steps there.

    rms of the drift's in-plane second-order part over the tokens moved into the plane, ÷ rms of their in-plane steps
    about the mean step. Dimensionless; 0 for an affine drift, and where nothing moves.
    """
    flat = plane(z) @ plane.axes
    # The second-order part of a polynomial is what an odd function lacks: (a(c+x) + a(c−x))/2 − a(c).
    center = plane.center[None]
    bend = (drift(center + flat) + drift(center - flat)) / 2 - drift(center)
    moved = (dz - dz.mean(axis=0)) @ plane.axes.T
    size = float(np.mean(moved**2))
    return float(np.sqrt(np.mean((bend @ plane.axes.T) ** 2) / size)) if size > 0.0 else 0.0


def field_arrows(
    drifts: Mapping[str, Drift],
    z: Float[np.ndarray, "n d"],
    dz: Float[np.ndarray, "n d"],
    plane: Plane,
    *,
    transition: int,
) -> list[FieldArrow]:
    """Mean steps per bin of a plane: observed, and predicted by each drift at the very same tokens.

    Bins with fewer than 3 held-out tokens have no arrow: there is nothing there to compare with.

    Args:
        drifts: Drifts by the name of their law.
        z: Held-out states of the transition.
        dz: Their steps.
        plane: Where the arrows are drawn: the leading plane of the state the transition starts from.
        transition: Recorded in every row.
    """
    where = plane(z)
    low, high = np.quantile(where, _COVERED, axis=0)
    edges = np.linspace(low, high, N_BINS + 1, axis=1)
    bins = np.stack([np.digitize(where[:, axis], edges[axis]) - 1 for axis in (0, 1)], axis=1)
    inside = ((bins >= 0) & (bins < N_BINS)).all(axis=1)
    cell = bins[inside, 0] * N_BINS + bins[inside, 1]
    support = np.bincount(cell, minlength=N_BINS**2)
    centers = [(edge[:-1] + edge[1:]) / 2 for edge in edges]
    arrows = []
    for series, steps in {"observed": dz, **{name: drift(z) for name, drift in drifts.items()}}.items():
        moved = (steps @ plane.axes.T)[inside]
        sums = [np.bincount(cell, weights=moved[:, axis], minlength=N_BINS**2) for axis in (0, 1)]
        arrows += [
            FieldArrow(
                transition=transition,
                state=transition,
                x=float(centers[0][index // N_BINS]),
                y=float(centers[1][index % N_BINS]),
                series=series,
                u=float(sums[0][index] / support[index]),
                v=float(sums[1][index] / support[index]),
                n=int(support[index]),
            )
            for index in np.flatnonzero(support >= MIN_SUPPORT)
        ]
    return arrows
