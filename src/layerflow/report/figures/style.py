"""How every figure looks: palette, type, and a context that shields the drawing from the user's own settings."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from matplotlib import style

P = ParamSpec("P")
T = TypeVar("T")

# Each colour has a role, and the page replaces it by the CSS variable of that name so that figures follow the theme
# (export.inline); the values here are those of the light theme and of the files.
PALETTE = {
    "ink": "#22272e",
    "muted": "#68707c",
    "rule": "#d3d8df",
    "halo": "#fffffe",
    "observed": "#22272f",
    "affine": "#26805f",
    "quadratic": "#3f51a8",
    "km": "#c4601a",
    "other": "#a0437c",
    "null": "#8b929c",
    "step-1": "#aab5de",
    "step-2": "#7485cb",
    "step-3": "#40519f",
    "step-4": "#1d2763",
}

GROUND = "#ffffff"
INK, MUTED, RULE, HALO = (PALETTE[role] for role in ("ink", "muted", "rule", "halo"))
STEPS = tuple(PALETTE[f"step-{index}"] for index in range(1, 5))

FULL_WIDTH = 10.6  # inches; the page shows a full-width figure about 1.5 times as large
HALF_WIDTH = 5.2
HALF_HEIGHT = 3.0
DPI = 144
FONT = "DejaVu Sans"  # travels with matplotlib, so the layout is the same everywhere

_SETTINGS: dict[str, Any] = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,
    "figure.facecolor": GROUND,
    "figure.dpi": DPI,
    "font.family": "sans-serif",
    "font.sans-serif": [FONT],
    "font.size": 8,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.6,
    "savefig.facecolor": GROUND,
    "svg.fonttype": "none",  # text stays text: small files, the reader's own fonts for other scripts
    "svg.hashsalt": "layerflow",
    "text.color": INK,
    "text.parse_math": False,  # a token may hold dollar signs
    "xtick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 7.5,
    "xtick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.color": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 7.5,
    "ytick.major.size": 0,
}


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Run a drawing function under this module's settings, whatever ``matplotlibrc`` says, and restore them after."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with style.context(_SETTINGS, after_reset=True):
            return draw(*args, **kwargs)

    return drawn
