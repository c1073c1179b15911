"""The paper's claims, one a row: what was published, what this run shows, and whether it holds (SPEC §6)."""

from collections.abc import Callable
from dataclasses import dataclass

from layerflow.analysis import readings
from layerflow.analysis.readings import Reading, UntestableError
from layerflow.tables import Results


@dataclass(frozen=True)
class ClaimRow:
    """One claim of the paper beside this run, with attention sinks and without.

    ``holds`` is empty where this run cannot test the claim; ``note`` says why, or by which rule it was judged.
    """

    claim: str
    published: str
    measured: str | None
    holds: bool | None
    measured_without_sinks: str | None
    holds_without_sinks: bool | None
    note: str


@dataclass(frozen=True)
class Claim:
    """A claim, the published value, the rule it is judged by, and how to read it off a view's tables."""

    claim: str
    published: str
    rule: str
    read: Callable[[Results], Reading]


def claims(with_sinks: Results, without_sinks: Results | None) -> list[ClaimRow]:
    """Judge every claim of the paper on a run's tables.

    The published values are of Pythia-160M (12 transitions) and -410M (24); a count of transitions is judged by its
    share, to within one transition. What holds is the statement, not the digit: another model is another flow.

    Args:
        with_sinks: Tables by name, attention sinks kept: the paper's protocol.
        without_sinks: The same without them; None when the run recorded none.
    """
    return [_row(claim, with_sinks, without_sinks) for claim in CLAIMS]


def _row(claim: Claim, with_sinks: Results, without_sinks: Results | None) -> ClaimRow:
    kept = _read(claim, with_sinks)
    apart = Untested("this run recorded no sinks") if without_sinks is None else _read(claim, without_sinks)
    untested = "".join(
        f"not tested {view} sinks: {each.reason}; "
        for view, each in (("with", kept), ("without", apart))
        if isinstance(each, Untested)
    )
    return ClaimRow(
        claim=claim.claim,
        published=claim.published,
        measured=kept.measured,
        holds=kept.holds,
        measured_without_sinks=apart.measured,
        holds_without_sinks=apart.holds,
        note=f"{untested}holds when {claim.rule}",
    )


@dataclass(frozen=True)
class Untested:
    """Why a view says nothing to a claim; there is then no value, and it neither holds nor fails."""

    reason: str
    measured: None = None
    holds: None = None


def _read(claim: Claim, results: Results) -> Reading | Untested:
    try:
        return claim.read(results)
    except KeyError as error:
        return Untested(f"there is no table {error}")
    except UntestableError as error:
        return Untested(str(error))


