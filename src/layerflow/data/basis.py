"""The reduced state: one principal basis shared by all states (SPEC §3)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float64
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from layerflow.data.trajectories import Trajectories
from layerflow.errors import InputError


@dataclass(frozen=True)
class Retained:
    """Share of variance a basis keeps: pooled over the states it was fitted on, and of each state's own."""

    pooled: float
    per_state: Float64[np.ndarray, " states"]


class SharedBasis(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Principal components of all states at once, each state's cloud brought to the same size first.

    With mean μ_ℓ and radius ρ_ℓ = sqrt(mean‖h − μ_ℓ‖²) of every state, the components are those of the stacked
    (h − μ_ℓ)/ρ_ℓ over all states of a sample of tokens. ``transform`` projects the *raw* states, z = Uᵀh, so that a
    step in z is a step of the residual stream. Components are nested: the first 8 of 64 are the basis of 8.

    Cost: one D × D Gram product a state, and one eigendecomposition; memory O(n D) beyond the input. An SVD of the
    stacked sample was declined: 8,000 tokens × 31 states × 576 would need 1 GiB for the same subspace.

    Args:
        n_components: Number of components d.
        n_tokens: Tokens in the sample; all when there are fewer.
        random_state: Seed of the sample.

    Attributes:
        components_: Orthonormal rows (d, D), by falling variance; the largest entry of each is positive.
        means_: Mean of each state (L+1, D).
        radii_: Radius of each state (L+1,).
        explained_variance_ratio_: Share of the pooled variance of each component (d,); 0 where nothing varies.

    """

    def __init__(self, n_components: int = 16, *, n_tokens: int = 8000, random_state: int = 0) -> None:
        self.n_components = n_components
        self.n_tokens = n_tokens
        self.random_state = random_state

    def fit(self, X: Trajectories | Float[np.ndarray, "states n D"], y: None = None) -> "SharedBasis":
        """Fit the basis on trajectories, or on their states (L+1, n, D).

        Raises:
            InputError: States not finite or not (L+1, n, D); more components than D or than the tokens can span.
        """
        states = _states(X)
        _, n_tokens, width = states.shape
        if not 1 <= self.n_components <= min(width, n_tokens * len(states) - 1):
            raise InputError(
                f"n_components is {self.n_components}; with {n_tokens} tokens of width {width} it must lie "
                f"between 1 and {min(width, n_tokens * len(states) - 1)}"
            )
        sample = np.arange(n_tokens)
        if n_tokens > self.n_tokens:
            rng = np.random.default_rng(self.random_state)
            sample = np.sort(rng.choice(n_tokens, self.n_tokens, replace=False))
        self.means_ = np.empty((len(states), width))
        self.radii_ = np.empty(len(states))
        scatter, total = np.zeros((width, width)), np.zeros(width)
        for index, cloud in enumerate(_clouds(states)):
            # Seen from one of its tokens, a state in which nothing differs is zero without a rounding error.
            origin = cloud[0]
            cloud = cloud - origin
            mean = cloud.mean(axis=0)
            cloud -= mean
            self.means_[index] = origin + mean
            self.radii_[index] = np.sqrt(np.einsum("ij,ij->", cloud, cloud) / n_tokens)
            # Such a state has no direction to give.
            cloud = cloud[sample] / (self.radii_[index] or 1.0)
            scatter += cloud.T @ cloud
            total += cloud.sum(axis=0)
        scatter -= np.outer(total, total) / (len(states) * len(sample))
        variances, vectors = np.linalg.eigh(scatter)
        leading = vectors[:, ::-1][:, : self.n_components].T
        signs = np.sign(leading[np.arange(len(leading)), np.abs(leading).argmax(axis=1)])
        self.components_ = leading * signs[:, None]
        self.explained_variance_ratio_ = variances[::-1][: self.n_components] / (variances.sum() or 1.0)
        return self

    def transform(self, X: Trajectories | Float[np.ndarray, "states n D"]) -> Float64[np.ndarray, "states n d"]:
        """Project raw states onto the components: z = Uᵀh, in the residual stream's own units.

        Raises:
            InputError: States not finite, not (L+1, n, D), or of another width than the fitted ones.
        """
        check_is_fitted(self)
        states = _states(X)
        if states.shape[2] != self.components_.shape[1]:
            raise InputError(
                f"states have width {states.shape[2]}; this basis was fitted at {self.components_.shape[1]}"
            )
        return np.stack([cloud @ self.components_.T for cloud in _clouds(states)])

    def retained(self, reduced: Float64[np.ndarray, "states n d"], n_components: int | None = None) -> Retained:
        """Share of variance kept by the first components, in the range 0 to 1.

        Pooled: of the standardised sample the basis was fitted on. Per state: mean‖Uᵀ(h−μ_ℓ)‖² / ρ_ℓ², over all tokens.

        Args:
            reduced: The fitted trajectories' own `transform`, (L+1, n, d).
            n_components: How many leading components to count; all by default.
        """
        check_is_fitted(self)
        leading = reduced[:, :, :n_components]
        kept = leading.var(axis=1).sum(axis=1)
        return Retained(
            pooled=float(self.explained_variance_ratio_[:n_components].sum()),
            per_state=kept / np.where(self.radii_ > 0, self.radii_, 1.0) ** 2,
        )


def _states(trajectories: Any) -> np.ndarray:
    states = np.asarray(trajectories.states if isinstance(trajectories, Trajectories) else trajectories)
    if states.ndim != 3:
        raise InputError(f"states have shape {states.shape}; they need three axes, (L+1, n, D)")
    return states


def _clouds(states: np.ndarray) -> Iterator[np.ndarray]:
    """One state after the other in float64, each looked through for values that are not finite."""
    for index, state in enumerate(states):
        cloud = np.asarray(state, np.float64)
        bad = np.flatnonzero(~np.isfinite(cloud).all(axis=1))
        if len(bad):
            raise InputError(
                f"token row {bad[0]} is not finite in state {index} ({len(bad)} such rows); leave them out"
            )
        yield cloud
