"""Noise floor: how far a token's mean would move if the corpus were drawn again (SPEC §6)."""

from dataclasses import dataclass

import numpy as np
import scipy.spatial.distance
from jaxtyping import Float, Int

from layerflow.data.trajectories import Halves
from layerflow.errors import InputError

# Occurrences, both ends included; None is no upper end.
BANDS: tuple[tuple[int, int | None], ...] = ((5, 5), (10, 100), (1001, None))

# Above this many pairs the mean distance is taken over as many random ones: its relative error is then near 0.1 %.
MAX_PAIRS = 200_000

# Pairs looked at together; 2,048 × 768 numbers of 8 bytes are 12 MiB.
_BLOCK = 2048


@dataclass(frozen=True)
class NoiseFloorRow:
    """Noise of the means of one frequency band, in units of the distance between two random tokens.

    ``high`` is None where the band has no upper end; ``ratio`` is None where the band holds no token to measure.
    """

    low: int
    high: int | None
    n_tokens: int
    ratio: float | None


def noise_floor(
    final: Float[np.ndarray, "n D"],
    halves: Halves,
    counts: Int[np.ndarray, " n"],
    rng: np.random.Generator,
) -> list[NoiseFloorRow]:
    """Noise of the mean states by frequency band, relative to the size of the cloud.

    ratio = mean over the band's tokens of ‖h_A − h_B‖ / 2, ÷ mean distance between two random tokens. With two equal
    halves, ‖h_A − h_B‖ / 2 is the standard error of the token's mean; uneven halves make it somewhat larger. A token
    whose occurrences all fell into one half has no h_A − h_B and is not among ``n_tokens``.

    Args:
        final: Mean final states (n, D): their distances are the yardstick.
        halves: The two half means of the final state.
        counts: Occurrences of each token (n,), which place it in a band of `BANDS`.
        rng: Draws the pairs where there are more than `MAX_PAIRS`; unused otherwise.

    Returns:
        One row a band; ratios are at least 0, 0.02 to 0.40 in the paper. None too when no two tokens differ.

    Raises:
        InputError: Halves or counts of another number of tokens.

    """
    if not len(final) == len(halves.a) == len(halves.b) == len(counts):
        raise InputError(
            f"{len(final)} final states, halves of {len(halves.a)} and {len(halves.b)} and {len(counts)} counts were "
            "given; each needs one entry a token"
        )
    split = (halves.count_a > 0) & (halves.count_b > 0)
    typical = mean_pair_distance(final, rng)
    rows = []
    for low, high in BANDS:
        inside = split & (counts >= low) & (counts <= (np.inf if high is None else high))
        members = np.flatnonzero(inside)
        ratio = None
        if len(members) and typical > 0.0:
            ratio = float(np.mean(_distances(halves.a, halves.b, members, members)) / 2.0 / typical)
        rows.append(NoiseFloorRow(low, high, len(members), ratio))
    return rows


def mean_pair_distance(points: Float[np.ndarray, "n D"], rng: np.random.Generator) -> float:
    """Mean distance between two different random rows; 0 for a single one.

    Exact up to `MAX_PAIRS` pairs, over that many random ones beyond. Cost: at most `MAX_PAIRS` · D.
    """
    n = len(points)
    if n < 2:
        return 0.0
    if n * (n - 1) // 2 <= MAX_PAIRS:
        return float(scipy.spatial.distance.pdist(np.asarray(points, np.float64)).mean())
    first = rng.integers(n, size=MAX_PAIRS)
    second = (first + rng.integers(1, n, size=MAX_PAIRS)) % n
    return float(_distances(points, points, first, second).mean())


def _distances(a: np.ndarray, b: np.ndarray, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    """Distance between row ``rows_a[i]`` of ``a`` and row ``rows_b[i]`` of ``b``, a block of pairs at a time."""
    distances = np.empty(len(rows_a))
    for start in range(0, len(rows_a), _BLOCK):
        block = slice(start, start + _BLOCK)
        gap = np.asarray(a[rows_a[block]], np.float64) - b[rows_b[block]]
        distances[block] = np.sqrt(np.einsum("ij,ij->i", gap, gap))
    return distances
