"""Tables 1 and 2, every law, locality and the fits' diagnostics, with figure 2 and the panels by depth."""

import math
from typing import Any

import pyarrow as pa

from layerflow.query import distinct, where, working_width
from layerflow.report import figures
from layerflow.report.blocks import Cell, Grid, Header, Line, Pair, Plate, Row, Run, Section, Stack, View, cells
from layerflow.report.figures.depth import LAW_NAMES
from layerflow.report.figures.drift_fields import plane
from layerflow.report.figures.reach import reach
from layerflow.report.headline import KM_AFFINE, QUADRATIC_AFFINE, outcome, score
from layerflow.report.layout import Views, at_working_width, paired_head, panels
from layerflow.report.text import ABSENT, compact, count, median, number

NOISE_NAMES = {
    "local_diagonal": "local diagonal",
    "local_full": "local full",
    "diagonal": "diagonal",
    "full": "full",
    "isotropic": "isotropic",
    "none": "none",
}
_LIKELIHOOD_COLUMNS = (
    ("KM", "km", "local_diagonal"),
    ("KM-full", "km", "local_full"),
    ("null A", "null_a", "diagonal"),
    ("null B", "null_b", "diagonal"),
    ("null C", "null_c", "full"),
    ("affine", "affine", "diagonal"),
    ("affine-full", "affine", "full"),
)
_R2_COLUMNS = (("KM", "km"), ("affine", "affine"))


def table_1(run: Run) -> Section | None:
    """Lay out table 1: held-out log-likelihood of every transition, and R² of KM and affine."""
    views = list(run.having("law_scores"))
    if not views:
        return None
    width = working_width(views[0][1][0])
    sides = tuple((view.label, _table_1(scores, view.label)) for view, (scores,) in views)
    alt = "Line chart: held-out R² of the quadratic, Kramers–Moyal, affine and rotation–stretch drifts by transition."
    caption = "Variance of the held-out steps that each drift explains, by depth; the axis ends at −0.25."
    return Section(
        "table-1",
        "Table 1: the laws, transition by transition",
        f"Held-out log-likelihood per step in nats, higher is better, the best of each row in bold; R² of the drift "
        f"alone in the last two columns. {width} components, averaged over seeds.",
        (
            Pair(sides),
            panels(views, "panel-laws", at_working_width(figures.laws), alt=alt, caption=caption),
            *_margins(run),
        ),
    )


def every_law(run: Run) -> Section | None:
    """Lay out the medians over transitions of every law and noise form."""
    views = list(run.having("law_scores"))
    if not views:
        return None
    keys: dict[tuple[str, str], dict[str, tuple[float | None, float | None]]] = {}
    for view, (scores,) in views:
        rows = where(scores, n_components=working_width(scores))
        for law, noise in dict.fromkeys(zip(rows["law"].to_pylist(), rows["noise"].to_pylist(), strict=True)):
            keys.setdefault((law, noise), {})[view.folder] = (
                median(score(scores, law, noise, "r2", working_width(scores) or 0).values()),
                median(score(scores, law, noise, "log_likelihood", working_width(scores) or 0).values()),
            )
    lines = []
    for (law, noise), found in keys.items():
        pairs = [found.get(view.folder, (None, None)) for view, _ in views]
        shown = [text for r2, nats in pairs for text in (number(r2), number(nats, 2))]
        lines.append(Line(f"{LAW_NAMES.get(law, law)}, {NOISE_NAMES.get(noise, noise)}", cells(*shown)))
    head = paired_head("law, noise", views, ("R²", "nats per step"))
    return Section(
        "every-law",
        "Every law and noise form",
        "Medians over transitions, averaged over seeds, at the same width.",
        (Grid("Every law and noise form", head, tuple(lines)),),
    )


