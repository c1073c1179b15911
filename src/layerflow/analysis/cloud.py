"""Figure 1: the vocabulary's cloud through depth."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

MAX_TOKENS = 2000


@dataclass(frozen=True)
class CloudPoint:
    """One token at one state, in the two leading components of the shared basis."""

    state: int
    row: int
    x: float
    y: float
    count: int
    text: str


def cloud_points(
    reduced: Float[np.ndarray, "states n d"],
    counts: Int[np.ndarray, " n"],
    tokens: np.ndarray,
    *,
    rng: np.random.Generator,
) -> list[CloudPoint]:
    """Positions of at most 2,000 tokens, drawn uniformly without replacement, at every state.

    Args:
        reduced: Reduced trajectories, at least two components wide.
        counts: Occurrences of each token.
        tokens: Text of each token.
        rng: Draws the sample; all tokens are taken when there are no more.
    """
    n_tokens = len(counts)
    rows = np.arange(n_tokens)
    if n_tokens > MAX_TOKENS:
        rows = np.sort(rng.choice(n_tokens, MAX_TOKENS, replace=False))
    return [
        CloudPoint(index, int(row), float(state[row, 0]), float(state[row, 1]), int(counts[row]), str(tokens[row]))
        for index, state in enumerate(reduced)
        for row in rows
    ]
