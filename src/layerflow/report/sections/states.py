"""The cloud itself: figure 1, what the basis keeps of each state, and the norms with the attention sinks."""

from layerflow.query import distinct, where
from layerflow.report import figures
from layerflow.report.blocks import Grid, Header, Line, Plate, Run, Section, Stack, cells
from layerflow.report.figures.clouds import labelled_rows
from layerflow.report.layout import paired_head, panels
from layerflow.report.text import ABSENT, compact, count, number


def cloud(run: Run) -> Section | None:
    """Lay out figure 1."""
    views = list(run.having("figure_cloud"))
    if not views:
        return None
    sides = []
    for view, (table,) in views:
        labels = ", ".join(labelled_rows(table).values()) or "none"
        n_tokens = len(distinct(table, "row"))
        alt = (
            f"Small multiples of the vocabulary’s cloud at states from {min(distinct(table, 'state'))} to "
            f"{max(distinct(table, 'state'))}, {view.label.lower()}: a sample of {n_tokens:,} tokens coloured by how "
            f"often they occur. Labelled tokens: {labels}."
        )
        sides.append((view.label, Plate(f"figure-1-cloud{view.suffix}", figures.cloud(table), alt)))
    return Section(
        "figure-1",
        "Figure 1: the vocabulary’s cloud through depth",
        "A sample of the vocabulary at evenly spaced states, in the two leading principal coordinates of the shared "
        "basis, coloured by how often each token occurs. Every panel has its own frame, since states grow with "
        "depth; a few tokens are named so that they can be followed.",
        (Stack(tuple(sides)),),
    )


def retained(run: Run) -> Section | None:
    """Lay out the variance the shared basis keeps, pooled and by state."""
    views = list(run.having("basis"))
    if not views:
        return None
    pooled = [where(table, state=None) for _, (table,) in views]
    widths = sorted({width for _, (table,) in views for width in distinct(table, "n_components")})
    lines = []
    for width in widths:
        rows = [where(table, n_components=width).to_pylist() for table in pooled]
        shown = [f"{number(100 * found[0]['retained'], 1)} %" if found else ABSENT for found in rows]
        lines.append(Line(str(width), cells(*shown)))
    head = ((Header("components"), *(Header(view.label) for view, _ in views)),)
    alt = "Line chart: share of each state’s own variance kept by the shared basis, by width."
    caption = "Share of each state’s own variance that the basis keeps."
    return Section(
        "basis",
        "What the reduced state keeps",
        "One principal basis is fitted to all states together, each brought to the same size; laws are fitted in it.",
        (
            Grid("Pooled variance kept", head, tuple(lines)),
            panels(views, "panel-retained", figures.retained, alt=alt, caption=caption),
        ),
    )


def norms(run: Run) -> Section | None:
    """Lay out the norms of single positions by state, and how many of them are sinks."""
    views = list(run.having("norms"))
    if not views:
        return None
    tables = [{row["state"]: row for row in table.to_pylist()} for _, (table,) in views]
    lines = []
    for state in sorted({state for table in tables for state in table}):
        shown: list[str] = []
        for table in tables:
            row = table.get(state)
            shown += (
                [ABSENT] * 4
                if row is None
                else [*(compact(row[column]) for column in ("median", "p99", "maximum")), count(row["n_sinks"])]
            )
        lines.append(Line(str(state), cells(*shown)))
    alt = "Median, 99th percentile and maximum norm by state; the values are in the table."
    caption = "Norms of single positions, by state."
    return Section(
        "norms",
        "Norms and attention sinks",
        "Norms of the single states behind the means. A position is a sink when it is the first of its row or when "
        "its norm exceeds ten times the state’s median at any raw state; the last column counts those beyond ten "
        "medians at that state.",
        (
            panels(views, "panel-norms", figures.norms, alt=alt, caption=caption),
            Grid("Norms by state", paired_head("state", views, ("median", "99 %", "maximum", "sinks")), tuple(lines)),
        ),
    )