def drift_fields(run: Run) -> Section | None:
    """Lay out figure 2."""
    sides = tuple(
        (
            view.label,
            Plate(
                f"figure-2-fields{view.suffix}",
                figures.fields(table),
                f"Three panels of arrows in the {plane(table)}: the affine, the quadratic and the Kramers–Moyal "
                f"drift over the mean steps of held-out tokens, {view.label.lower()}.",
            ),
        )
        for view, (table,) in run.having("figure_fields")
    )
    if not sides:
        return None
    return Section(
        "figure-2",
        "Figure 2: three drift fields",
        "Each law’s drift (colour) over the mean step of the held-out tokens in the same bin (no colour), in the "
        "plane where the flow bends most, less the step that all tokens share. Where a law is right its arrow covers "
        "the other. Bins with too few held-out tokens are left blank.",
        (Stack(sides),),
    )


def table_2(run: Run) -> Section | None:
    """Lay out table 2: quadratic against affine by width, and again with the training set cut to a fixed budget."""
    views = list(run.having("law_scores"))
    if not views:
        return None
    grids = [_table_2(views, "law_scores", "All training tokens")]
    equal = list(run.having("law_scores_equal_budget"))
    if equal:
        sizes = sorted({size for _, (scores,) in equal for size in distinct(scores, "n_train")})
        budget = " and ".join(f"{size:,}" for size in sizes)
        grids.append(_table_2(equal, "law_scores_equal_budget", f"Equal budget: {budget} training tokens"))
    return Section(
        "table-2",
        "Table 2: quadratic against affine, by width",
        "Transitions at which the quadratic drift explains more held-out variance, and median R² over transitions, "
        "averaged over seeds. The second block cuts the training set to a fixed size: what changes there is a limit "
        "of the estimation, not a fact about the flow.",
        (Row(tuple(grids)),),
    )


def locality(run: Run) -> Section | None:
    """Lay out how far KM reaches and how often it wins, by k and width."""
    views = list(run.having("locality", "law_scores"))
    if not views:
        return None
    keys = list(
        dict.fromkeys(
            (k, width)
            for _, (table, _) in views
            for k in distinct(table, "k")
            for width in distinct(where(table, k=k), "n_components")
        )
    )
    lines = []
    for k, width in keys:
        shown: list[str] = []
        for _, (table, scores) in views:
            radius, wins, n_shared = reach(table, scores, n_components=width, k=k)
            shown += [
                ABSENT if radius is None else f"{number(100 * radius, 1)} %",
                f"{wins}/{n_shared}" if n_shared else ABSENT,
            ]
        lines.append(Line(f"k = {k:,}, {width} components", cells(*shown)))
    head = paired_head("neighbours, width", views, ("radius", "wins"))
    alt = "Kramers–Moyal’s wins over the affine map against its radius; the values are in the table."
    caption = "Wins against radius: a line a k, a point a width."
    return Section(
        "locality",
        "How local Kramers–Moyal is",
        "Distance to the k-th neighbour in units of the cloud’s radius (median over transitions), and the "
        "transitions at which KM explains more held-out variance than the affine map.",
        (
            Grid("Locality of the Kramers–Moyal estimate", head, tuple(lines)),
            panels(views, "panel-locality", figures.locality, alt=alt, caption=caption),
        ),
    )


def diagnostics(run: Run) -> Section | None:
    """Lay out what the fits reported about themselves: floors, rank, condition, ridge."""
    views = list(run.having("law_diagnostics"))
    if not views:
        return None
    blocks = tuple((view.label, _diagnostics(table, view)) for view, (table,) in views)
    return Section(
        "diagnostics",
        "What the fits report",
        "Local variances raised to the floor (entries, all transitions and seeds); the smallest rank of a "
        "least-squares fit beside its number of coefficients, and the largest condition number.",
        (Pair(blocks),),
    )


