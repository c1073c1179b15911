"""The headline: who beats whom at how many transitions, by how much. The page and the terminal both print this."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from layerflow.query import by_transition, where
from layerflow.report.text import median
from layerflow.tables import Results


@dataclass(frozen=True)
class Contest:
    """Two laws held against each other in one metric; ``noise`` is None where the metric reads the drift alone."""

    name: str
    law: str
    opponent: str
    metric: str
    noise: str | None = None
    opponent_noise: str | None = None


QUADRATIC_AFFINE = Contest("Quadratic over affine", "quadratic", "affine", "r2")
KM_AFFINE = Contest("KM over affine", "km", "affine", "r2")
KM_AFFINE_MATCHED = Contest(
    "KM over affine, both diagonal", "km", "affine", "log_likelihood", "local_diagonal", "diagonal"
)

CONTESTS = (
    QUADRATIC_AFFINE,
    KM_AFFINE,
    KM_AFFINE_MATCHED,
    Contest("KM over affine, both full", "km", "affine", "log_likelihood", "local_full", "full"),
    Contest("KM over null A", "km", "null_a", "log_likelihood", "local_diagonal", "diagonal"),
    Contest("KM over null B", "km", "null_b", "log_likelihood", "local_diagonal", "diagonal"),
    Contest("KM-full over null C", "km", "null_c", "log_likelihood", "local_full", "full"),
    Contest("Affine-full over KM", "affine", "km", "log_likelihood", "full", "local_diagonal"),
    Contest("Null C over KM", "null_c", "km", "log_likelihood", "full", "local_diagonal"),
)


@dataclass(frozen=True)
class Outcome:
    """A contest's result at one width.

    A transition is won when the held-out scores, averaged over seeds, differ in the law's favour. It is won *clearly*
    when every seed's bootstrap interval lies above zero; ``clear`` is None where no interval was computed.
    ``median``, ``opponent_median`` and ``margin`` are medians over transitions, in R² or nats per step.
    """

    contest: Contest
    n_components: int
    wins: int
    n_transitions: int
    clear: int | None
    median: float | None
    opponent_median: float | None
    margin: float | None


def score(scores: pa.Table, law: str, noise: str | None, metric: str, n_components: int) -> dict[int, float]:
    """Return a law's score at every transition, averaged over seeds (and noise forms when ``noise`` is None)."""
    rows = where(scores, law=law, n_components=n_components)
    return by_transition(rows if noise is None else where(rows, noise=noise), metric)


def outcome(results: Results, contest: Contest, n_components: int, *, table: str = "law_scores") -> Outcome | None:
    """Judge one contest at one width; None when either side was not scored."""
    if table not in results:
        return None
    scores = results[table]
    ours = score(scores, contest.law, contest.noise, contest.metric, n_components)
    theirs = score(scores, contest.opponent, contest.opponent_noise, contest.metric, n_components)
    margins = [ours[transition] - theirs[transition] for transition in ours if transition in theirs]
    if not margins:
        return None
    return Outcome(
        contest=contest,
        n_components=n_components,
        wins=sum(margin > 0 for margin in margins),
        n_transitions=len(margins),
        clear=None if table != "law_scores" else _clear_wins(results, contest, n_components),
        median=median(ours.values()),
        opponent_median=median(theirs.values()),
        margin=median(margins),
    )


def contest_rows(contests: pa.Table, contest: Contest, n_components: int) -> pa.Table:
    """Return a contest's bootstrap rows of ``law_contests`` at one width."""
    matching = {"law": contest.law, "opponent": contest.opponent, "metric": contest.metric}
    rows = where(contests, n_components=n_components, **matching)
    if contest.noise is not None:
        rows = where(rows, noise=contest.noise, opponent_noise=contest.opponent_noise)
    return rows


def _clear_wins(results: Results, contest: Contest, n_components: int) -> int | None:
    if "law_contests" not in results:
        return None
    rows = contest_rows(results["law_contests"], contest, n_components)
    if not rows.num_rows:
        return None
    lows = rows.group_by("transition", use_threads=False).aggregate([("low", "min")])["low_min"]
    return int(pc.sum(pc.greater(lows, 0)).as_py() or 0)
