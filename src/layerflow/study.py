"""One configuration → all tables: the paper on one page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa

from layerflow import tables
from layerflow.analysis.cloud import CloudPoint, cloud_points
from layerflow.analysis.fields import FieldArrow, Plane, field_arrows, in_plane_curvature, leading_plane
from layerflow.analysis.noise_floor import NoiseFloorRow, noise_floor
from layerflow.analysis.norms import norms
from layerflow.analysis.scoring import LawContest, LawScore, Split, split
from layerflow.analysis.transition import (
    LawDiagnostics,
    Locality,
    SharedSplit,
    TransitionReport,
    score_transition,
)
from layerflow.data.basis import SharedBasis
from layerflow.data.storage import read_manifest, write_manifest
from layerflow.data.trajectories import StateNorms, Trajectories
from layerflow.errors import InputError
from layerflow.laws.kramers_moyal import KramersMoyalLaw
from layerflow.laws.nulls import fit_null_b
from layerflow.numerics.bootstrap import resample_weights
from layerflow.numerics.least_squares import fit_polynomial
from layerflow.numerics.neighbors import Neighbors, nearest
from layerflow.progress import say, track

WITH_SINKS = "results"
WITHOUT_SINKS = "results-without-sinks"

WIDTHS = (8, 16, 32, 64)
WORKING_WIDTH = 16
K_SWEEP = (64, 256, 1024)
PAPER_BUDGET = 9549


@dataclass(frozen=True)
class StudyOptions:
    """What to compute, and how.

    Args:
        widths: Numbers of components; those of 8, 16, 32, 64 that the data allow when None.
        seeds: Seeds of the 80/20 splits.
        k: Neighbours of the Kramers–Moyal law.
        budget: Training tokens of the equal-budget block; the smaller of 9,549 and half of them when None.
        n_resamples: Bootstrap resamples behind every interval.
        basis_tokens: Tokens in the sample the shared basis is fitted on.
        random_state: Seed of everything random but the splits.
    """

    widths: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    k: int = 64
    budget: int | None = None
    n_resamples: int = 1000
    basis_tokens: int = 8000
    random_state: int = 0


@dataclass(frozen=True)
class BasisRow:
    """Share of variance the shared basis keeps: pooled where ``state`` is empty, else of that state's own."""

    n_components: int
    state: int | None
    retained: float


def analyse(trajectories: Trajectories, options: StudyOptions | None = None) -> dict[str, pa.Table]:
    """Compute every table of SPEC §7 that the trajectories allow.

    Cost: linear in tokens and transitions but for the exact neighbour searches, which are quadratic in tokens. Memory:
    the reduced states, (L+1) · n · d · 8 bytes at the largest width, and one transition's working set.

    Args:
        trajectories: What to analyse. A table that needs halves or samples which are not there is left out, and said.
        options: What to compute.

    Returns:
        Tables by name.

    Raises:
        InputError: A width or k larger than the data allow, or options that contradict each other.
    """
    options = options or StudyOptions()
    plan = _Plan.of(trajectories, options)
    basis = SharedBasis(plan.widths[-1], n_tokens=options.basis_tokens, random_state=options.random_state)
    reduced = basis.fit(trajectories).transform(trajectories)
    retained = {width: basis.retained(reduced, width) for width in plan.widths}
    return {
        "basis": tables.from_records(
            BasisRow,
            [
                BasisRow(width, state, float(value))
                for width, share in retained.items()
                for state, value in ((None, share.pooled), *enumerate(share.per_state))
            ],
        ),
        **_measured(trajectories, options),
        **_laws(reduced, plan, options),
        **_figures(trajectories, reduced[:, :, : plan.working_width], plan, options),
    }


