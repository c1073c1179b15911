"""Panels with depth on the horizontal axis, drawn from the result tables."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from layerflow.query import by_transition, distinct, means, where
from layerflow.report.figures.style import (
    HALF_HEIGHT,
    HALF_WIDTH,
    INK,
    MUTED,
    PALETTE,
    STEPS,
    styled,
)
from layerflow.report.headline import KM_AFFINE, QUADRATIC_AFFINE, contest_rows, score
from layerflow.report.text import compact

LAW_NAMES = {
    "quadratic": "quadratic",
    "km": "KM",
    "affine": "affine",
    "rotation_stretch": "rotation–stretch",
    "null_a": "null A",
    "null_b": "null B",
    "null_c": "null C",
}
_LAW_COLOURS = {"rotation_stretch": PALETTE["other"]} | {law: PALETTE[law] for law in ("quadratic", "km", "affine")}
_OBSERVABLES = {
    "cosine": ("cosine to the mean direction", PALETTE["quadratic"], "o"),
    "norm": ("norm", PALETTE["km"], "s"),
    "participation_ratio": ("participation ratio", PALETTE["other"], "^"),
    "local_density": ("local density", PALETTE["affine"], "D"),
}


# Law, noise form (None: whichever there is), name, dashes. Other forms stand in the table only: twelve lines are too
# many to tell apart.
_ROLLOUTS = (
    ("km", "local_full", "KM, full noise", "-"),
    ("affine", "full", "affine, full noise", "-"),
    ("quadratic", "full", "quadratic, full noise", "-"),
    ("rotation_stretch", "isotropic", "rotation–stretch", "-"),
    ("affine", "none", "affine, no noise", ":"),
    ("stationary_control", None, "stationary control", "--"),
)

_FARTHEST = 30.0  # spread ratio at which the rollout panel's axis ends


@styled
def laws(scores: pa.Table, *, n_components: int) -> Figure:
    """Draw the held-out R² of each drift at every transition, averaged over seeds.

    Args:
        scores: ``law_scores``.
        n_components: Width to draw.
    """
    figure, ax = _panel("transition", "held-out R²")
    for law in ("quadratic", "km", "affine", "rotation_stretch"):
        _line(ax, score(scores, law, None, "r2", n_components), LAW_NAMES[law], _LAW_COLOURS[law])
    low, _ = ax.get_ylim()
    ax.set_ylim(max(low, -0.25), 1.0)
    return _finish(figure, ax)


@styled
def contests(table: pa.Table, *, n_components: int) -> Figure:
    """Draw how much R² the quadratic map and KM gain over the affine map, with bootstrap intervals.

    Over several seeds the point is the mean difference and the bar spans every seed's interval; a filled point's bar
    keeps clear of zero.

    Args:
        table: ``law_contests``.
        n_components: Width to draw.
    """
    figure, ax = _panel("transition", "R² gained over affine")
    _zero(ax)
    for shift, contest in ((-0.13, QUADRATIC_AFFINE), (0.13, KM_AFFINE)):
        rows = contest_rows(table, contest, n_components)
        if rows.num_rows:
            _intervals(ax, rows, "difference", LAW_NAMES[contest.law], PALETTE[contest.law], shift)
    return _finish(figure, ax)


@styled
def retained(basis: pa.Table) -> Figure:
    """Draw the share of each state's own variance that the shared basis keeps, one line a width.

    Args:
        basis: ``basis``: n_components, state (empty = pooled), retained.
    """
    figure, ax = _panel("state", "variance kept")
    widths = distinct(basis, "n_components")
    for index, width in enumerate(widths):
        rows = where(basis, n_components=width)
        line = {state: mean for (state,), mean in means(rows, ["state"], "retained").items() if state is not None}
        colour = STEPS[min(index, len(STEPS) - 1)] if len(widths) > 1 else STEPS[-2]
        _line(ax, dict(sorted(line.items())), f"{width} components", colour)
    ax.set_ylim(0, 1.02)
    return _finish(figure, ax)


@styled
def norms(table: pa.Table) -> Figure:
    """Draw the median, the 99th percentile and the maximum of the vectors' norms at every state, on a log axis.

    Args:
        table: ``norms``.
    """
    figure, ax = _panel("state", "norm (log scale)")
    _log_scale(ax)
    states = table["state"].to_pylist()
    for column, label, colour in (
        ("maximum", "maximum", STEPS[0]),
        ("p99", "99th percentile", STEPS[1]),
        ("median", "median", STEPS[3]),
    ):
        _line(ax, dict(zip(states, table[column].to_pylist(), strict=True)), label, colour)
    return _finish(figure, ax)


@styled
def alignment(gradient: pa.Table, *, n_components: int) -> Figure:
    """Draw the alignment gap between steps and the density gradient, the flow's beside the control's.

    The control is the Ornstein–Uhlenbeck process whose drift is the gradient by construction: the floor the flow would
    have to reach.

    Args:
        gradient: ``gradient``.
        n_components: Width to draw.
    """
    figure, ax = _panel("transition", "alignment gap (cosine)")
    _zero(ax)
    rows = where(gradient, n_components=n_components)
    for subject, label, colour in (("control", "control", PALETTE["null"]), ("flow", "flow", PALETTE["quadratic"])):
        _intervals(ax, where(rows, subject=subject), "gap", label, colour, 0.0)
    return _finish(figure, ax)


@styled
def potential(table: pa.Table, *, n_components: int) -> Figure:
    """Draw figure 3: potential, rotational and symmetric share by depth, with the symmetric share's shuffle null.

    Args:
        table: ``potential``.
        n_components: Width to draw.
    """
    figure, ax = _panel("transition", "share")
    rows = where(table, n_components=n_components)
    for column, label, colour, dashes in (
        ("potential_share", "potential", PALETTE["quadratic"], "-"),
        ("rotational_share", "rotation", PALETTE["km"], "-"),
        ("symmetric_share", "symmetric", PALETTE["affine"], "-"),
        ("symmetric_share_shuffled", "symmetric, shuffled", PALETTE["null"], "--"),
    ):
        _line(ax, by_transition(rows, column), label, colour, dashes)
    ax.set_ylim(min(0, ax.get_ylim()[0]), max(1.02, ax.get_ylim()[1]))
    return _finish(figure, ax)


@styled
def rollout(table: pa.Table) -> Figure:
    """Draw the spread of rolled-out clouds against the real ones' by state, averaged over seeds, on a log axis.

    A law that overflows would squeeze all others into a line: the axis ends at a factor of 30 either way, and a line
    that leaves it is named with its extreme.

    Args:
        table: ``rollout``: law, noise, seed, state, spread_ratio, n_escaped.
    """
    figure, ax = _panel("state", "spread, generated ÷ real (log)")
    _log_scale(ax)
    ax.axhline(1, color=MUTED, lw=0.8)
    gone: list[tuple[str, float]] = []
    for law, noise, name, dashes in _ROLLOUTS:
        rows = where(where(table, law=law), **({} if noise is None else {"noise": noise}))
        line = {state: ratio for (state,), ratio in sorted(means(rows, ["state"], "spread_ratio").items())}
        positive = {state: ratio for state, ratio in line.items() if ratio is not None and ratio > 0}
        _line(ax, positive, name, _LAW_COLOURS.get(law, PALETTE["null"]), dashes)
        extreme = max(positive.values(), key=lambda ratio: abs(math.log(ratio)), default=1.0)
        if not 1 / _FARTHEST <= extreme <= _FARTHEST:
            gone.append((name, extreme))
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, 1 / _FARTHEST), min(high, _FARTHEST))
    if gone:
        note = "off the axis: " + "; ".join(f"{name}, to {compact(extreme)}" for name, extreme in gone)
        ax.text(0.02, 0.97, note, transform=ax.transAxes, va="top", size=7, color=MUTED)
    return _finish(figure, ax, columns=3)


@styled
def ranks(conserved: pa.Table) -> Figure:
    """Draw how well tokens keep the rank they had at state 0, for each observable.

    Args:
        conserved: ``conserved``: observable, state, from_first, from_previous.
    """
    figure, ax = _panel("state", "rank correlation with state 0")
    _zero(ax)
    for observable, (label, colour, marker) in _OBSERVABLES.items():
        rows = where(conserved, observable=observable).sort_by("state")
        line = dict(zip(rows["state"].to_pylist(), rows["from_first"].to_pylist(), strict=True))
        _line(ax, line, label, colour, marker=marker)
    ax.set_ylim(-1.02, 1.02)
    return _finish(figure, ax, columns=2)


def same_scale(figures: Iterable[Figure]) -> None:
    """Give panels that stand side by side one vertical scale, so that their heights can be compared."""
    axes = [figure.axes[0] for figure in figures if figure.axes[0].has_data()]
    if axes:
        low, high = min(ax.get_ylim()[0] for ax in axes), max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(low, high)


class _PlainLogFormatter(LogFormatter):
    """Matplotlib's choice of which ticks to label, with numbers as one writes them."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        if not super().__call__(x, pos):
            return ""
        return compact(x) if x >= 100_000 else f"{x:,.0f}" if x >= 1 else f"{x:g}"


