"""The share of the steps' variance that a drift explains."""

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError


def squared_errors(steps: Float[np.ndarray, "n d"], predicted: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, " n"]:
    """Squared distance between each step and its prediction, (n,), in squared units of the steps.

    Raises:
        InputError: Shapes that differ.
    """
    if steps.shape != predicted.shape:
        raise InputError(
            f"steps of shape {steps.shape} cannot be compared with predictions of shape {predicted.shape}; "
            "they must have one shape"
        )
    residuals = np.asarray(steps, dtype=np.float64) - predicted
    return np.einsum("nd,nd->n", residuals, residuals)


def total_square(steps: Float[np.ndarray, "n d"]) -> float:
    """Sum of squared distances of the steps to their own mean; exactly zero when all steps are equal."""
    if (steps == steps[:1]).all():
        return 0.0  # the mean of equal numbers is not always that number
    centred = steps - np.mean(steps, axis=0, dtype=np.float64)
    return float(np.einsum("nd,nd->", centred, centred))


def r2(steps: Float[np.ndarray, "n d"], predicted: Float[np.ndarray, "n d"]) -> float:
    """R² = 1 − Σ‖Δ − â‖² / Σ‖Δ − mean(Δ)‖², with Δ the steps and â the predictions, (n, d) each.

    At most 1; zero for predicting the steps' own mean, negative for worse; NaN when all steps are equal, for there is
    then nothing to explain. Coordinates are pooled: scikit-learn's ``r2_score`` averages one R² a coordinate instead.
    SPEC §5.

    Raises:
        InputError: Shapes that differ.
    """
    errors = float(squared_errors(steps, predicted).sum())
    total = total_square(steps)
    return 1.0 - errors / total if total > 0.0 else float("nan")
