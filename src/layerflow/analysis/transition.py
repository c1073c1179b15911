"""One transition: the laws of SPEC §4, fitted on the training tokens of every split and scored on the others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64

from layerflow.analysis.scoring import HeldOut, LawContest, LawScore, Setting, Split, contests, hold_out, scores
from layerflow.laws.kramers_moyal import KramersMoyalLaw, LocalScores
from layerflow.laws.law import GaussianLaw
from layerflow.laws.nulls import fit_null_a, fit_null_c
from layerflow.laws.polynomial import polynomial_law
from layerflow.laws.rotation_stretch import fit_rotation_stretch
from layerflow.numerics.gaussian import Gaussian
from layerflow.numerics.gram import Gram, gram, training_grams
from layerflow.numerics.least_squares import LeastSquaresFit, solve
from layerflow.numerics.neighbors import Neighbors, neighbor_means, restrict
from layerflow.numerics.polynomial import n_features
from layerflow.numerics.r2 import r2, squared_errors

_DEGREES = {"affine": 1, "quadratic": 2}


@dataclass(frozen=True)
class Locality:
    """How local a neighbourhood of k is, and what the Kramers–Moyal drift explains with it.

    ``radius_ratio`` is the mean distance of held-out tokens to their k-th nearest training state, in units of the
    cloud's radius sqrt(mean‖z − z̄‖²).
    """

    n_components: int
    seed: int
    k: int
    transition: int
    radius_ratio: float
    r2: float


@dataclass(frozen=True)
class LawDiagnostics:
    """How well posed a fit was: floored local variances, or rank and condition of the least-squares problem.

    ``rank`` of ``n_features`` monomials are independent; ``condition`` is None where they are not all.
    """

    n_components: int
    seed: int
    transition: int
    law: str
    n_floored: int | None = None
    n_features: int | None = None
    rank: int | None = None
    condition: float | None = None


@dataclass(frozen=True)
class TransitionReport:
    """The rows of one transition, one list a table, and what the first split's polynomials were fitted from.

    ``fits`` are its least-squares fits by width and law, ``normal_equations`` the Gram of its training tokens.
    """

    normal_equations: Gram
    fits: dict[int, dict[str, LeastSquaresFit]] = field(default_factory=dict)
    scores: list[LawScore] = field(default_factory=list)
    contests: list[LawContest] = field(default_factory=list)
    locality: list[Locality] = field(default_factory=list)
    diagnostics: list[LawDiagnostics] = field(default_factory=list)
    equal_budget: list[LawScore] = field(default_factory=list)


@dataclass(frozen=True)
class SharedSplit:
    """A split, and what all transitions share of it.

    ``weights`` resample its held-out tokens, ``null_b`` is null B by width, ``budget`` is the split with the training
    tokens cut down to the equal budget.
    """

    split: Split
    budget: Split
    weights: Float64[np.ndarray, "b m"]
    null_b: Mapping[int, GaussianLaw]


@dataclass(frozen=True)
class _Cell:
    """States and steps of one transition, split and width: ready to fit and to score."""

    setting: Setting
    z_train: Float64[np.ndarray, "n d"]
    dz_train: Float64[np.ndarray, "n d"]
    z_test: Float64[np.ndarray, "m d"]
    dz_test: Float64[np.ndarray, "m d"]

    @classmethod
    def of(cls, z: np.ndarray, dz: np.ndarray, split: Split, setting: Setting) -> "_Cell":
        parts = (rows[part] for part in (split.train, split.test) for rows in (z, dz))
        return cls(setting, *parts)

    def narrow(self, width: int) -> "_Cell":
        """The leading coordinates of the same tokens."""
        parts = (self.z_train, self.dz_train, self.z_test, self.dz_test)
        setting = replace(self.setting, n_components=width)
        return _Cell(setting, *(np.ascontiguousarray(part[:, :width]) for part in parts))

    def scores(self, held_out: Sequence[HeldOut]) -> list[LawScore]:
        return scores(held_out, self.dz_test, self.setting, n_train=len(self.z_train))


def score_transition(
    z: Float64[np.ndarray, "n d"],
    dz: Float64[np.ndarray, "n d"],
    splits: Sequence[SharedSplit],
    neighbors: Mapping[int, Neighbors],
    *,
    transition: int,
    k: int,
    k_sweep: Sequence[int],
) -> TransitionReport:
    """Fit and score every law of one transition, at every width, on every split.

    Widths are the leading coordinates of one another, so one Gram matrix serves them all, and one neighbour search
    serves all splits. A polynomial with as many coefficients as training tokens or more is left out: its fit is not
    unique. The equal-budget block is of the first split.

    Args:
        z: States of all tokens.
        dz: Their steps.
        splits: The splits, with what they share over transitions.
        neighbors: Nearest other tokens of every token, by width; more than k of them.
        transition: Recorded in every row.
        k: Neighbours of the Kramers–Moyal law.
        k_sweep: Neighbourhood sizes of the locality rows, ascending.
    """
    grams = training_grams(z, dz, np.stack([_mask(shared.split.test, len(z)) for shared in splits]))
    report = TransitionReport(grams[0])
    for shared, whole in zip(splits, grams, strict=True):
        setting = Setting(z.shape[1], shared.split.seed, transition)
        wide = _Cell.of(z, dz, shared.split, setting)
        for width, found in neighbors.items():
            cell = wide.narrow(width)
            near = _nearest_training(z[:, :width], found, shared.split, k)
            local = KramersMoyalLaw(cell.z_train, cell.dz_train, k=k).score_neighbors(near, cell.dz_test)
            fits = _fit_polynomials(cell, whole.narrow(width))
            report.fits.setdefault(width, fits)
            held_out = [
                *_hold_out_local(local, cell),
                *_hold_out_polynomials(fits, cell),
                *_hold_out_rest(shared.null_b[width], cell),
            ]
            report.scores.extend(cell.scores(held_out))
            report.contests.extend(contests(held_out, cell.dz_test, shared.weights, cell.setting))
            report.locality.extend(_locality(cell, k_sweep, _radius(z[:, :width])))
            report.diagnostics.extend(_diagnostics(fits, local.n_floored, cell.setting))
    report.equal_budget.extend(_equal_budget(z, dz, splits[0].budget, neighbors, transition))
    return report


def _equal_budget(
    z: np.ndarray, dz: np.ndarray, budget: Split, widths: Iterable[int], transition: int
) -> list[LawScore]:
    """Scores of the polynomials fitted on the equal budget's training tokens."""
    wide = _Cell.of(z, dz, budget, Setting(z.shape[1], budget.seed, transition))
    sums = gram(wide.z_train, wide.dz_train)
    cells = [wide.narrow(width) for width in widths]
    return [
        score
        for cell in cells
        for score in cell.scores(
            _hold_out_polynomials(_fit_polynomials(cell, sums.narrow(cell.setting.n_components)), cell)
        )
    ]