def _panel(horizontal: str, vertical: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(HALF_WIDTH, HALF_HEIGHT), layout="constrained")
    ax = figure.subplots()
    ax.set_xlabel(horizontal)
    ax.set_ylabel(vertical)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure, ax


def _finish(figure: Figure, ax: Axes, *, columns: int = 4) -> Figure:
    """Put the legend above the panel, where it hides no line."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=columns,
            columnspacing=1.2,
            handlelength=1.4,
            handletextpad=0.5,
        )
    return figure


def _line(ax: Axes, line: Mapping[int, Any], label: str, colour: str, dashes: str = "-", *, marker: str = "o") -> None:
    known = {depth: value for depth, value in line.items() if value is not None}
    if known:
        size = 3.4 if len(known) <= 40 else 0
        ax.plot(
            list(known), list(known.values()), dashes, color=colour, label=label, marker=marker, ms=size, mec="none"
        )


def _intervals(ax: Axes, rows: pa.Table, value: str, label: str, colour: str, shift: float) -> None:
    """Draw a point a transition, filled where its interval keeps clear of zero, and the interval as a bar."""
    known = rows.filter(pc.is_valid(rows[value]))
    grouped = known.group_by("transition", use_threads=False)
    summary = grouped.aggregate([(value, "mean"), ("low", "min"), ("high", "max")]).sort_by("transition")
    place = summary["transition"].to_numpy() + shift
    middle, low, high = (summary[column].to_numpy() for column in (f"{value}_mean", "low_min", "high_max"))
    ax.vlines(place, low, high, color=colour, lw=1.3)
    clear = (low > 0) | (high < 0)
    for drawn, face, name in ((clear, colour, label), (~clear, "none", None if clear.any() else label)):
        if drawn.any():
            ax.plot(place[drawn], middle[drawn], "o", ms=4, mfc=face, mec=colour, label=name)


def _log_scale(ax: Axes) -> None:
    """Label a log axis with plain numbers, within a decade too when it spans less than two."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(_PlainLogFormatter())
    ax.yaxis.set_minor_formatter(_PlainLogFormatter(minor_thresholds=(1.2, 0.5)))


def _zero(ax: Axes) -> None:
    ax.axhline(0, color=INK, lw=0.7, zorder=1)