def study(directory: str | Path, options: StudyOptions | None = None) -> dict[str, tables.Results]:
    """Analyse a run with attention sinks kept and without them, and write both sets of tables into it.

    Nothing is written before everything is computed; tables of an earlier analysis are replaced.

    Args:
        directory: The run directory.
        options: What to compute.

    Returns:
        Tables by view, ``results`` and ``results-without-sinks``, and by name. The second view is left out, and said,
        for a run that recorded no sinks.

    Raises:
        InputError: No run, a damaged one, or options the data do not allow.
    """
    directory = Path(directory)
    trajectories = Trajectories.load(directory)
    options = options or StudyOptions()
    say(f"with sinks: {trajectories.n_tokens:,} tokens × {trajectories.n_states} states × {trajectories.width}")
    views = {WITH_SINKS: analyse(trajectories, options)}
    if trajectories.sinks is None:
        say(f"{WITHOUT_SINKS}: left out, this run recorded no sinks")
    else:
        apart = trajectories.without_sinks()
        say(f"without sinks: {apart.n_tokens:,} tokens")
        views[WITHOUT_SINKS] = analyse(apart, options)
    for view in (WITH_SINKS, WITHOUT_SINKS):
        tables.write(directory / view, views.get(view, {}))
    analysis = {"options": asdict(options), "version": version("layerflow")}
    write_manifest(directory, {**read_manifest(directory), "analysis": analysis})
    return dict(views)


