"""The gradient test's control: Ornstein-Uhlenbeck processes whose drift is D grad log p by construction."""

from dataclasses import dataclass

import numpy as np
import scipy.linalg
from jaxtyping import Float, Float64

from layerflow.analysis.diffusion import GradientDiffusionRow, diffusion_rows
from layerflow.analysis.gradient import (
    N_NEIGHBORS,
    GradientRow,
    density_direction,
    energy_share,
    gradient_row,
    mean_cosine,
)
from layerflow.analysis.scoring import TRAIN_SHARE
from layerflow.errors import InputError
from layerflow.laws.drift import PolynomialDrift
from layerflow.laws.law import GaussianLaw
from layerflow.laws.noise import FullNoise
from layerflow.numerics.gaussian import Gaussian, safe_cholesky
from layerflow.numerics.moments import Moments
from layerflow.numerics.neighbors import nearest

# The paper's range (appendix A).
DRIFT_TO_NOISE = tuple(float(ratio) for ratio in np.geomspace(0.9, 106.0, 8))
# The standard error of a mean cosine over this many tokens is below 0.005 at any width.
N_READ = 5_000
# Ratio of the largest to the smallest eigenvalue of the planted anisotropic diffusion.
CONDITION = 100.0


@dataclass(frozen=True)
class CalibrationRow:
    """What the instrument reads on a known gradient flow at one drift-to-noise ratio.

    ``direction_agreement`` is the mean cosine of the estimated direction with the exact gradient of log p;
    the alignment should follow it times sqrt(r / (1 + r)) when nothing is ``translated``.
    """

    drift_to_noise: float
    translated: bool
    direction_agreement: float
    alignment: float
    energy_share: float


@dataclass(frozen=True)
class ControlReport:
    """What both tests read on their controls: the alignment's is isotropic, the fitted matrix's anisotropic."""

    gradient: GradientRow
    diffusion: list[GradientDiffusionRow]


@dataclass(frozen=True)
class ControlCloud:
    """Tokens drawn from the Gaussian with a cloud's mean (d,) and covariance (d, d), and their directions.

    ``states`` (m, d) are the tokens read and ``direction`` (m, d) the estimated direction of rising density
    there, from neighbours among all the tokens drawn; ``score`` (m, d) is the exact gradient of log p,
    -covariance^-1 (z - mean).
    """

    mean: Float64[np.ndarray, " d"]
    covariance: Float64[np.ndarray, "d d"]
    states: Float64[np.ndarray, "m d"]
    direction: Float64[np.ndarray, "m d"]

    @property
    def score(self) -> Float64[np.ndarray, "m d"]:
        """Exact gradient of the log-density at the states, (m, d)."""
        factor = safe_cholesky(self.covariance).factor
        return -scipy.linalg.cho_solve((factor, True), (self.states - self.mean).T).T


def control_cloud(
    z: Float[np.ndarray, "n d"], rng: np.random.Generator, *, k: int = N_NEIGHBORS, n_read: int = N_READ
) -> ControlCloud:
    """Draw as many tokens as the cloud ``z`` (n, d) has from the Gaussian with its mean and covariance.

    Directions are estimated by the very code that reads the flow, from k neighbours among all n tokens, at
    ``n_read`` of them: the search is the only cost that grows with n^2, and reading 5,000 tokens settles a
    mean cosine to 0.005. Raises ``InputError`` for a singular covariance.
    """
    moments = Moments.of(z)
    cloud = Gaussian.full(np.tile(moments.mean, (len(z), 1)), moments.covariance).draw(rng)
    states = cloud[:n_read]
    found = nearest(cloud, k + 1, queries=states, exclude_self=False)
    # Draws are distinct, so each token is its own nearest.
    direction = density_direction(cloud, found.indices[:, 1:], at=states)
    return ControlCloud(moments.mean, moments.covariance, states, direction)


def ornstein_uhlenbeck(
    mean: Float64[np.ndarray, " d"],
    covariance: Float64[np.ndarray, "d d"],
    diffusion: Float64[np.ndarray, "d d"],
    *,
    drift_to_noise: float,
) -> GaussianLaw:
    """One step of the reversible diffusion that leaves N(mean, covariance) unchanged, as a law.

    dz = D grad log p dt + sqrt(2 D) dW with p = N(mean, covariance); one Euler step of length t has drift
    a(z) = -t D covariance^-1 (z - mean) and noise covariance 2 t D. Over the stationary cloud mean ||a||^2 =
    t^2 tr(D covariance^-1 D) and mean ||noise||^2 = 2 t tr D, so their ratio r fixes the length of the step,
    t = 2 r tr D / tr(D covariance^-1 D): a larger ratio is a longer step. Cosines and shares do not depend on
    the scale of D.

    ``diffusion`` D (d, d) is symmetric positive definite: c I for the paper's control, whose drift is
    parallel to grad log p. Raises ``InputError`` for a ratio that is not positive or a singular covariance.
    SPEC section 6.
    """
    if not 0.0 < drift_to_noise < np.inf:
        raise InputError(f"the drift-to-noise ratio is {drift_to_noise}, and it must be positive and finite")
    factor = safe_cholesky(covariance).factor
    pull = scipy.linalg.cho_solve((factor, True), diffusion).T  # D covariance^-1
    length = 2.0 * drift_to_noise * np.trace(diffusion) / np.trace(pull @ diffusion)
    drift = PolynomialDrift.affine(length * pull @ mean, -length * pull)
    return GaussianLaw(drift, FullNoise(2.0 * length * diffusion))


