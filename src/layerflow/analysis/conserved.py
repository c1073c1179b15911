"""What is conserved: whether a token keeps its rank in the vocabulary through depth (SPEC §6)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError
from layerflow.numerics.ranks import spearman

# Rows taken to float64 together: few enough that the block stays in the processor's cache.
_BLOCK = 512


@dataclass(frozen=True)
class ConservedRow:
    """Rank correlation of one observable at one state with state 0 and with the state before.

    Between −1 and 1. ``from_previous`` is None at state 0; both are None where an observable does not vary.
    """

    observable: str
    state: int
    from_first: float | None
    from_previous: float | None


@dataclass(frozen=True)
class Observables:
    """Full-width observables of every token at one state, (n,) each.

    ``cosine`` to the mean direction, −1 to 1; ``norm`` ‖h‖ in the residual stream's units; ``participation_ratio``
    (Σh²)²/Σh⁴, 1 (one coordinate) to D (all alike). Cosine and participation ratio of a zero vector are 0.
    """

    cosine: Float64[np.ndarray, " n"]
    norm: Float64[np.ndarray, " n"]
    participation_ratio: Float64[np.ndarray, " n"]


def conserved(
    states: Float[np.ndarray, "states n D"], neighbor_distances: Float[np.ndarray, "states n"]
) -> list[ConservedRow]:
    """Spearman correlation of each observable at state 0 with each state, and of neighbouring states.

    The observables are ``cosine``, ``norm`` and ``participation_ratio`` at full width, and ``local_density``,
    −log distance to the 48th neighbour in the reduced state.

    Args:
        states: Mean states (L+1, n, D); a memory map is read one state at a time, twice.
        neighbor_distances: Distance of each token to its 48th nearest other token in the reduced state (L+1, n).

    Returns:
        One row an observable and state, by observable.

    Raises:
        InputError: Distances of another shape, or negative or not finite.

    Cost: two passes over the states. Memory: eight numbers a token and state.
    """
    if neighbor_distances.shape != states.shape[:2]:
        raise InputError(
            f"neighbour distances have shape {neighbor_distances.shape}; states of shape {states.shape} need one a "
            f"state and token, {states.shape[:2]}"
        )
    measured = [observables(state) for state in states]
    return [
        *_rows("cosine", [each.cosine for each in measured]),
        *_rows("norm", [each.norm for each in measured]),
        *_rows("participation_ratio", [each.participation_ratio for each in measured]),
        *_rows("local_density", [local_density(distances) for distances in neighbor_distances]),
    ]


def observables(state: Float[np.ndarray, "n D"]) -> Observables:
    """Cosine to the mean direction, norm and participation ratio of every row, in float64 a block at a time."""
    direction = np.zeros(state.shape[1])
    for block in _blocks(state):
        direction += block.sum(axis=0)
    size = np.linalg.norm(direction)
    direction /= size if size > 0.0 else 1.0
    along, squares, fourths = [], [], []
    for block in _blocks(state):
        along.append(block @ direction)
        block *= block
        squares.append(block.sum(axis=1))
        fourths.append(np.einsum("ij,ij->i", block, block))
    square, fourth = np.concatenate(squares), np.concatenate(fourths)
    norm = np.sqrt(square)
    return Observables(
        cosine=_ratio(np.concatenate(along), norm), norm=norm, participation_ratio=_ratio(square**2, fourth)
    )


def local_density(distances: Float[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """−log distance to the k-th neighbour: up to a constant and a factor d, the log of the local density.

    Tokens with k copies of themselves, at distance 0, tie as the densest. Raises ``InputError`` for a distance that is
    negative or not finite.
    """
    if not (np.isfinite(distances).all() and (distances >= 0.0).all()):
        raise InputError("distances to the neighbours must be finite and not negative; search the neighbours again")
    return -np.log(np.maximum(np.asarray(distances, np.float64), np.finfo(np.float64).tiny))


def _rows(observable: str, values: list[np.ndarray]) -> list[ConservedRow]:
    rows = []
    for state, value in enumerate(values):
        previous = None if state == 0 else _rank_correlation(values[state - 1], value)
        rows.append(ConservedRow(observable, state, _rank_correlation(values[0], value), previous))
    return rows


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    if len(a) < 2:
        return None
    correlation = spearman(a, b)
    return None if np.isnan(correlation) else correlation


def _blocks(state: np.ndarray) -> Iterator[np.ndarray]:
    """Copies of the rows in float64, a block at a time."""
    for start in range(0, len(state), _BLOCK):
        yield state[start : start + _BLOCK].astype(np.float64)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.asarray(np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0.0))
