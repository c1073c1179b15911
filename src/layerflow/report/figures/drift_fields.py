"""Figure 2: the drift fields of three laws over the mean held-out steps."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layerflow.query import distinct, where
from layerflow.report.figures.style import FULL_WIDTH, MUTED, PALETTE, styled
from layerflow.report.text import compact

PANELS = (("affine", "Affine"), ("quadratic", "Quadratic"), ("km", "Kramers–Moyal"))
_LENGTH_IN_BINS = 1.3  # how long all but the longest tenth of the arrows are at most


@styled
def fields(table: pa.Table) -> Figure:
    """Draw each law's arrows over the mean step of the held-out tokens in the same bin.

    All arrows are drawn less the mean step of the tokens in the figure: what all tokens do alike is usually longer than
    what sets them apart, and would hide it. That step and the one scale of all arrows are written below. Bins with too
    few held-out tokens are not in the table and stay blank.

    Args:
        table: ``figure_fields``: transition, state, x, y, series, u, v, n.
    """
    figure = Figure(figsize=(FULL_WIDTH, 3.9), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    common = common_step(table)
    arrows = {series: _Arrows.of(where(table, series=series), common) for series in distinct(table, "series")}
    observed = arrows.get("observed")
    scale = 1.0 if observed is None else _scale(list(arrows.values()), observed.bin_size)
    for ax, (series, title) in zip(axes, PANELS, strict=True):
        ax.set_title(title, color=PALETTE[series], fontweight="bold")
        ax.grid(visible=False)
        ax.set_xlabel("first principal coordinate (centred)")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        # Wide under narrow: where the law is right, its arrow lies inside the black one and both are seen.
        for drawn, colour, width in (
            (observed, PALETTE["observed"], 0.0054),
            (arrows.get(series), PALETTE[series], 0.0036),
        ):
            if drawn is not None:
                drawn.draw(ax, scale, colour, width=width)
    axes[0].set_ylabel("second principal coordinate (centred)")
    if observed is not None:
        observed.frame(axes[0], scale)
        n_tokens = int(where(table, series="observed")["n"].to_numpy().sum())
        note = (
            f"{plane(table).capitalize()}. No colour: mean step of the {n_tokens:,} held-out tokens, by bin; colour: "
            f"the law’s drift.\nAll arrows less the tokens’ mean step, ({compact(common[0])}, {compact(common[1])}), "
            f"and drawn at {1 / scale:.2g} × their length."
        )
        figure.supxlabel(note, size=8, color=MUTED, x=0.01, ha="left", linespacing=1.4)
    return figure


def common_step(table: pa.Table) -> tuple[float, float]:
    """Return the mean in-plane step of the held-out tokens in the bins: bins' means weighted by their tokens."""
    observed = where(table, series="observed")
    n = observed["n"].to_numpy()
    if n.sum() == 0:
        return 0.0, 0.0
    u, v = (float(np.average(observed[column].to_numpy(), weights=n)) for column in ("u", "v"))
    return u, v


def plane(table: pa.Table) -> str:
    """Say which plane and which transition figure 2 shows."""
    states, transitions = distinct(table, "state"), distinct(table, "transition")
    if not states or not transitions:
        return "no plane"
    return f"leading principal plane of state {states[0]}, transition {transitions[0]} → {transitions[0] + 1}"


@dataclass(frozen=True)
class _Arrows:
    """One series' arrows: where they start, and their components less the common step."""

    x: np.ndarray
    y: np.ndarray
    u: np.ndarray
    v: np.ndarray

    @classmethod
    def of(cls, rows: pa.Table, common: tuple[float, float]) -> "_Arrows":
        x, y, u, v = (rows[column].to_numpy() for column in ("x", "y", "u", "v"))
        return cls(x, y, u - common[0], v - common[1])

    @property
    def bin_size(self) -> tuple[float, float]:
        gaps = [np.diff(np.unique(values.round(9))) for values in (self.x, self.y)]
        width, height = (float(gap.min()) if len(gap) else 1.0 for gap in gaps)
        return width, height

    def draw(self, ax: Axes, scale: float, colour: str, *, width: float) -> None:
        ax.quiver(
            self.x,
            self.y,
            self.u,
            self.v,
            color=colour,
            angles="xy",
            scale_units="xy",
            scale=scale,
            width=width,
            headwidth=3.8,
            headlength=4.4,
        )

    def frame(self, ax: Axes, scale: float) -> None:
        """Set the limits so that every arrow is in, from its start to its tip."""
        width, height = self.bin_size
        x, y = np.append(self.x, self.x + self.u / scale), np.append(self.y, self.y + self.v / scale)
        ax.set_xlim(x.min() - 0.7 * width, x.max() + 0.7 * width)
        ax.set_ylim(y.min() - 0.7 * height, y.max() + 0.7 * height)


def _scale(arrows: list[_Arrows], bin_size: tuple[float, float]) -> float:
    """Return what arrow components are divided by: the 90th percentile of length, in bins, becomes 1.3 bins."""
    lengths = np.concatenate([np.hypot(series.u / bin_size[0], series.v / bin_size[1]) for series in arrows])
    return float(max(np.percentile(lengths, 90), 1e-12) / _LENGTH_IN_BINS)
