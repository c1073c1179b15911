"""One transition: does the flow descend its log-density, another potential, or circulate (SPEC §6)?"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from layerflow.analysis.control import control_cloud, control_report, matched_ratio
from layerflow.analysis.diffusion import GradientDiffusionRow, diffusion_rows
from layerflow.analysis.gradient import N_NEIGHBORS, GradientRow, density_direction, gradient_row
from layerflow.analysis.potential import (
    PotentialCorrelateRow,
    PotentialRow,
    potential_correlates,
    potential_report,
    potential_values,
)
from layerflow.analysis.scoring import Split
from layerflow.numerics.gram import Gram
from layerflow.numerics.least_squares import LeastSquaresFit
from layerflow.numerics.neighbors import Neighbors
from layerflow.numerics.r2 import r2

# A cubic potential has C(d + 3, 3) − 1 coefficients: 6,544 at d = 32, 47,904 at d = 64, where solving for them would
# take longer than all the rest of the study. `fit_potential` does it on request.
MAX_POTENTIAL_WIDTH = 32


@dataclass(frozen=True)
class PotentialValue:
    """The fitted potential at one token's state, in squared units of z; 0 at the centre of the cloud."""

    transition: int
    row: int
    value: float


@dataclass(frozen=True)
class LandscapeReport:
    """The rows of one transition, one list a table."""

    gradient: list[GradientRow] = field(default_factory=list)
    gradient_diffusion: list[GradientDiffusionRow] = field(default_factory=list)
    potential: list[PotentialRow] = field(default_factory=list)
    potential_values: list[PotentialValue] = field(default_factory=list)
    potential_correlates: list[PotentialCorrelateRow] = field(default_factory=list)


def landscape(
    z: Float64[np.ndarray, "n d"],
    dz: Float64[np.ndarray, "n d"],
    split: Split,
    normal_equations: Gram,
    fits: Mapping[int, Mapping[str, LeastSquaresFit]],
    neighbors: Mapping[int, Neighbors],
    quantities: Mapping[str, Float64[np.ndarray, " n"]],
    *,
    transition: int,
    working_width: int,
    weights: Float64[np.ndarray, "b n"],
    control_weights: Float64[np.ndarray, "b m"],
    rng: np.random.Generator,
) -> LandscapeReport:
    """Put one transition's drift through the gradient tests and the potential's, at every width, beside its control.

    A width whose quadratic fit was left out has no potential, and no control: the control's drift-to-noise ratio is
    matched to what the quadratic drift explains. Widths above `MAX_POTENTIAL_WIDTH` have no potential.

    Args:
        z: States of all tokens.
        dz: Their steps.
        split: Training and held-out tokens.
        normal_equations: Gram of the training tokens, all coordinates.
        fits: Least-squares fits of the training tokens by width and law.
        neighbors: Nearest other tokens of every token, by width; 48 of them are read, or all where there are fewer.
        quantities: What the potential's values are compared with, one number a token.
        transition: Recorded in every row.
        working_width: Width at which the potential's values are kept.
        weights: Bootstrap resamples of all tokens.
        control_weights: Bootstrap resamples of the control's tokens.
        rng: Draws controls and shuffles.
    """
    report = LandscapeReport()
    for width, found in neighbors.items():
        states, steps = np.ascontiguousarray(z[:, :width]), np.ascontiguousarray(dz[:, :width])
        k = min(N_NEIGHBORS, found.indices.shape[1])
        direction = density_direction(states, found.indices[:, :k])
        report.gradient.append(gradient_row(direction, steps, weights, transition=transition, subject="flow"))
        report.gradient_diffusion.extend(
            diffusion_rows(direction, steps, split.train, split.test, transition=transition, subject="flow", rng=rng)
        )
        if "quadratic" not in fits[width]:
            continue
        affine, quadratic = fits[width]["affine"], fits[width]["quadratic"]
        explained = r2(steps[split.test], quadratic.predict(states[split.test]))
        cloud = control_cloud(states, rng, k=k)
        control = control_report(
            cloud,
            control_weights,
            drift_to_noise=matched_ratio(explained),
            transition=transition,
            rng=rng,
        )
        report.gradient.append(control.gradient)
        report.gradient_diffusion.extend(control.diffusion)
        if width > MAX_POTENTIAL_WIDTH:
            continue
        sums = normal_equations.narrow(width)
        potential = potential_report(
            states, steps, split, sums, affine=affine, quadratic=quadratic, transition=transition, rng=rng
        )
        report.potential.append(potential.row)
        if width == working_width:
            values = potential_values(potential.fit, sums.step_center, states)
            report.potential_values.extend(
                PotentialValue(transition, row, float(value)) for row, value in enumerate(values)
            )
            report.potential_correlates.extend(
                potential_correlates(values, quantities, n_components=width, transition=transition)
            )
    return report
