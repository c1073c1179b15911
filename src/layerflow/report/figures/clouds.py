"""Figure 1: the vocabulary's cloud through depth."""

import functools

import numpy as np
import pyarrow as pa
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from layerflow.query import distinct, where
from layerflow.report.figures.style import FONT, FULL_WIDTH, HALO, INK, MUTED, styled
from layerflow.report.text import texts, token_label

MAX_PANELS = 8
MAX_LABELS = 6
_COLUMNS = 4
_FRAME_PERCENT = 0.5  # of the tokens beyond each edge when the cloud has far outliers

# Rare to frequent: dark to light enough to order, yet every step legible on white and on near-black.
_FREQUENCY = LinearSegmentedColormap.from_list("frequency", ["#4d68b0", "#9067b5", "#d9656f", "#f0a236"])


def shown_states(cloud: pa.Table) -> list[int]:
    """Return the states figure 1 shows: at most eight, evenly spaced, the first and the last among them."""
    states = distinct(cloud, "state")
    picks = np.linspace(0, len(states) - 1, min(MAX_PANELS, len(states))).round().astype(int)
    return [states[pick] for pick in picks]


def labelled_rows(cloud: pa.Table) -> dict[int, str]:
    """Choose a handful of tokens to follow through the panels: {row: text as drawn}.

    Plain words the figure's font can draw come first, whole ones before pieces, the frequent before the rare; among the
    150 first, each new one is the farthest from those chosen, in the middle panel, so that labels spread out.
    """
    states = shown_states(cloud)
    if not states:
        return {}
    panel = where(cloud, state=states[len(states) // 2])
    labels = [drawable(token_label(text)) for text in texts(panel["text"])]
    counts = panel["count"].to_numpy()
    order = sorted(range(len(labels)), key=lambda row: (_oddity(labels[row]), -counts[row], row))[:150]
    places = np.column_stack([_spread(panel["x"].to_numpy()), _spread(panel["y"].to_numpy())])[order]
    chosen = [0] if order else []
    while len(chosen) < min(MAX_LABELS, len(order)):
        gaps = np.linalg.norm(places[:, None] - places[chosen][None], axis=2).min(axis=1)
        chosen.append(int(np.argmax(gaps)))
    rows = panel["row"].to_pylist()
    return {rows[order[pick]]: labels[order[pick]] for pick in chosen}


@styled
def cloud(table: pa.Table) -> Figure:
    """Draw the cloud at up to eight states, in the basis's two leading coordinates, coloured by log frequency.

    Each panel has its own frame, since norms grow with depth. Far outliers would squeeze the rest into a dot: the frame
    then leaves out half a percent at each edge, and the panel says how many tokens lie outside it.

    Args:
        table: ``figure_cloud``: state, row, x, y, count, text.
    """
    states = shown_states(table)
    followed = labelled_rows(table)
    n_rows = max(1, -(-len(states) // _COLUMNS))
    figure = Figure(figsize=(FULL_WIDTH, 0.35 + 2.65 * n_rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(n_rows, min(_COLUMNS, max(1, len(states))))).ravel()
    for spare in axes[len(states) :]:
        spare.set_axis_off()
    counts = table["count"].to_numpy()
    norm = LogNorm(max(1, counts.min()), max(2, counts.max())) if len(counts) else LogNorm(1, 2)
    for ax, state in zip(axes, states, strict=False):
        panel = where(table, state=state).sort_by("count")
        points = ax.scatter(
            panel["x"].to_numpy(),
            panel["y"].to_numpy(),
            c=panel["count"].to_numpy(),
            norm=norm,
            cmap=_FREQUENCY,
            s=3.2,
            linewidths=0,
            rasterized=True,
        )
        outside = _frame(ax, panel)
        ax.set_title(f"State {state}{_part(state, distinct(table, 'state'))}")
        _tidy(ax)
        if outside:
            ax.text(0.99, 0.99, f"{outside} outside", transform=ax.transAxes, ha="right", va="top", color=MUTED, size=7)
    if states:
        bar = figure.colorbar(points, ax=list(axes), shrink=0.6, aspect=32, pad=0.015)
        bar.set_label("occurrences in the corpus")
        bar.formatter = FuncFormatter(lambda value, _: f"{value:,.0f}")
        bar.outline.set_visible(False)
        bar.ax.minorticks_off()
        figure.supxlabel("first principal coordinate", size=8.5)
        figure.supylabel("second principal coordinate", size=8.5)
        _label_panels(figure, axes[: len(states)], states, table, followed)
    return figure


def _part(state: int, states: list[int]) -> str:
    return ", embedding" if state == 0 else ", final" if state == states[-1] else ""


def _spread(values: np.ndarray) -> np.ndarray:
    low, middle, high = np.percentile(values, [5, 50, 95])
    spread: np.ndarray = np.clip((values - middle) / max(high - low, 1e-12), -1, 1)
    return spread


def _frame(ax: Axes, panel: pa.Table) -> int:
    """Set the panel's limits and return how many tokens lie beyond them."""
    outside = np.zeros(panel.num_rows, bool)
    for column, set_limits in (("x", ax.set_xlim), ("y", ax.set_ylim)):
        values = panel[column].to_numpy()
        low, high = np.percentile(values, [_FRAME_PERCENT, 100 - _FRAME_PERCENT])
        margin = 0.25 * (high - low) or 0.5
        low, high = max(low - margin, values.min() - 0.15 * margin), min(high + margin, values.max() + 0.15 * margin)
        set_limits(low, high)
        outside |= (values < low) | (values > high)
    return int(outside.sum())


def _tidy(ax: Axes) -> None:
    ax.grid(visible=False)
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.yaxis.set_major_locator(MaxNLocator(3))
    ax.tick_params(size=2.5)


def _label_panels(
    figure: Figure, axes: np.ndarray, states: list[int], table: pa.Table, followed: dict[int, str]
) -> None:
    """Label the followed tokens where a label fits without touching another, after the layout is settled."""
    renderer: RendererAgg = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax, state in zip(axes, states, strict=True):
        panel = where(table, state=state)
        place = dict(
            zip(panel["row"].to_pylist(), zip(panel["x"].to_pylist(), panel["y"].to_pylist(), strict=True), strict=True)
        )
        taken: list[Bbox] = []
        for row, label in followed.items():
            if row in place and ax.viewLim.contains(*place[row]):
                _place_label(ax, place[row], label, taken, renderer)


def _place_label(ax: Axes, point: tuple[float, float], label: str, taken: list[Bbox], renderer: RendererAgg) -> None:
    for dx, dy, ha, va in (
        (5, 5, "left", "bottom"),
        (-5, 5, "right", "bottom"),
        (5, -5, "left", "top"),
        (-5, -5, "right", "top"),
        (0, 8, "center", "bottom"),
        (0, -8, "center", "top"),
    ):
        text = ax.annotate(
            label,
            point,
            xytext=(dx, dy),
            textcoords="offset points",
            ha=ha,
            va=va,
            size=7.5,
            color=INK,
            bbox={"facecolor": HALO, "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )
        box = text.get_window_extent(renderer).padded(2)
        frame = ax.get_window_extent(renderer)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            ax.plot(*point, marker="o", ms=3.4, mfc="none", mec=INK, mew=0.9)
            taken.append(box)
            return
        text.remove()


def _oddity(label: str) -> int:
    """Order labels: words that follow a space, then word pieces of three letters or more, then the rest."""
    word = label.strip("␣")
    if len(word) < 3 or not word.isalpha():
        return 2
    return 0 if label.startswith("␣") else 1


@functools.cache
def _font_characters() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(FONT)).get_charmap())


def drawable(label: str) -> str:
    """Write what the figure's font has no glyph for as an escape, so that no label is a row of empty boxes."""
    known = _font_characters()
    return "".join(char if ord(char) in known else char.encode("unicode_escape").decode() for char in label)