def _table_1(scores: pa.Table, label: str) -> Grid:
    width = working_width(scores) or 0
    nats = [score(scores, law, noise, "log_likelihood", width) for _, law, noise in _LIKELIHOOD_COLUMNS]
    r2 = [score(scores, law, None, "r2", width) for _, law in _R2_COLUMNS]
    lines = []
    for transition in sorted({transition for column in nats + r2 for transition in column}):
        shown = _best([column.get(transition) for column in nats], 2) + _best(
            [column.get(transition) for column in r2], 3
        )
        lines.append(Line(f"{transition} → {transition + 1}", shown))
    summary = cells(
        *(number(median(column.values()), 2) for column in nats), *(number(median(column.values())) for column in r2)
    )
    lines.append(Line("median", summary, summary=True))
    head = (
        (
            Header("transition", rows=2),
            Header("log-likelihood (nats per step)", len(_LIKELIHOOD_COLUMNS)),
            Header("R²", len(_R2_COLUMNS)),
        ),
        tuple(Header(column[0]) for column in (*_LIKELIHOOD_COLUMNS, *_R2_COLUMNS)),
    )
    return Grid(f"Table 1, {label.lower()}", head, tuple(lines))


def _best(values: list[float | None], digits: int) -> tuple[Cell, ...]:
    best = max((value for value in values if value is not None and not math.isnan(value)), default=None)
    return tuple(Cell(number(value, digits), strong=value is not None and value == best) for value in values)


def _margins(run: Run) -> tuple[Pair, ...]:
    views = list(run.having("law_contests"))
    alt = (
        "R² gained over the affine map by the quadratic map and by Kramers–Moyal at each transition, with 95 % "
        "bootstrap intervals."
    )
    caption = (
        "R² gained over the affine map, mean over seeds; the bar spans every seed’s bootstrap 95 % interval, and a "
        "filled point’s bar keeps clear of zero."
    )
    return (
        (panels(views, "panel-contests", at_working_width(figures.contests), alt=alt, caption=caption),)
        if views
        else ()
    )


def _table_2(views: Views, table: str, caption: str) -> Grid:
    widths = sorted({width for _, (scores, *_) in views for width in distinct(scores, "n_components")})
    columns = ("won", "quadratic", "affine", "KM") if table == "law_scores" else ("won", "quadratic", "affine")
    lines = []
    for width in widths:
        shown: list[Cell] = []
        for view, _ in views:
            result = outcome(view.results, QUADRATIC_AFFINE, width, table=table)
            km = outcome(view.results, KM_AFFINE, width, table=table)
            if result is None:
                shown += cells(*[ABSENT] * len(columns))
                continue
            shown.append(Cell(f"{result.wins}/{result.n_transitions}", strong=result.wins == result.n_transitions))
            shown += cells(number(result.median), number(result.opponent_median))
            if "KM" in columns:
                shown.append(Cell(number(None if km is None else km.median)))
        lines.append(Line(str(width), tuple(shown)))
    return Grid(caption, paired_head("components", views, columns), tuple(lines))


def _diagnostics(table: pa.Table, view: View) -> Grid:
    rows = table.to_pylist()
    lines = []
    for law, width in dict.fromkeys((row["law"], row["n_components"]) for row in rows):
        members = [row for row in rows if (row["law"], row["n_components"]) == (law, width)]
        floored = _known(members, "n_floored")
        ranks, conditions = _known(members, "rank"), _known(members, "condition")
        shown = (
            count(int(sum(floored))) if floored else ABSENT,
            count(int(min(ranks))) if ranks else ABSENT,
            count(int(max(_known(members, "n_features"), default=0)) or None),
            compact(max(conditions, default=None)),
        )
        lines.append(Line(f"{LAW_NAMES.get(law, law)}, {width}", cells(*shown)))
    head = (tuple(Header(text) for text in ("law, width", "floored", "rank", "coefficients", "condition")),)
    return Grid(f"Diagnostics, {view.label.lower()}", head, tuple(lines))


def _known(rows: list[dict[str, Any]], column: str) -> list[Any]:
    return [row[column] for row in rows if row.get(column) is not None]