@dataclass(frozen=True)
class _Plan:
    """Options made definite by the data at hand."""

    widths: tuple[int, ...]
    working_width: int
    splits: tuple[Split, ...]
    k: int
    k_sweep: tuple[int, ...]
    budget: int

    @classmethod
    def of(cls, trajectories: Trajectories, options: StudyOptions) -> "_Plan":
        n_tokens, width = trajectories.n_tokens, trajectories.width
        if not options.seeds:
            raise InputError("no seeds given; at least one split is needed, for example --seeds 0")
        if options.n_resamples < 1:
            raise InputError(f"{options.n_resamples} bootstrap resamples asked for; give at least 1")
        splits = tuple(split(n_tokens, seed) for seed in options.seeds)
        n_train = len(splits[0].train)
        if not 1 <= options.k <= n_train:
            raise InputError(
                f"--k {options.k} must lie between 1 and the {n_train} training tokens; choose a smaller k"
            )
        widths = _widths(options.widths, width, n_train)
        budget = min(PAPER_BUDGET, n_train // 2) if options.budget is None else options.budget
        if not 2 <= budget <= n_train:
            raise InputError(f"--budget {budget} must lie between 2 and the {n_train} training tokens")
        sweep = tuple(size for size in K_SWEEP if size <= n_train)
        if sweep != K_SWEEP:
            say(f"locality: k above {n_train} is left out, there are no more training tokens")
        return cls(widths, min(widths, key=lambda each: abs(each - WORKING_WIDTH)), splits, options.k, sweep, budget)


def _widths(asked: tuple[int, ...] | None, width: int, n_train: int) -> tuple[int, ...]:
    limit = min(width, n_train - 2)
    if asked is None:
        widths = tuple(each for each in WIDTHS if each <= limit) or (limit,)
        if widths != WIDTHS:
            say(
                f"widths: {', '.join(map(str, widths))}; "
                f"states of width {width} and {n_train} training tokens allow no more"
            )
        return widths
    bad = [each for each in asked if not 1 <= each <= limit]
    if bad or not asked:
        raise InputError(
            f"--widths {','.join(map(str, bad or asked))} must lie between 1 and {limit}, "
            f"for states of width {width} and {n_train} training tokens"
        )
    return tuple(sorted(set(asked)))


def _measured(trajectories: Trajectories, options: StudyOptions) -> dict[str, pa.Table]:
    """What the collection recorded beside the means."""
    results = {}
    if records := norms(trajectories):
        results["norms"] = tables.from_records(StateNorms, records)
    else:
        say("norms: left out, this run has neither a norm record nor single-position samples")
    if trajectories.halves is not None:
        rng = np.random.default_rng(options.random_state)
        rows = noise_floor(trajectories.states[-1], trajectories.halves, trajectories.counts, rng)
        results["noise_floor"] = tables.from_records(NoiseFloorRow, rows)
    else:
        say("noise_floor: left out, this run has no split halves")
    return results


def _laws(reduced: np.ndarray, plan: _Plan, options: StudyOptions) -> dict[str, pa.Table]:
    """Fit and score every law at every transition, width and split."""
    shared = [_share(each, reduced, plan, options) for each in plan.splits]
    total = TransitionReport()
    for transition in track(range(len(reduced) - 1), label="laws", total=len(reduced) - 1):
        z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
        report = score_transition(
            z, dz, shared, _neighbors(z, plan), transition=transition, k=plan.k, k_sweep=plan.k_sweep
        )
        for field in fields(report):
            getattr(total, field.name).extend(getattr(report, field.name))
    return {
        "law_scores": tables.from_records(LawScore, total.scores),
        "law_contests": tables.from_records(LawContest, total.contests),
        "locality": tables.from_records(Locality, total.locality),
        "law_diagnostics": tables.from_records(LawDiagnostics, total.diagnostics),
        "law_scores_equal_budget": tables.from_records(LawScore, total.equal_budget),
    }


def _share(each: Split, reduced: np.ndarray, plan: _Plan, options: StudyOptions) -> SharedSplit:
    steps = np.diff(reduced, axis=0)[:, each.train]
    rng = np.random.default_rng([options.random_state, each.seed])
    return SharedSplit(
        split=each,
        budget=Split(each.seed, each.train[: plan.budget], each.test),
        weights=resample_weights(len(each.test), options.n_resamples, rng),
        null_b={width: fit_null_b(steps[:, :, :width]) for width in plan.widths},
    )


def _neighbors(z: np.ndarray, plan: _Plan) -> Mapping[int, Neighbors]:
    """One exact search a width, wide enough to hold the k training neighbours of nearly every token of any split."""
    n_tokens = len(z)
    wanted = min(n_tokens - 1, plan.k + plan.k // 2 + 14)
    return {width: nearest(z[:, :width], wanted) for width in plan.widths}


def _figures(
    trajectories: Trajectories, reduced: np.ndarray, plan: _Plan, options: StudyOptions
) -> dict[str, pa.Table]:
    """The data of figures 1 and 2, at the working width and on the first split."""
    if reduced.shape[2] < 2:
        say("figures: left out, they need two components")
        return {}
    rng = np.random.default_rng(options.random_state)
    points = cloud_points(reduced, trajectories.counts, trajectories.tokens, rng=rng)
    return {
        "figure_cloud": tables.from_records(CloudPoint, points),
        "figure_fields": tables.from_records(FieldArrow, _bent_field(reduced, plan.splits[0], plan.k)),
    }


def _bent_field(reduced: np.ndarray, each: Split, k: int) -> Sequence[FieldArrow]:
    """The drift fields of the transition that bends most in the leading plane of its own state."""
    bends: list[tuple[float, int, Plane]] = []
    for transition in range(len(reduced) - 1):
        z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
        plane = leading_plane(z)
        quadratic = fit_polynomial(z[each.train], dz[each.train], degree=2)
        bends.append((in_plane_curvature(quadratic.predict, z, dz, plane), transition, plane))
    _, transition, plane = max(bends, key=lambda bend: bend[0])
    z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
    z_train, dz_train = np.ascontiguousarray(z[each.train]), dz[each.train]
    drifts = {
        "affine": fit_polynomial(z_train, dz_train, degree=1).predict,
        "quadratic": fit_polynomial(z_train, dz_train, degree=2).predict,
        "km": KramersMoyalLaw(z_train, dz_train, k=k).drift,
    }
    return field_arrows(drifts, z[each.test], dz[each.test], plane, transition=transition)
