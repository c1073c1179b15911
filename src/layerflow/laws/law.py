"""Laws of motion: z′ = z + a(z) + B(z) ξ, drift and noise of one transition (SPEC §4).

A law maps states (n, d) to Gaussians over their steps. Steps have as many coordinates as states; only the scikit-learn
estimators allow another number, which the signatures here call e.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from layerflow.laws.drift import Drift
from layerflow.laws.noise import Noise
from layerflow.numerics.gaussian import Gaussian


@runtime_checkable
class Law(Protocol):
    """What every law can do, fitted or written by hand. Scores, rollouts and tests take laws and nothing else."""

    @property
    def drift(self) -> Drift:
        """Callable from states (n, d) to mean steps (n, d)."""
        ...

    def at(self, z: np.ndarray) -> Gaussian:
        """Gaussians over the step at states ``z`` (n, d): mean is the drift, covariance is BBᵀ = 2D."""
        ...

    def step(self, z: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Next states (n, d): the states plus one draw of the step from each."""
        ...

    def log_density(self, z: np.ndarray, dz: np.ndarray) -> np.ndarray:
        """Log-density (n,) of steps ``dz`` (n, d) taken at states ``z`` (n, d), in nats."""
        ...


@dataclass(frozen=True, eq=False)
class GaussianLaw:
    """Any drift with state-independent noise: z′ = z + drift(z) + ξ, ξ drawn from ``noise``.

    An Ornstein–Uhlenbeck step is ``GaussianLaw(PolynomialDrift.affine(offset, matrix), FullNoise(covariance))``.

    Args:
        drift: Any callable from states (n, d) to mean steps (n, d), such as a ``PolynomialDrift``.
        noise: ``DiagonalNoise`` or ``FullNoise``, or whatever puts Gaussians around mean steps.
    """

    drift: Drift
    noise: Noise

    def at(self, z: Float[np.ndarray, "n d"]) -> Gaussian:
        """Gaussians over the step at states ``z`` (n, d): mean is the drift, covariance is BBᵀ = 2D."""
        return self.noise.around(np.asarray(self.drift(z), dtype=np.float64))

    def step(self, z: Float[np.ndarray, "n d"], rng: np.random.Generator) -> Float64[np.ndarray, "n d"]:
        """Next states (n, d): the states plus one draw of the step from each."""
        return z + self.at(z).draw(rng)

    def log_density(self, z: Float[np.ndarray, "n d"], dz: Float[np.ndarray, "n e"]) -> Float64[np.ndarray, " n"]:
        """Log-density (n,) of steps ``dz`` (n, d) taken at states ``z`` (n, d), in nats."""
        return self.at(z).log_density(dz)
