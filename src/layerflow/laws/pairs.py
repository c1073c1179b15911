"""States and the steps taken from them."""

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError


def require_pairs(
    z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n e"], *, n_minimum: int = 1
) -> tuple[Float64[np.ndarray, "n d"], Float64[np.ndarray, "n e"]]:
    """Return both in float64, (n, d) each.

    Raises:
        InputError: They do not pair up, are not finite, or have fewer than ``n_minimum`` rows.
    """
    states, steps = np.asarray(z, dtype=np.float64), np.asarray(dz, dtype=np.float64)
    if states.ndim != 2 or steps.ndim != 2 or len(states) != len(steps):
        raise InputError(
            f"states of shape {states.shape} and steps of shape {steps.shape} do not pair up; "
            "pass two arrays (n, d), one row a token"
        )
    if len(states) < n_minimum:
        raise InputError(f"{len(states)} rows were given, and a fit needs at least {n_minimum}; give it more tokens")
    if not (np.isfinite(states).all() and np.isfinite(steps).all()):
        raise InputError("states or steps hold non-finite values, and all must be finite; leave the rows out")
    return states, steps
