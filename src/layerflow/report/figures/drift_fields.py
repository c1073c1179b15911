"""Figure 2: the drift fields of three laws over the mean held-out steps."""

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layerflow.report.figures.style import FULL_WIDTH, MUTED, PALETTE, styled
from layerflow.report.query import distinct, where

PANELS = (("affine", "Affine"), ("quadratic", "Quadratic"), ("km", "Kramers–Moyal"))
_LENGTH_IN_BINS = 1.3  # how long all but the longest tenth of the arrows are at most


@styled
def fields(table: pa.Table) -> Figure:
    """Draw each law's arrows over the mean step of the held-out tokens in the same bin.

    Bins with too few held-out tokens are not in the table and stay blank. One scale serves all arrows and is written
    down.

    Args:
        table: ``figure_fields``: transition, state, x, y, series, u, v, n.
    """
    figure = Figure(figsize=(FULL_WIDTH, 3.9), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    observed = where(table, series="observed")
    scale = _scale(table, observed)
    for ax, (series, title) in zip(axes, PANELS, strict=True):
        rows = where(table, series=series)
        ax.set_title(title, color=PALETTE[series], fontweight="bold")
        ax.grid(visible=False)
        ax.set_xlabel("first principal coordinate (centred)")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        if observed.num_rows:
            # Wide under narrow: where the law is right, its arrow lies inside the black one and both are seen.
            _arrows(ax, observed, scale, PALETTE["observed"], width=0.0054)
        if rows.num_rows:
            _arrows(ax, rows, scale, PALETTE[series], width=0.0036)
    axes[0].set_ylabel("second principal coordinate (centred)")
    if observed.num_rows:
        _frame(axes[0], observed)
        figure.supxlabel(_legend(table, observed, scale), size=8, color=MUTED, x=0.01, ha="left")
    return figure


def plane(table: pa.Table) -> str:
    """Say which plane and which transition figure 2 shows."""
    states, transitions = distinct(table, "state"), distinct(table, "transition")
    if not states or not transitions:
        return "no plane"
    return f"leading principal plane of state {states[0]}, transition {transitions[0]} → {transitions[0] + 1}"


def _legend(table: pa.Table, observed: pa.Table, scale: float) -> str:
    tokens = int(observed["n"].to_numpy().sum())
    return (
        f"{plane(table).capitalize()}. No colour: mean step of the {tokens:,} held-out tokens, by bin; "
        f"colour: the law’s drift. Arrows drawn at {1 / scale:.2g} × their length."
    )


def _bin_size(observed: pa.Table) -> tuple[float, float]:
    sizes = []
    for column in ("x", "y"):
        gaps = np.diff(np.unique(observed[column].to_numpy().round(9)))
        sizes.append(float(gaps.min()) if len(gaps) else 1.0)
    return sizes[0], sizes[1]


def _scale(table: pa.Table, observed: pa.Table) -> float:
    """Return what arrow components are divided by: the 90th percentile of length, in bins, becomes 1.3 bins."""
    if not observed.num_rows:
        return 1.0
    width, height = _bin_size(observed)
    lengths = np.hypot(table["u"].to_numpy() / width, table["v"].to_numpy() / height)
    return float(max(np.percentile(lengths, 90), 1e-12) / _LENGTH_IN_BINS)


def _arrows(ax: Axes, rows: pa.Table, scale: float, colour: str, *, width: float) -> None:
    x, y, u, v = (rows[column].to_numpy() for column in ("x", "y", "u", "v"))
    ax.quiver(
        x, y, u, v, color=colour, angles="xy", scale_units="xy", scale=scale, width=width, headwidth=3.8, headlength=4.4
    )


def _frame(ax: Axes, observed: pa.Table) -> None:
    width, height = _bin_size(observed)
    x, y = observed["x"].to_numpy(), observed["y"].to_numpy()
    ax.set_xlim(x.min() - 1.2 * width, x.max() + 1.2 * width)
    ax.set_ylim(y.min() - 1.2 * height, y.max() + 1.2 * height)
