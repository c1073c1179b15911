"""Which token's step each token is given when steps are shuffled over tokens."""

import numpy as np
from jaxtyping import Int64

from layerflow.errors import InputError


def derangement(n: int, rng: np.random.Generator) -> Int64[np.ndarray, " n"]:
    """A random permutation of ``n`` tokens that leaves none in place: one random cycle through all of them.

    Every ordered pair of different tokens is as likely as any other. Raises ``InputError`` when n is below 2.
    """
    if n < 2:
        raise InputError(f"{n} token cannot be shuffled so that none keeps its step; at least 2 are needed")
    order = rng.permutation(n)
    partner = np.empty(n, dtype=np.int64)
    partner[order] = np.roll(order, 1)
    return partner
