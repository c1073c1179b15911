"""Does the flow climb its own log-density? Steps against the direction in which the cloud gets denser."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64
from scipy.sparse import csr_array

from layerflow.errors import InputError
from layerflow.numerics.bootstrap import mean_interval

N_NEIGHBORS = 48


@dataclass(frozen=True)
class GradientRow:
    """How far the steps of one transition follow the density, for the flow or for its control.

    ``alignment`` and ``shuffled`` are mean cosines, ``gap`` their difference with its 95 % interval
    ``low``..``high``, ``energy_share`` the share of squared step length along the direction (chance is 1/d).
    """

    n_components: int
    transition: int
    subject: str
    alignment: float
    shuffled: float
    gap: float
    low: float
    high: float
    energy_share: float


def density_direction(
    points: Float[np.ndarray, "n d"],
    nearest: Int64[np.ndarray, "m k"],
    *,
    at: Float[np.ndarray, "m d"] | None = None,
) -> Float64[np.ndarray, "m d"]:
    """Direction of rising density: the mean of a token's nearest other tokens minus its own state.

    g(z) = (1/k) sum_j z_j - z, proportional to the gradient of log p while the neighbours are near (there it
    is r^2 / (d + 2) times it, r being the neighbourhood's radius). ``points`` (n, d) is the whole cloud,
    ``nearest`` (m, k) the rows of the neighbours, the token itself left out; k = 48 in the paper. ``at`` (m,
    d) are the states asked about, all the points when left out. SPEC section 6. Cost: n d k.
    """
    centre = points if at is None else at
    if len(centre) != len(nearest):
        raise InputError(f"{len(centre)} states and {len(nearest)} rows of neighbours were given; pass one row a state")
    m, k = nearest.shape
    # As a sparse product: gathering would hold k times the cloud.
    choose = csr_array((np.full(m * k, 1.0 / k), nearest.ravel(), np.arange(m + 1) * k), shape=(m, len(points)))
    return np.asarray(choose @ points - centre)


def unit_rows(vectors: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n d"]:
    """Each row divided by its length; a row of zeros has no direction and stays zero."""
    lengths = np.linalg.norm(np.asarray(vectors, dtype=np.float64), axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros(vectors.shape), where=lengths > 0.0)


def mean_cosine(a: Float[np.ndarray, "n d"], b: Float[np.ndarray, "n d"]) -> float:
    """Mean over rows of the cosine between a row of ``a`` and the same row of ``b``; 0 where either is zero."""
    return float(np.einsum("nd,nd->", unit_rows(a), unit_rows(b))) / len(a)


def energy_share(direction: Float[np.ndarray, "n d"], steps: Float[np.ndarray, "n d"]) -> float:
    """Share of the steps' squared length that lies along each token's direction g.

    sum (D . g/|g|)^2 / sum ||D||^2, with D the whole step, noise included. Between 0 and 1; 1/d when steps
    and directions are unrelated. NaN when no token moves. SPEC section 6.
    """
    total = float(np.einsum("nd,nd->", steps, steps, dtype=np.float64))
    along = np.einsum("nd,nd->n", unit_rows(direction), steps)
    return float(along @ along) / total if total > 0.0 else float("nan")


def gradient_row(
    direction: Float[np.ndarray, "n d"],
    steps: Float[np.ndarray, "n d"],
    weights: Float64[np.ndarray, "b n"],
    *,
    transition: int,
    subject: str,
) -> GradientRow:
    """Read the alignment of steps with the direction of rising density, against its shuffle null.

    With u the unit directions and s the unit steps, alignment = mean of u_i . s_i. The null pairs steps with
    other tokens' directions; its mean over *all* such pairings is (sum u . sum s - sum u_i . s_i) / (n (n -
    1)), so it is computed and not sampled: no seed, no noise of its own. The gap is then the unbiased
    covariance of u and s summed over coordinates, sum (u_i - mean u) . (s_i - mean s) / (n - 1), and its
    interval the percentile bootstrap over tokens of that sum's terms. Each resample keeps the two means of
    the whole, which moves the gap by at most its square's order, 1/n.

    ``direction`` and ``steps`` (n, d), ``weights`` from ``bootstrap.resample_weights(n, ...)``; ``subject``
    is ``flow`` or ``control``. Cosines lie between -1 and 1. A token without a direction or a step counts as
    cosine 0. Raises ``InputError`` for fewer than 2 tokens or non-finite values. SPEC section 6.
    """
    n, width = direction.shape
    if n < 2:
        raise InputError(f"{n} token cannot be shuffled against others; the gradient test needs at least 2")
    u, s = unit_rows(direction), unit_rows(steps)
    alignment = float(np.einsum("nd,nd->", u, s)) / n
    shuffled = (float(u.sum(axis=0) @ s.sum(axis=0)) - n * alignment) / (n * (n - 1))
    terms = np.einsum("nd,nd->n", u - u.mean(axis=0), s - s.mean(axis=0)) * (n / (n - 1))
    interval = mean_interval(terms[:, None], weights)
    return GradientRow(
        n_components=width,
        transition=transition,
        subject=subject,
        alignment=alignment,
        shuffled=shuffled,
        gap=alignment - shuffled,
        low=float(interval.low[0]),
        high=float(interval.high[0]),
        energy_share=energy_share(direction, steps),
    )
