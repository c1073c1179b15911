"""Where the flow takes tokens: conserved ranks, rollouts, the non-affine share, and the paper's claims."""

import pyarrow as pa

from layerflow.query import means, where
from layerflow.report import figures
from layerflow.report.blocks import Cell, Grid, Header, Line, Run, Section, cells
from layerflow.report.figures.depth import LAW_NAMES
from layerflow.report.layout import paired_head, panels
from layerflow.report.sections.laws import NOISE_NAMES
from layerflow.report.text import ABSENT, compact, median, number, span

_OBSERVABLES = {
    "cosine": ("cosine to the mean direction", "0.76"),
    "norm": ("norm", "−0.17"),
    "participation_ratio": ("participation ratio", "−0.59"),
    "local_density": ("local density", ABSENT),
}
_SHARES = ("nonaffine_step", "nonaffine_state", "nonlinear_gain")
_HOLDS = {True: ("holds", "good"), False: ("does not", "bad"), None: ("not tested", "")}


def conserved(run: Run) -> Section | None:
    """Lay out how tokens keep their rank through depth."""
    views = list(run.having("conserved"))
    if not views:
        return None
    lines = []
    for observable, (name, published) in _OBSERVABLES.items():
        shown: list[str] = []
        for _, (table,) in views:
            rows = where(table, observable=observable).sort_by("state")
            last = rows["from_first"].to_pylist()[-1] if rows.num_rows else None
            shown += [number(last, 2), span(rows["from_previous"].to_pylist())]
        lines.append(Line(name, cells(*shown, published)))
    head = paired_head("observable", views, ("first to last", "state to state"), "paper, first to last")
    alt = "Rank correlation of four observables with their values at state 0, by state."
    caption = "Spearman correlation of each observable with itself at state 0, by depth."
    return Section(
        "conserved",
        "What the flow conserves",
        "Rank correlation over tokens: 1 when every token keeps its place, 0 when places are shuffled, −1 when "
        "reversed.",
        (
            panels(views, "panel-ranks", figures.ranks, alt=alt, caption=caption),
            Grid("Rank correlations", head, tuple(lines)),
        ),
    )


def rollout(run: Run) -> Section | None:
    """Lay out the spread of generated clouds and the trajectories that escaped."""
    views = list(run.having("rollout"))
    if not views:
        return None
    summaries = [_spreads(table) for _, (table,) in views]
    lines = []
    for law, noise in dict.fromkeys(key for summary in summaries for key in summary):
        shown = [text for summary in summaries for text in summary.get((law, noise), [ABSENT] * 4)]
        lines.append(
            Line(f"{LAW_NAMES.get(law, law.replace('_', ' '))}, {NOISE_NAMES.get(noise, noise)}", cells(*shown))
        )
    head = paired_head("law, noise", views, ("middle", "last raw", "last", "escaped"))
    alt = "Spread of generated clouds relative to the real ones by state, a line a law; the table holds values."
    caption = (
        "Spread of the generated cloud ÷ that of the real one (full noise, and the controls), averaged over seeds."
    )
    return Section(
        "rollout",
        "Whole trajectories generated from state 0",
        "Held-out tokens start at their real state 0 and the law is applied to the end without looking at the real "
        "states. A spread ratio below 1 means that generated tokens end up too close together. Escaped: trajectories "
        "that left the training cloud or became non-finite by the last state, averaged over seeds.",
        (
            panels(views, "panel-rollout", figures.rollout, alt=alt, caption=caption),
            Grid("Spread ratio at three states, and escapes", head, tuple(lines)),
        ),
    )