CLAIMS = (
    Claim(
        "the quadratic drift beats the affine map at every transition",
        "12 of 12 at 8, 16, 32 and 64 (160M); 24 of 24 at 8, 16 and 32 (410M)",
        "it wins in R² at every transition at the working width",
        readings.quadratic_everywhere,
    ),
    Claim(
        "KM beats the affine map in R²",
        "11 of 12",
        "at least that share",
        readings.contest(readings.KM, readings.AFFINE, "r2", 11 / 12),
    ),
    Claim(
        "KM beats the affine map in likelihood, both with diagonal noise",
        "12 of 12",
        "it wins at all transitions but one",
        readings.contest(readings.KM, readings.AFFINE, "log_likelihood", 1.0),
    ),
    Claim(
        "KM beats null A",
        "12 of 12, by 8.4 to 29.1 nats over A and B",
        "it wins at all transitions but one",
        readings.contest(readings.KM, readings.NULL_A, "log_likelihood", 1.0),
    ),
    Claim(
        "KM beats null B",
        "12 of 12, by 8.4 to 29.1 nats over A and B",
        "it wins at all transitions but one",
        readings.contest(readings.KM, readings.NULL_B, "log_likelihood", 1.0),
    ),
    Claim(
        "with full covariance on both sides KM beats the affine map",
        "12 of 12, by 1.1 to 7.6 nats",
        "it wins at all transitions but one",
        readings.contest(readings.KM_FULL, readings.AFFINE_FULL, "log_likelihood", 1.0),
    ),
    Claim(
        "a full covariance alone lets the affine map beat KM with diagonal noise",
        "8 of 12",
        "it wins at that share of transitions or more, to within one",
        readings.contest(readings.AFFINE_FULL, readings.KM, "log_likelihood", 8 / 12),
    ),
    Claim(
        "null C, with no drift of its own, beats KM with diagonal noise at some",
        "3 of 12",
        "it wins at that share of transitions or more, to within one",
        readings.contest(readings.NULL_C, readings.KM, "log_likelihood", 3 / 12),
    ),
    Claim(
        "KM degrades with width",
        "12 wins at 8, 5 at 32, 1 at 64",
        "wins over the affine map in R² fall from the narrowest to the widest, never rising by more than one",
        readings.km_by_width,
    ),
    Claim(
        "KM's neighbourhood grows with width",
        "11 % to 28 % of the cloud's radius",
        "the median radius ratio grows from each width to the next",
        readings.km_radius,
    ),
    Claim(
        "KM degrades with k",
        "11 wins at k = 64, none at 256 and 1,024",
        "wins over the affine map in R² fall with k",
        readings.km_by_k,
    ),
    Claim(
        "the quadratic's drop at 64 components is a limit of estimation",
        "12 becomes 4 of 12 at 64 with 9,549 trajectories, unchanged at 32",
        "the equal budget costs wins at 64",
        readings.equal_budget,
    ),
    Claim(
        "the last transition has the largest margin, and without it the quadratic still wins all",
        "11 of 11 (160M), 23 of 23 (410M)",
        "both are so",
        readings.last_margin,
    ),
    Claim(
        "the flow does not climb its own log-density",
        "mean gap −0.008 (−0.116 to +0.053), control 0.61 to 0.91",
        "the gap is below the control's at every width and transition",
        readings.alignment_gap,
    ),
    Claim(
        "little of the step's energy lies along the gradient",
        "6 to 29 %, control 43 to 81 %",
        "the share is below the control's at every transition",
        readings.gradient_energy,
    ),
    Claim(
        "no diffusion matrix makes it a gradient flow of its log-density",
        "none does (v2, no number)",
        "the best semidefinite D explains less of the centred held-out steps than of the control's at every transition",
        readings.fitted_diffusion,
    ),
    Claim(
        "the drift mostly descends a potential",
        "55 to 96 % of the quadratic field",
        "the median share is above one half",
        readings.potential_share,
    ),
    Claim(
        "part of the drift circulates",
        "4 to 45 %",
        "the rotational share is above 2 % at every transition",
        readings.rotational_share,
    ),
    Claim(
        "the rotation is the antisymmetric part of the linear map",
        "it is (v2, no number)",
        "it recovers more than half of the rotational remainder, in the median over transitions with a remainder",
        readings.antisymmetric_recovery,
    ),
    Claim(
        "the affine map is more symmetric than shuffled steps make it",
        "0.53 to 0.84, shuffled 0.50 to 0.54",
        "the share is above the shuffled one at all transitions but one",
        readings.symmetric_share,
    ),
    Claim(
        "the symmetric share is largest at the end",
        "largest at the final layer",
        "it is",
        readings.symmetric_at_the_end,
    ),
    Claim(
        "the rank of the cosine to the mean direction is kept",
        "+0.76 at the last state",
        "it is at least 0.5",
        readings.rank_kept("cosine", lambda value: value >= 0.5),
    ),
    Claim(
        "the rank of the norm is shuffled",
        "−0.17 at the last state",
        "it is below 0.3 in size",
        readings.rank_kept("norm", lambda value: abs(value) < 0.3),
    ),
    Claim(
        "the rank of the participation ratio is reversed",
        "−0.59 at the last state",
        "it is below −0.3",
        readings.rank_kept("participation_ratio", lambda value: value < -0.3),
    ),
    Claim(
        "the rank of the local density is kept",
        "it is (v2, no number)",
        "it is at least 0.5 at the last state",
        readings.rank_kept("local_density", lambda value: value >= 0.5),
    ),
    Claim(
        "the noise floor falls with frequency",
        "0.40 / 0.21 / 0.02",
        "it falls from band to band",
        readings.noise_floor_falls,
    ),
    Claim(
        "rollouts shrink",
        "0.53 mid-network, 0.87 at the last raw state, 0.25 at the last",
        "KM's spread is below the real one at all three",
        readings.rollout_shrinks,
    ),
    Claim(
        "the stationary control inflates in the same pipeline",
        "2.0",
        "its spread ends above its own",
        readings.inflates("stationary_control", "local_diagonal"),
    ),
    Claim(
        "the composed affine maps inflate",
        "1.7",
        "their spread, without noise, ends above the real one",
        readings.inflates("affine", "none"),
    ),
    Claim(
        "mean trajectories are nearly affine, individual states are not",
        "3 % of the step for means, 17 % for individuals (v2, no formula: all three readings, medians)",
        "the next-state share is smaller for means than for individual states",
        readings.nonaffine,
    ),
)
