"""The head of the page: what came out of the run, in a few numbers."""

from dataclasses import dataclass

from layerflow.query import working_width
from layerflow.report.blocks import Cell, Grid, Line, Run, Section, View, cells
from layerflow.report.headline import (
    CONTESTS,
    KM_AFFINE,
    KM_AFFINE_MATCHED,
    QUADRATIC_AFFINE,
    Contest,
    Outcome,
    outcome,
)
from layerflow.report.layout import paired_head
from layerflow.report.text import ABSENT, count, number

_TILES = (
    (QUADRATIC_AFFINE, "The quadratic map beats the affine one"),
    (KM_AFFINE, "Kramers–Moyal beats the affine map"),
    (KM_AFFINE_MATCHED, "Kramers–Moyal beats it in likelihood"),
)


@dataclass(frozen=True)
class Tile:
    """One of the page's few large numbers: a title, a value per view, and the unit below."""

    title: str
    values: tuple[tuple[str, str], ...]
    unit: str


def lead(run: Run) -> str:
    """Say the main finding in a sentence."""
    found = [(view, result) for view, result in _outcomes(run, QUADRATIC_AFFINE) if result is not None]
    if not found:
        return (
            "This run holds no scores of the quadratic and the affine map, so it cannot say which law moves its tokens."
        )
    won = " and ".join(
        f"at {result.wins} of {result.n_transitions} transitions {view.label.lower()}" for view, result in found
    )
    medians = "; ".join(
        f"{number(result.median)} against {number(result.opponent_median)} {view.label.lower()}"
        for view, result in found
    )
    return (
        f"In {found[0][1].n_components} components, the quadratic drift explains more of the held-out steps than the "
        f"affine one {won} (median R² {medians})."
    )


def tiles(run: Run) -> list[Tile]:
    """Return the page's large numbers: wins of transitions, and the noise floor."""
    shown = []
    for contest, name in _TILES:
        found = [(view, result) for view, result in _outcomes(run, contest) if result is not None]
        if found:
            values = tuple((view.label, f"{result.wins}/{result.n_transitions}") for view, result in found)
            unit = "transitions, in R²" if contest.metric == "r2" else "transitions, matched diagonal noise"
            shown.append(Tile(name, values, unit))
    floors = tuple(
        (view.label, number(rare[0]["ratio"], 2))
        for view, (floor,) in run.having("noise_floor")
        if (rare := [row for row in floor.to_pylist() if row["low"] == row["high"] == 5])
    )
    if floors:
        shown.append(Tile("Noise of tokens seen five times", floors, "of two tokens’ mean distance"))
    return shown


def headline(run: Run) -> Section | None:
    """Lay out who beats whom, and by how much, at the working width."""
    views = list(run.having("law_scores"))
    if not views:
        return None
    width = working_width(views[0][1][0])
    head = paired_head("contest", views, ("won", "clearly", "medians", "margin"))
    lines = []
    for contest in CONTESTS:
        results = [_at_working_width(view, contest) for view, _ in views]
        if any(results):
            metric = "R²" if contest.metric == "r2" else "nats"
            shown = tuple(cell for result in results for cell in _outcome_cells(result))
            lines.append(Line(f"{contest.name} ({metric})", shown))
    return Section(
        "headline",
        "Who beats whom",
        f"Held-out contests at {width} components, over all transitions. A transition is won when the score, "
        "averaged over seeds, is the higher one; clearly, when every seed’s paired bootstrap 95 % interval lies "
        "above zero. Medians (law, opponent) and margin are over transitions.",
        (Grid("Contests between laws", head, tuple(lines)),),
    )


def noise_floor(run: Run) -> Section | None:
    """Lay out the noise floor by frequency band, beside the paper's values."""
    views = list(run.having("noise_floor"))
    if not views:
        return None
    bands = list(dict.fromkeys((row["low"], row["high"]) for _, (floor,) in views for row in floor.to_pylist()))
    head = paired_head("occurrences", views, ("tokens", "noise"), "paper")
    lines = []
    for low, high in bands:
        shown: list[str] = []
        for _, (floor,) in views:
            rows = [row for row in floor.to_pylist() if (row["low"], row["high"]) == (low, high)]
            shown += [count(rows[0]["n_tokens"]), number(rows[0]["ratio"], 3)] if rows else [ABSENT, ABSENT]
        lines.append(Line(_band(low, high), cells(*shown, _PAPER_FLOOR.get((low, high), ABSENT))))
    return Section(
        "noise-floor",
        "Noise floor",
        "How far a token’s mean final state would move if the corpus were drawn again (half the distance between its "
        "two half means), in units of the mean distance between two random tokens.",
        (Grid("Noise floor by frequency", head, tuple(lines)),),
    )


_PAPER_FLOOR = {(5, 5): "0.40", (10, 100): "0.21", (1001, None): "0.02"}


def _band(low: int, high: int | None) -> str:
    if high is None:
        return f"{low:,} or more"
    return f"exactly {low:,}" if low == high else f"{low:,} to {high:,}"


def _at_working_width(view: View, contest: Contest) -> Outcome | None:
    width = working_width(view.results["law_scores"])
    return None if width is None else outcome(view.results, contest, width)


def _outcomes(run: Run, contest: Contest) -> list[tuple[View, Outcome | None]]:
    return [(view, _at_working_width(view, contest)) for view, _ in run.having("law_scores")]


def _outcome_cells(result: Outcome | None) -> tuple[Cell, ...]:
    if result is None:
        return cells(ABSENT, ABSENT, ABSENT, ABSENT)
    digits = 3 if result.contest.metric == "r2" else 2
    return (
        Cell(f"{result.wins}/{result.n_transitions}", strong=result.wins == result.n_transitions),
        Cell(count(result.clear)),
        Cell(f"{number(result.median, digits)}, {number(result.opponent_median, digits)}"),
        Cell(number(result.margin, digits, signed=True)),
    )