def affinity(run: Run) -> Section | None:
    """Lay out the non-affine share at full width."""
    views = list(run.having("affinity"))
    if not views:
        return None
    lines = []
    for kind, name in (("mean", "mean trajectories"), ("individual", "individual states")):
        shown: list[str] = []
        for _, (table,) in views:
            rows = where(table, kind=kind)
            shown += [_percent(rows[column].to_pylist()) for column in _SHARES]
        lines.append(Line(name, cells(*shown)))
    head = paired_head("", views, ("step", "next state", "nonlinear gain"))
    return Section(
        "affinity",
        "What an affine map misses at full width",
        "Held-out 1 − R² of the affine map in all dimensions, of the step and of the next state; and the share of "
        "the quadratic fit’s R² that products of leading components add. Medians over transitions, with their range.",
        (Grid("Non-affine share at full width", head, tuple(lines)), *_corrected(run)),
    )


def claims(run: Run) -> Section | None:
    """Lay out the paper's claims beside this run's values."""
    views = list(run.having("claims"))
    if not views:
        return None
    _, (table,) = views[0]
    lines = []
    for row in table.to_pylist():
        with_sinks, without = (_HOLDS[_truth(row[key])] for key in ("holds", "holds_without_sinks"))
        lines.append(
            Line(
                _text(row["claim"]),
                (
                    Cell(_text(row["published"])),
                    Cell(_text(row["measured"])),
                    Cell(with_sinks[0], tone=with_sinks[1]),
                    Cell(_text(row["measured_without_sinks"])),
                    Cell(without[0], tone=without[1]),
                    Cell(_text(row["note"])),
                ),
            )
        )
    head = (
        (
            Header("claim", rows=2),
            Header("paper", rows=2),
            Header("With sinks", 2),
            Header("Without sinks", 2),
            Header("note", rows=2),
        ),
        tuple(Header(text) for text in ("this run", "", "this run", "")),
    )
    return Section(
        "claims",
        "The paper’s claims on this run",
        "Each claim with the value published for Pythia, this run’s value, and whether it holds here.",
        (Grid("Claims", head, tuple(lines), words=True),),
    )


def _spreads(table: pa.Table) -> dict[tuple[str, str], list[str]]:
    """Return each law's spread ratio at the middle, the last raw and the last state, and its escapes at the last."""
    last = max(table["state"].to_pylist())
    ratios = means(table, ["law", "noise", "state"], "spread_ratio")
    escapes = means(table, ["law", "noise", "state"], "n_escaped")
    return {
        (law, noise): [
            *(_ratio(ratios.get((law, noise, state))) for state in (last // 2, last - 1, last)),
            number(escapes[law, noise, last], 1),
        ]
        for law, noise in dict.fromkeys((law, noise) for law, noise, _ in escapes)
    }


def _corrected(run: Run) -> tuple[Grid, ...]:
    """Lay out the last transition's share with the sampling noise of the means taken away."""
    views = list(run.having("affinity_corrected"))
    if not views:
        return ()
    lines = []
    for transition in sorted({transition for _, (table,) in views for transition in table["transition"].to_pylist()}):
        shown: list[str] = []
        for _, (table,) in views:
            rows = where(table, transition=transition).to_pylist()
            row = rows[0] if rows else {}
            shown += [number(row.get(column), 3) for column in ("nonaffine_state", "floor", "corrected")]
        lines.append(Line(f"{transition} → {transition + 1}", cells(*shown)))
    caption = "Next state, mean trajectories, with the sampling noise of the means taken away"
    return (Grid(caption, paired_head("transition", views, ("measured", "noise", "corrected")), tuple(lines)),)


def _percent(values: list[float | None]) -> str:
    """Show the median of some shares, and their range."""
    known = [100 * value for value in values if value is not None]
    return f"{number(median(known), 1)} % ({span(known, 1)})" if known else ABSENT


def _ratio(value: float | None) -> str:
    return number(value, 2) if value is None or value < 1000 else compact(value)


def _truth(value: object) -> bool | None:
    """Read a yes, a no or an empty cell, whether the column is Boolean or text."""
    return {"true": True, "false": False}.get(str(value).lower())


def _text(value: object) -> str:
    return ABSENT if value in (None, "") else value if isinstance(value, str) else number(float(str(value)))
