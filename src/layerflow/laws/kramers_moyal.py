"""The Kramers–Moyal law: drift and noise read off the steps of the nearest training states."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Float, Float64, Int64

from layerflow.errors import InputError
from layerflow.laws.pairs import require_pairs
from layerflow.numerics.gaussian import Gaussian, shrink_off_diagonal
from layerflow.numerics.moments import Moments
from layerflow.numerics.neighbors import nearest, neighbor_means

LocalNoiseForm = Literal["local_diagonal", "local_full"]

# Local variances below this share of the transition's own step variance are raised to it.
RELATIVE_FLOOR = 1e-6

# Neighbours' steps and covariances of a block of states take this many bytes: memory stays flat, and in the cache.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class LocalMoments:
    """Moments of the k neighbouring steps at each of m states, floored and shrunk: ready to be a Gaussian.

    ``mean`` (m, d); ``variance`` (m, d); ``covariance`` (m, d, d) with that variance on its diagonal and off-diagonals
    multiplied by 0.9, or None when it was not asked for; ``n_floored`` counts the entries of ``variance`` that were
    raised to the floor.
    """

    mean: Float64[np.ndarray, "m d"]
    variance: Float64[np.ndarray, "m d"]
    covariance: Float64[np.ndarray, "m d d"] | None
    n_floored: int

    def gaussian(self, form: LocalNoiseForm) -> Gaussian:
        """Gaussians over the step with the noise of this form."""
        if form == "local_diagonal":
            return Gaussian.diagonal(self.mean, self.variance)
        if self.covariance is None:
            raise InputError("these moments were taken without covariances; take them with full=True")
        return Gaussian.full(self.mean, self.covariance)


@dataclass(frozen=True, eq=False)
class LocalScores:
    """What one pass over the neighbours of m held-out states gives for scoring: both noise forms at once.

    ``mean`` (m, d) is the drift; ``log_density_diagonal`` and ``log_density_full`` (m,) are of the steps given, in
    nats; ``n_floored`` of the m d variances were raised to the floor.
    """

    mean: Float64[np.ndarray, "m d"]
    log_density_diagonal: Float64[np.ndarray, " m"]
    log_density_full: Float64[np.ndarray, " m"]
    n_floored: int


@dataclass(frozen=True, eq=False)
class KramersMoyalLaw:
    """Mean step of the k nearest training states, with their spread as noise.

    a(z) = mean(Δ) and C(z) = mean((Δ − a)(Δ − a)ᵀ) over the steps Δ of the k training states nearest to z: biased (÷ k)
    moments. ``local_diagonal`` noise keeps the diagonal of C, ``local_full`` all of it with off-diagonals multiplied by
    0.9. Variances are floored at ``RELATIVE_FLOOR`` times the training steps' variance in that coordinate. A training
    state that is asked about is among its own neighbours. SPEC §4.

    Cost: one exact search a call of ``at``, ``drift``, ``step`` or ``log_density``; the methods that take ``indices``
    use a search already made.

    Args:
        states: Training states (n, d), kept in float64.
        steps: Their steps (n, d).
        k: Number of neighbours.
        noise: Form of the noise of ``at``.

    Raises:
        InputError: Rows that do not pair up, non-finite values, a k outside 1…n, another form of noise.
    """

    states: Float[np.ndarray, "n d"]
    steps: Float[np.ndarray, "n e"]
    _: KW_ONLY
    k: int = 64
    noise: LocalNoiseForm = "local_diagonal"

    def __post_init__(self) -> None:
        states, steps = require_pairs(self.states, self.steps)
        object.__setattr__(self, "states", states)  # float64, whatever came
        object.__setattr__(self, "steps", steps)
        n = len(states)
        if not 1 <= self.k <= n:
            raise InputError(
                f"k is {self.k}, and it must lie between 1 and the {n} training states; choose a smaller k"
            )
        if self.noise not in ("local_diagonal", "local_full"):
            raise InputError(f"the noise form is {self.noise!r}, and it must be 'local_diagonal' or 'local_full'")

    @cached_property
    def floor(self) -> Float64[np.ndarray, " e"]:
        """Least local variance of each coordinate, (d,)."""
        return RELATIVE_FLOOR * Moments.of(self.steps, full=False).variance

    def neighbors(self, z: Float[np.ndarray, "m d"]) -> Int64[np.ndarray, "m k"]:
        """Rows of the k nearest training states of each state ``z`` (m, d), nearest first."""
        return nearest(self.states, self.k, queries=z, exclude_self=False).indices

    def drift(self, z: Float[np.ndarray, "m d"]) -> Float64[np.ndarray, "m e"]:
        """Mean steps at states ``z`` (m, d)."""
        return neighbor_means(self.states, self.steps, z, (self.k,)).means[:, 0]

    def at(self, z: Float[np.ndarray, "m d"]) -> Gaussian:
        """Gaussians over the step at states ``z`` (m, d): mean is the drift, covariance is BBᵀ = 2D."""
        return self.at_neighbors(self.neighbors(z))

    def at_neighbors(self, indices: Int64[np.ndarray, "m k"]) -> Gaussian:
        """``at`` for states whose k nearest training rows are already known, (m, k).

        Memory: with full noise 8 m d² bytes, and as much again for a density or a draw; ``score_neighbors`` and
        ``step`` hold one block of it at a time.
        """
        return self.moments(indices, full=self.noise == "local_full").gaussian(self.noise)

    def step(self, z: Float[np.ndarray, "m d"], rng: np.random.Generator) -> Float64[np.ndarray, "m d"]:
        """Next states (m, d): the states plus one draw of the step from each."""
        following = np.array(z, dtype=np.float64)
        for rows, local in self._blocks(self.neighbors(z), full=self.noise == "local_full"):
            following[rows] += local.gaussian(self.noise).draw(rng)
        return following

    def log_density(self, z: Float[np.ndarray, "m d"], dz: Float[np.ndarray, "m e"]) -> Float64[np.ndarray, " m"]:
        """Log-density (m,) of steps ``dz`` (m, d) taken at states ``z`` (m, d), in nats."""
        density = np.empty(len(z))
        for rows, local in self._blocks(self.neighbors(z), full=self.noise == "local_full"):
            density[rows] = local.gaussian(self.noise).log_density(dz[rows])
        return density

    def moments(self, indices: Int64[np.ndarray, "m k"], *, full: bool) -> LocalMoments:
        """Local moments at m states whose k nearest training rows are known, (m, k); covariances when ``full``.

        Memory: the result, 8 m d² bytes when full, and one block of neighbours.
        """
        blocks = [local for _, local in self._blocks(indices, full=full)]
        return LocalMoments(
            np.concatenate([local.mean for local in blocks]),
            np.concatenate([local.variance for local in blocks]),
            np.concatenate([c for local in blocks if (c := local.covariance) is not None]) if full else None,
            sum(local.n_floored for local in blocks),
        )

    def score_neighbors(self, indices: Int64[np.ndarray, "m k"], dz: Float[np.ndarray, "m e"]) -> LocalScores:
        """Drift and log-densities of steps ``dz`` (m, d) under both noise forms, from one gather of the neighbours.

        Covariances exist for one block of states at a time: some 40 MiB whatever m and d. Cost, on one core: 0.3 s for
        5,000 states at k = d = 64.
        """
        m = len(indices)
        mean, diagonal, full = np.empty((m, self.steps.shape[1])), np.empty(m), np.empty(m)
        n_floored = 0
        for rows, local in self._blocks(indices, full=True):
            mean[rows] = local.mean
            diagonal[rows] = local.gaussian("local_diagonal").log_density(dz[rows])
            full[rows] = local.gaussian("local_full").log_density(dz[rows])
            n_floored += local.n_floored
        return LocalScores(mean, diagonal, full, n_floored)

    def _blocks(self, indices: np.ndarray, *, full: bool) -> Iterator[tuple[slice, LocalMoments]]:
        """Local moments of a block of rows at a time; at least one block, so that no rows give empty moments."""
        self._require_indices(indices)
        width = self.steps.shape[1]
        row_bytes = 8 * width * (self.k + (width if full else 0))
        size = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, max(1, len(indices)), size):
            rows = slice(start, start + size)
            yield rows, self._local(indices[rows], full=full)

    def _local(self, indices: np.ndarray, *, full: bool) -> LocalMoments:
        gathered = np.take(self.steps, indices, axis=0)
        mean = gathered.mean(axis=1)
        gathered -= mean[:, None, :]
        raw = np.einsum("mke,mke->me", gathered, gathered) / self.k
        variance = np.maximum(raw, self.floor)
        n_floored = int(np.count_nonzero(raw < self.floor))
        if not full:
            return LocalMoments(mean, variance, None, n_floored)
        covariance = np.matmul(gathered.transpose(0, 2, 1), gathered)
        covariance /= self.k
        # Off-diagonals are shrunk from the raw covariance; raising the diagonal keeps it positive definite.
        covariance = shrink_off_diagonal(covariance)
        diagonal = np.arange(variance.shape[1])
        covariance[:, diagonal, diagonal] = variance
        return LocalMoments(mean, variance, covariance, n_floored)

    def _require_indices(self, indices: np.ndarray) -> None:
        if indices.ndim != 2 or indices.shape[1] != self.k:
            raise InputError(f"neighbours of shape {indices.shape} were given, and k = {self.k} asks for (m, {self.k})")
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self.states):
            raise InputError(
                f"neighbours run from {indices.min()} to {indices.max()}, and they must be rows of the "
                f"{len(self.states)} training states; map rows of the whole cloud to rows of the training set first"
            )