def _nearest_training(
    cloud: Float64[np.ndarray, "n d"], found: Neighbors, split: Split, k: int
) -> Int64[np.ndarray, "m k"]:
    """The k nearest training tokens of each held-out one, as places in the training set."""
    near = restrict(found, cloud, _mask(split.train, len(cloud)), k, rows=split.test).indices
    place = np.empty(len(cloud), np.int64)
    place[split.train] = np.arange(len(split.train))
    return place[near]


def _fit_polynomials(cell: _Cell, normal_equations: Gram) -> dict[str, LeastSquaresFit]:
    width, n_train = cell.z_train.shape[1], len(cell.z_train)
    return {
        law: solve(normal_equations, cell.z_train, cell.dz_train, degree=degree, refine=False)
        for law, degree in _DEGREES.items()
        if n_features(width, degree) < n_train
    }


def _hold_out_local(local: LocalScores, cell: _Cell) -> list[HeldOut]:
    errors = squared_errors(cell.dz_test, local.mean)
    return [
        HeldOut("km", "local_diagonal", errors, local.log_density_diagonal),
        HeldOut("km", "local_full", errors, local.log_density_full),
    ]


def _hold_out_polynomials(fits: Mapping[str, LeastSquaresFit], cell: _Cell) -> list[HeldOut]:
    held_out = []
    for law, fit in fits.items():
        full = polynomial_law(fit, cell.z_train, cell.dz_train, noise="full").at(cell.z_test)
        forms = {"diagonal": Gaussian.diagonal(full.mean, full.marginal_variance), "full": full}
        held_out += [hold_out(step, cell.dz_test, law=law, noise=noise) for noise, step in forms.items()]
    return held_out


def _hold_out_rest(null_b: GaussianLaw, cell: _Cell) -> list[HeldOut]:
    """The three nulls, and the rotation and stretch of Sarfati et al."""
    laws = {
        ("null_a", "diagonal"): fit_null_a(cell.dz_train),
        ("null_b", "diagonal"): null_b,
        ("null_c", "full"): fit_null_c(cell.dz_train),
        ("rotation_stretch", "isotropic"): fit_rotation_stretch(cell.z_train, cell.dz_train).law,
    }
    return [hold_out(fit.at(cell.z_test), cell.dz_test, law=law, noise=noise) for (law, noise), fit in laws.items()]


def _locality(cell: _Cell, k_sweep: Sequence[int], radius: float) -> list[Locality]:
    if not k_sweep:
        return []
    found = neighbor_means(cell.z_train, cell.dz_train, cell.z_test, tuple(k_sweep))
    where = cell.setting
    return [
        Locality(
            where.n_components,
            where.seed,
            size,
            where.transition,
            radius_ratio=float(found.distances[:, index].mean() / radius),
            r2=r2(cell.dz_test, found.means[:, index]),
        )
        for index, size in enumerate(found.ks)
    ]


def _diagnostics(fits: Mapping[str, LeastSquaresFit], n_floored: int, setting: Setting) -> list[LawDiagnostics]:
    where = (setting.n_components, setting.seed, setting.transition)
    return [
        LawDiagnostics(*where, "km", n_floored=n_floored),
        *(
            LawDiagnostics(
                *where,
                law,
                n_features=len(fit.standard),
                rank=fit.rank,
                condition=fit.condition if np.isfinite(fit.condition) else None,
            )
            for law, fit in fits.items()
        ),
    ]


def _mask(rows: Int64[np.ndarray, " m"], n: int) -> Bool[np.ndarray, " n"]:
    mask = np.zeros(n, bool)
    mask[rows] = True
    return mask


def _radius(cloud: Float64[np.ndarray, "n d"]) -> float:
    return float(np.sqrt(cloud.var(axis=0).sum()))