def anisotropic_diffusion(
    d: int, rng: np.random.Generator, *, condition: float = CONDITION
) -> Float64[np.ndarray, "d d"]:
    """A symmetric positive definite matrix with eigenvalues spread evenly in the logarithm, in random directions.

    Its axes are those of a random rotation, so it commutes with no covariance but by accident.
    """
    axes, _ = np.linalg.qr(rng.standard_normal((d, d)))
    return (axes * np.geomspace(1.0, 1.0 / condition, d)) @ axes.T


def matched_ratio(explained: float) -> float:
    """The flow's own ratio r = R2 / (1 - R2), from the held-out R2 of its best drift (the quadratic).

    That is the mean squared drift around its mean over the mean squared residual. R2 is held within
    0.01..0.999, so that a transition without a visible drift still has a control.
    """
    share = float(np.clip(explained, 0.01, 0.999))
    return share / (1.0 - share)


def control_report(
    cloud: ControlCloud,
    weights: Float64[np.ndarray, "b m"],
    *,
    drift_to_noise: float,
    transition: int,
    rng: np.random.Generator,
) -> ControlReport:
    """Put gradient flows on the control's cloud through the tests the flow goes through.

    The alignment is read on an isotropic diffusion, whose drift is parallel to grad log p; the fitted matrix
    on an anisotropic one that does not commute with the covariance, which is what that test is for. Both have
    the given ratio of drift to noise, as the flow has at this transition (see ``matched_ratio``). The tokens
    are exchangeable, so the first 80 % train. ``weights`` are those of ``bootstrap.resample_weights`` for the
    m tokens read.
    """
    m, d = cloud.states.shape
    isotropic, anisotropic = (
        ornstein_uhlenbeck(cloud.mean, cloud.covariance, diffusion, drift_to_noise=drift_to_noise)
        .at(cloud.states)
        .draw(rng)
        for diffusion in (np.eye(d), anisotropic_diffusion(d, rng))
    )
    train, test = np.split(np.arange(m), [int(TRAIN_SHARE * m)])
    return ControlReport(
        gradient_row(cloud.direction, isotropic, weights, transition=transition, subject="control"),
        diffusion_rows(cloud.direction, anisotropic, train, test, transition=transition, subject="control", rng=rng),
    )


def calibration_rows(
    z: Float[np.ndarray, "n d"],
    dz: Float[np.ndarray, "n d"],
    rng: np.random.Generator,
    *,
    k: int = N_NEIGHBORS,
    n_read: int = N_READ,
    ratios: tuple[float, ...] = DRIFT_TO_NOISE,
) -> list[CalibrationRow]:
    """Read isotropic controls of one transition's cloud over a sweep of drift-to-noise ratios.

    Each ratio is read twice: as it is, and with one and the same translation added to every step. The
    translation has the direction of the flow's mean step and its size relative to the fluctuating part,
    ||mean D||^2 / mean ||D - mean D||^2, so it shows what this transition's own translation can hide.

    ``z`` (n, d) are the states and ``dz`` (n, d) the steps of the transition. Cost: one search for ``n_read``
    states. SPEC section 6; paper, appendix A.
    """
    cloud = control_cloud(z, rng, k=k, n_read=n_read)
    agreement = mean_cosine(cloud.direction, cloud.score)
    mean_step = dz.mean(axis=0)
    relative = mean_step / np.sqrt(np.mean(np.sum((dz - mean_step) ** 2, axis=1)))
    rows = []
    for ratio in ratios:
        law = ornstein_uhlenbeck(cloud.mean, cloud.covariance, np.eye(z.shape[1]), drift_to_noise=ratio)
        steps = law.at(cloud.states).draw(rng)
        size = np.sqrt(np.mean(np.sum(steps**2, axis=1)))
        for translated in (False, True):
            seen = steps + size * relative if translated else steps
            reading = mean_cosine(cloud.direction, seen), energy_share(cloud.direction, seen)
            rows.append(CalibrationRow(ratio, translated, agreement, *reading))
    return rows
