"""Kramers–Moyal's reach against its success: the radius of its neighbourhood beside its wins."""

import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from layerflow.query import by_transition, distinct, where
from layerflow.report.figures.style import HALF_HEIGHT, HALF_WIDTH, MUTED, PALETTE, styled
from layerflow.report.headline import score
from layerflow.report.text import median

_STYLES = ((PALETTE["km"], "o"), (PALETTE["other"], "s"), (PALETTE["quadratic"], "D"), (PALETTE["affine"], "^"))


def reach(locality: pa.Table, scores: pa.Table, *, n_components: int, k: int) -> tuple[float | None, int, int]:
    """Return KM's median radius ratio, its wins over affine in R², and the number of transitions, at one width and k.

    Args:
        locality: ``locality``: n_components, seed, k, transition, radius_ratio, r2.
        scores: ``law_scores``, for the affine map's R².
        n_components: Width.
        k: Number of neighbours.
    """
    rows = where(locality, n_components=n_components, k=k)
    ours, affine = by_transition(rows, "r2"), score(scores, "affine", None, "r2", n_components)
    shared = [transition for transition in ours if transition in affine]
    wins = sum(ours[transition] > affine[transition] for transition in shared)
    return median(by_transition(rows, "radius_ratio").values()), wins, len(shared)


@styled
def locality(table: pa.Table, scores: pa.Table) -> Figure:
    """Draw wins of KM over the affine map against the radius of its neighbourhood, a line a k, a point a width.

    Args:
        table: ``locality``.
        scores: ``law_scores``.
    """
    figure = Figure(figsize=(HALF_WIDTH, HALF_HEIGHT), layout="constrained")
    ax = figure.subplots()
    n_transitions = 1
    for index, ((colour, marker), k) in enumerate(zip(_STYLES, distinct(table, "k"), strict=False)):
        points = []
        for width in distinct(where(table, k=k), "n_components"):
            radius, wins, n_shared = reach(table, scores, n_components=width, k=k)
            n_transitions = max(n_transitions, n_shared)
            if radius is not None and n_shared:
                points.append((radius, wins, width))
        if points:
            radii, all_wins, _ = zip(*points, strict=True)
            ax.plot(radii, all_wins, color=colour, marker=marker, ms=5, mec="none", lw=1, label=f"k = {k}")
            for radius, wins, width in points:
                ax.annotate(
                    str(width),
                    (radius, wins),
                    xytext=(0, 5 + 8 * index),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    size=7.5,
                    color=colour,
                )
    ax.set_xlabel("distance to the k-th neighbour ÷ cloud radius (median)")
    ax.set_ylabel(f"transitions won, of {n_transitions}")
    ax.set_ylim(-0.04 * n_transitions, 1.12 * n_transitions)
    ax.set_xlim(left=0)
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.axhline(n_transitions, color=MUTED, lw=0.7, ls=(0, (2, 2)))
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=4, columnspacing=1.2, handlelength=1.4)
    return figure
