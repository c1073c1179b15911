"""One configuration → all tables: the paper on one page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from layerflow import tables
from layerflow.analysis.affinity import AffinityCorrectedRow, AffinityRow, MeanNoise, affinity, affinity_corrected
from layerflow.analysis.claims import ClaimRow, claims
from layerflow.analysis.cloud import CloudPoint, cloud_points
from layerflow.analysis.conserved import ConservedRow, conserved, local_density, observables
from layerflow.analysis.control import N_READ, CalibrationRow, calibration_rows
from layerflow.analysis.diffusion import GradientDiffusionRow
from layerflow.analysis.fields import FieldArrow, Plane, field_arrows, in_plane_curvature, leading_plane
from layerflow.analysis.gradient import GradientRow
from layerflow.analysis.landscape import MAX_POTENTIAL_WIDTH, LandscapeReport, PotentialValue, landscape
from layerflow.analysis.noise_floor import NoiseFloorRow, noise_floor
from layerflow.analysis.norms import norms
from layerflow.analysis.potential import PotentialCorrelateRow, PotentialRow
from layerflow.analysis.rollout import RolloutRow, rollouts
from layerflow.analysis.scoring import LawContest, LawScore, Split, split
from layerflow.analysis.transition import LawDiagnostics, Locality, SharedSplit, TransitionReport, score_transition
from layerflow.data.basis import SharedBasis
from layerflow.data.storage import read_manifest, write_manifest
from layerflow.data.trajectories import MIN_COUNT, StateNorms, Trajectories
from layerflow.errors import InputError
from layerflow.laws.kramers_moyal import KramersMoyalLaw
from layerflow.laws.nulls import fit_null_b
from layerflow.numerics.bootstrap import resample_weights
from layerflow.numerics.least_squares import LeastSquaresFit, fit_polynomial
from layerflow.numerics.neighbors import nearest
from layerflow.numerics.polynomial import n_features
from layerflow.numerics.threads import side_by_side
from layerflow.plan import Plan, StudyOptions
from layerflow.progress import say, track
from layerflow.tables import WITH_SINKS, WITHOUT_SINKS

# A component with less than this share of the variance is a direction in which nothing differs.
_NO_DIRECTION = 1e-12


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
    plan = Plan.of(trajectories, options)
    basis = SharedBasis(plan.widths[-1], n_tokens=options.basis_tokens, random_state=options.random_state)
    basis.fit(trajectories)
    plan = plan.within(int(np.count_nonzero(basis.explained_variance_ratio_ > _NO_DIRECTION)), options.widths)
    for note in plan.notes:
        say(note)
    reduced = basis.transform(trajectories)[:, :, : plan.widths[-1]]
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
        **_transitions(trajectories, reduced, plan, options),
        **_trajectories(trajectories, reduced[:, :, : plan.working_width], plan, options),
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
    Plan.of(trajectories, options)  # what the data refuse is refused before the work begins
    apart, reason = None, "this run recorded no sinks"
    if trajectories.sinks is not None:
        try:
            without = trajectories.without_sinks(trajectories.manifest.get("options", {}).get("min_count", MIN_COUNT))
            Plan.of(without, options)
            apart = without
        except InputError as error:
            reason = str(error)
    say(f"with sinks: {trajectories.n_tokens:,} tokens × {trajectories.n_states} states × {trajectories.width}")
    views = {WITH_SINKS: analyse(trajectories, options)}
    if apart is None:
        say(f"{WITHOUT_SINKS}: left out, {reason}")
    else:
        say(f"without sinks: {apart.n_tokens:,} tokens")
        views[WITHOUT_SINKS] = analyse(apart, options)
    judged = tables.from_records(ClaimRow, claims(views[WITH_SINKS], views.get(WITHOUT_SINKS)))
    for results in views.values():
        results["claims"] = judged
    for view in (WITH_SINKS, WITHOUT_SINKS):
        tables.write(directory / view, views.get(view, {}))
    analysis = {"options": asdict(options), "version": version("layerflow")}
    write_manifest(directory, {**read_manifest(directory), "analysis": analysis})
    return dict(views)


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


def _transitions(
    trajectories: Trajectories, reduced: np.ndarray, plan: Plan, options: StudyOptions
) -> dict[str, pa.Table]:
    """What is asked of one transition at a time: every law's scores, and the landscape the drift descends or not."""
    shared = [_share(each, reduced, plan, options) for each in plan.splits]
    rows: dict[str, list[Any]] = {name: [] for name in _TRANSITION_TABLES}
    for width in plan.widths:
        if (needed := n_features(width, 2)) >= (n_train := len(plan.splits[0].train)):
            say(
                f"quadratic at {width} components: left out, "
                f"its {needed:,} coefficients need more than {n_train:,} training tokens"
            )
    if plan.widths[-1] > MAX_POTENTIAL_WIDTH:
        say(f"potential: left out above {MAX_POTENTIAL_WIDTH} components, its coefficients grow with their cube")
    rng = np.random.default_rng(options.random_state)
    weights, control_weights = (
        resample_weights(size, options.n_resamples, rng) for size in (reduced.shape[1], min(N_READ, reduced.shape[1]))
    )
    distances = np.empty(reduced.shape[:2])
    n_transitions = len(reduced) - 1

    def examine(transition: int) -> tuple[TransitionReport, LandscapeReport] | None:
        z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
        neighbors = {width: nearest(z[:, :width], plan.n_neighbors) for width in plan.widths}
        distances[transition] = neighbors[plan.working_width].distances[:, plan.density_neighbor - 1]
        if not _varies(z, dz):
            return None
        laws = score_transition(z, dz, shared, neighbors, transition=transition, k=plan.k, k_sweep=plan.k_sweep)
        view = landscape(
            z,
            dz,
            plan.splits[0],
            laws.normal_equations,
            laws.fits,
            neighbors,
            _quantities(trajectories, transition, distances[transition]),
            transition=transition,
            working_width=plan.working_width,
            weights=weights,
            control_weights=control_weights,
            rng=np.random.default_rng([options.random_state, transition]),
        )
        return laws, view

    reports = side_by_side(examine, range(n_transitions))
    for transition, report in enumerate(track(reports, label="transitions", total=n_transitions)):
        if report is None:
            say(f"transition {transition}: left out, its states or its steps do not vary in some component")
            continue
        laws, view = report
        for name, part in _TRANSITION_TABLES.items():
            rows[name] += getattr(laws if part.of_laws else view, part.field)
    final = nearest(reduced[-1][:, : plan.working_width], plan.density_neighbor)
    distances[-1] = final.distances[:, -1]
    return {
        **{name: tables.from_records(part.record, rows[name]) for name, part in _TRANSITION_TABLES.items()},
        "conserved": tables.from_records(ConservedRow, conserved(trajectories.states, distances)),
    }


