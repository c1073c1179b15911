"""State-independent noise: what is added to the mean step."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from layerflow.errors import InputError
from layerflow.numerics.gaussian import DiagonalGaussian, FullGaussian, Gaussian
from layerflow.numerics.moments import Moments

NoiseForm = Literal["diagonal", "full", "isotropic"]


@runtime_checkable
class Noise(Protocol):
    """Anything that can put a Gaussian around mean steps."""

    def around(self, mean: np.ndarray) -> Gaussian:
        """Gaussians with these means, (n, d)."""
        ...


@dataclass(frozen=True, eq=False)
class DiagonalNoise:
    """Independent coordinates with variances ``variance`` (d,); equal entries make it isotropic."""

    variance: Float64[np.ndarray, " d"]

    def __post_init__(self) -> None:
        if not (np.isfinite(self.variance).all() and (self.variance >= 0.0).all()):
            raise InputError(f"noise variances are {self.variance}, and they must be finite and not negative")

    def around(self, mean: Float64[np.ndarray, "n d"]) -> DiagonalGaussian:
        """Gaussians with these means, (n, d)."""
        return DiagonalGaussian(mean, self.variance)


@dataclass(frozen=True, eq=False)
class FullNoise:
    """Correlated coordinates with covariance BBᵀ = 2D, ``covariance`` (d, d)."""

    covariance: Float64[np.ndarray, "d d"]

    def __post_init__(self) -> None:
        size = np.abs(self.covariance).max(initial=0.0)
        if not (np.isfinite(size) and np.allclose(self.covariance, self.covariance.T, rtol=0.0, atol=1e-8 * size)):
            raise InputError("a noise covariance must be finite and symmetric; pass (C + C.T) / 2")

    def around(self, mean: Float64[np.ndarray, "n d"]) -> FullGaussian:
        """Gaussians with these means, (n, d)."""
        return FullGaussian(mean, self.covariance)


def covariance_noise(covariance: Float64[np.ndarray, "d d"], form: NoiseForm) -> DiagonalNoise | FullNoise:
    """Noise of this form from a covariance of residuals whose mean is zero.

    ``full``: all of it. ``diagonal``: each coordinate's variance. ``isotropic``: one variance for all coordinates,
    their mean. SPEC §4.

    Raises:
        InputError: Another form.
    """
    if form == "full":
        return FullNoise(covariance)
    variance = np.diagonal(covariance).copy()
    if form == "diagonal":
        return DiagonalNoise(variance)
    if form == "isotropic":
        return DiagonalNoise(np.full(len(variance), variance.mean()))
    raise InputError(f"the noise form is {form!r}, and it must be 'diagonal', 'full' or 'isotropic'")


def residual_noise(residuals: Float[np.ndarray, "n d"], form: NoiseForm) -> DiagonalNoise | FullNoise:
    """Noise with the biased (÷ n) mean squares and products of training residuals (n, d).

    They are taken about zero, which is the mean of the residuals of any law with a free offset.

    Raises:
        InputError: Another form, no rows, or non-finite residuals.
    """
    moments = Moments.of(residuals)
    return covariance_noise(moments.covariance + np.outer(moments.mean, moments.mean), form)
