"""How much of the drift descends a potential, how much circulates, and what the potential is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from layerflow.analysis.scoring import Split
from layerflow.analysis.shuffle import derangement
from layerflow.errors import InputError
from layerflow.numerics.curl_free import PotentialEquations, PotentialFit
from layerflow.numerics.gram import Gram
from layerflow.numerics.least_squares import LeastSquaresFit
from layerflow.numerics.r2 import r2
from layerflow.numerics.ranks import spearman_rows

N_SHUFFLES = 5
# Of the normal equations' residual. R2 is then exact to 1e-6; at 1e-11 it takes twice the iterations.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class PotentialRow:
    """Held-out R2 of four drifts of one transition, and the shares that follow from them.

    ``potential_share`` = r2_potential / r2_quadratic and ``rotational_share`` = 1 - that, both NaN where the
    quadratic explains nothing. ``symmetric_share`` is that of the affine drift's matrix, between 0 and 1.
    """

    n_components: int
    transition: int
    r2_affine: float
    r2_quadratic: float
    r2_potential: float
    r2_potential_antisymmetric: float
    potential_share: float
    rotational_share: float
    symmetric_share: float
    symmetric_share_shuffled: float


@dataclass(frozen=True)
class PotentialReport:
    """The row of one transition, and the potential it speaks of."""

    row: PotentialRow
    fit: PotentialFit


@dataclass(frozen=True)
class PotentialCorrelateRow:
    """Rank correlation over tokens of the potential with one quantity at the state the step leaves.

    ``spearman`` is None where the quantity or the potential does not vary.
    """

    n_components: int
    transition: int
    quantity: str
    spearman: float | None


@dataclass(frozen=True)
class StrongestCorrelate:
    """The quantity whose rank correlation with the potential is largest in size, averaged over transitions.

    ``mean`` keeps the sign; it is far below ``mean_size`` where the sign changes with depth.
    """

    quantity: str
    mean_size: float
    mean: float


def potential_report(
    z: Float64[np.ndarray, "n d"],
    dz: Float64[np.ndarray, "n d"],
    split: Split,
    sums: Gram,
    *,
    affine: LeastSquaresFit,
    quadratic: LeastSquaresFit,
    transition: int,
    rng: np.random.Generator,
) -> PotentialReport:
    """Split the drift of one transition into descent of a potential and circulation.

    The steps are fitted by -grad V with V a cubic polynomial, that is a quadratic field whose linear part is
    symmetric and whose quadratic part is fully symmetric; its held-out R2 over that of the unconstrained
    quadratic field is the potential share. A second fit adds an antisymmetric matrix: what it gains is the
    rotation that is linear, (r2_potential_antisymmetric - r2_potential) / (r2_quadratic - r2_potential) of
    the rotational remainder. Centring states and steps changes none of the fields on offer (each has a
    constant part), only their coefficients.

    ``z`` and ``dz`` (n, d) are all tokens' states and steps; ``sums`` the degree 2 Gram of the training rows,
    and ``affine`` and ``quadratic`` the fits solved from it. The shuffled symmetric share is the mean over
    ``N_SHUFFLES`` derangements of the training steps. Cost: two fits by conjugate gradients, F^2 d an
    iteration with F = (d + 1)(d + 2) / 2, and n F d for the scores. SPEC section 6; paper, section 5.
    """
    states, steps = z[split.test], dz[split.test]
    equations = PotentialEquations.of(sums)
    fit = equations.fit(tolerance=TOLERANCE)
    with_rotation = equations.fit(antisymmetric=True, tolerance=TOLERANCE)
    explained, field = r2(steps, fit.predict(states)), r2(steps, quadratic.predict(states))
    share = explained / field if field > 0.0 else float("nan")
    row = PotentialRow(
        n_components=z.shape[1],
        transition=transition,
        r2_affine=r2(steps, affine.predict(states)),
        r2_quadratic=field,
        r2_potential=explained,
        r2_potential_antisymmetric=r2(steps, with_rotation.predict(states)),
        potential_share=share,
        rotational_share=1.0 - share,
        symmetric_share=symmetric_share(affine.coefficients[1:].T),
        symmetric_share_shuffled=shuffled_symmetric_share(z[split.train], dz[split.train], rng),
    )
    return PotentialReport(row, fit)


def symmetric_share(matrix: Float[np.ndarray, "d d"]) -> float:
    """Squared Frobenius norm of the symmetric part over that of the matrix: ||(B + B^T)/2||^2 / ||B||^2.

    1 for a symmetric matrix, 0 for an antisymmetric one, (1 + 1/d)/2 on average for independent entries of
    equal variance; NaN for a matrix of zeros. SPEC section 6.
    """
    size = float(np.sum(matrix**2))
    return float(np.sum(((matrix + matrix.T) / 2.0) ** 2)) / size if size > 0.0 else float("nan")


def shuffled_symmetric_share(
    z: Float64[np.ndarray, "n d"],
    dz: Float64[np.ndarray, "n d"],
    rng: np.random.Generator,
    *,
    n_shuffles: int = N_SHUFFLES,
) -> float:
    """Symmetric share of the affine map fitted to steps shuffled over tokens, averaged over derangements.

    What is left of it is chance and the shape of the cloud: short axes get large coefficients. All shuffles
    share one pseudo-inverse of the states' covariance.
    """
    centred, steps = z - z.mean(axis=0), dz - dz.mean(axis=0)
    inverse = np.linalg.pinv(centred.T @ centred, hermitian=True)
    shares = [symmetric_share(steps[derangement(len(z), rng)].T @ centred @ inverse) for _ in range(n_shuffles)]
    return float(np.mean(shares))


def potential_values(
    fit: PotentialFit, mean_step: Float64[np.ndarray, " d"], z: Float64[np.ndarray, "n d"]
) -> Float64[np.ndarray, " n"]:
    """Value of the fitted potential at each state, in squared units of z; zero at the centre of the cloud.

    It is the potential of the *centred* steps, as in the paper: the tilt -mean_step . z, which moves all
    tokens alike and ranks them along one axis, is taken out. ``mean_step`` (d,) is the mean the steps were
    centred on (``Gram.step_center``), ``z`` (n, d).
    """
    return np.asarray(fit.potential(z) + (z - fit.center) @ mean_step)


def potential_correlates(
    potential: Float64[np.ndarray, " n"],
    quantities: Mapping[str, Float[np.ndarray, " n"]],
    *,
    n_components: int,
    transition: int,
) -> list[PotentialCorrelateRow]:
    """Spearman correlation of the potential with each named quantity of the same tokens, (n,) each.

    The flow descends the potential, so a positive correlation says that tokens move where the quantity is
    lower. The paper leaves the potential unidentified; these are the candidates. Raises ``InputError`` for
    unequal lengths or non-finite values.
    """
    if not quantities:
        return []
    values = np.stack([np.asarray(quantity, dtype=np.float64) for quantity in quantities.values()])
    correlations = spearman_rows(np.tile(potential, (len(values), 1)), values)
    return [
        PotentialCorrelateRow(n_components, transition, name, float(value) if np.isfinite(value) else None)
        for name, value in zip(quantities, correlations, strict=True)
    ]


def strongest_correlate(rows: Iterable[PotentialCorrelateRow]) -> StrongestCorrelate:
    """Name the quantity that follows the potential most closely, over all the transitions in ``rows``.

    Raises ``InputError`` when no row holds a correlation.
    """
    by_quantity: dict[str, list[float]] = {}
    for row in rows:
        if row.spearman is not None:
            by_quantity.setdefault(row.quantity, []).append(row.spearman)
    if not by_quantity:
        raise InputError("no quantity has a correlation with the potential; give at least one that varies over tokens")
    sizes = {quantity: float(np.mean(np.abs(values))) for quantity, values in by_quantity.items()}
    name = max(sizes, key=lambda quantity: sizes[quantity])
    return StrongestCorrelate(name, sizes[name], float(np.mean(by_quantity[name])))