@dataclass(frozen=True)
class _Part:
    """Where a table's rows come from: a field of the laws' report, or of the landscape's."""

    record: type[Any]
    field: str
    of_laws: bool


_TRANSITION_TABLES = {
    "law_scores": _Part(LawScore, "scores", True),
    "law_contests": _Part(LawContest, "contests", True),
    "locality": _Part(Locality, "locality", True),
    "law_diagnostics": _Part(LawDiagnostics, "diagnostics", True),
    "law_scores_equal_budget": _Part(LawScore, "equal_budget", True),
    "gradient": _Part(GradientRow, "gradient", False),
    "gradient_diffusion": _Part(GradientDiffusionRow, "gradient_diffusion", False),
    "potential": _Part(PotentialRow, "potential", False),
    "potential_values": _Part(PotentialValue, "potential_values", False),
    "potential_correlates": _Part(PotentialCorrelateRow, "potential_correlates", False),
}


def _varies(z: np.ndarray, dz: np.ndarray) -> bool:
    """Whether states and steps vary in every component; a law of what does not move has no density."""
    return bool(z.std(axis=0).all() and dz.std(axis=0).all())


def _quantities(trajectories: Trajectories, state: int, distances: np.ndarray) -> dict[str, np.ndarray]:
    """What the potential's values are compared with, one number a token."""
    measured = observables(trajectories.states[state])
    return {
        "log_frequency": np.log(trajectories.counts),
        "norm": measured.norm,
        "cosine": measured.cosine,
        "participation_ratio": measured.participation_ratio,
        "local_density": local_density(distances),
    }


def _share(each: Split, reduced: np.ndarray, plan: Plan, options: StudyOptions) -> SharedSplit:
    steps = np.diff(reduced, axis=0)[:, each.train]
    rng = np.random.default_rng([options.random_state, each.seed])
    return SharedSplit(
        split=each,
        budget=Split(each.seed, each.train[: plan.budget], each.test),
        weights=resample_weights(len(each.test), options.n_resamples, rng),
        null_b={width: fit_null_b(steps[:, :, :width]) for width in plan.widths},
    )


def _trajectories(
    trajectories: Trajectories, reduced: np.ndarray, plan: Plan, options: StudyOptions
) -> dict[str, pa.Table]:
    """What is asked of whole trajectories, at the working width and at full width."""
    if not all(_varies(z, following - z) for z, following in pairwise(reduced)):
        say("rollout, gradient_calibration: left out, some transition does not vary in some component")
        return _affinity(trajectories, plan.splits[0])
    rng = np.random.default_rng(options.random_state)

    def roll_out(each: Split) -> list[RolloutRow]:
        return rollouts(reduced, each, np.random.default_rng([options.random_state, each.seed]), k=plan.k)

    rolled = track(side_by_side(roll_out, plan.splits), label="rollouts", total=len(plan.splits))
    middle = (len(reduced) - 1) // 2
    z, dz = reduced[middle], reduced[middle + 1] - reduced[middle]
    sweep = calibration_rows(z, dz, rng, k=plan.density_neighbor)
    return {
        "rollout": tables.from_records(RolloutRow, [row for rows in rolled for row in rows]),
        "gradient_calibration": tables.from_records(CalibrationRow, sweep),
        **_affinity(trajectories, plan.splits[0]),
    }


def _affinity(trajectories: Trajectories, first: Split) -> dict[str, pa.Table]:
    """Non-affine shares at full width, of means and of single states; with the means' noise where samples tell it."""
    samples, results = trajectories.samples, {}
    noise = MeanNoise.of(samples, trajectories.counts, first.test)
    if noise is None:
        say("affinity_corrected: left out, no single-position samples tell the noise of the means")
        rows = affinity(trajectories.states, first, kind="mean")
    else:
        both = affinity_corrected(trajectories.states, first, noise)
        rows = both.rows
        results["affinity_corrected"] = tables.from_records(AffinityCorrectedRow, both.corrected)
    if samples is not None and len(samples.rows) > trajectories.width:
        rows += affinity(samples.states, split(len(samples.rows), first.seed), kind="individual")
    else:
        say("affinity: individual states are left out, this run has too few single-position samples")
    if not rows:
        say(
            f"affinity: left out, {len(first.train)} training tokens cannot determine a map of width "
            f"{trajectories.width}"
        )
    return results | {"affinity": tables.from_records(AffinityRow, rows)} if rows else results


def _figures(trajectories: Trajectories, reduced: np.ndarray, plan: Plan, options: StudyOptions) -> dict[str, pa.Table]:
    """The data of figures 1 and 2, at the working width and on the first split."""
    if reduced.shape[2] < 2:
        say("figures: left out, they need two components")
        return {}
    rng = np.random.default_rng(options.random_state)
    points = cloud_points(reduced, trajectories.counts, trajectories.tokens, rng=rng)
    figures = {"figure_cloud": tables.from_records(CloudPoint, points)}
    first, n_monomials = plan.splits[0], n_features(reduced.shape[2], 2)
    if len(first.train) > n_monomials:
        figures["figure_fields"] = tables.from_records(FieldArrow, _bent_field(reduced, first, plan.k))
    else:
        say(
            f"figure_fields: left out, the quadratic drift of {reduced.shape[2]} components needs more than "
            f"{n_monomials} training tokens and there are {len(first.train)}"
        )
    return figures


def _bent_field(reduced: np.ndarray, each: Split, k: int) -> Sequence[FieldArrow]:
    """The drift fields of the transition that bends most in the leading plane of its own state."""
    bends: list[tuple[float, int, Plane, LeastSquaresFit]] = []
    for transition in range(len(reduced) - 1):
        z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
        plane = leading_plane(z)
        quadratic = fit_polynomial(z[each.train], dz[each.train], degree=2)
        bends.append((in_plane_curvature(quadratic.predict, z, dz, plane), transition, plane, quadratic))
    _, transition, plane, quadratic = max(bends, key=lambda bend: bend[0])
    z, dz = reduced[transition], reduced[transition + 1] - reduced[transition]
    z_train, dz_train = np.ascontiguousarray(z[each.train]), dz[each.train]
    drifts = {
        "affine": fit_polynomial(z_train, dz_train, degree=1).predict,
        "quadratic": quadratic.predict,
        "km": KramersMoyalLaw(z_train, dz_train, k=k).drift,
    }
    return field_arrows(drifts, z[each.test], dz[each.test], plane, transition=transition)
