"""Arrangements that sections share: a header over both views, and the same panel for each view."""

from collections.abc import Callable, Sequence

import pyarrow as pa
from matplotlib.figure import Figure

from layerflow.query import distinct, where, working_width
from layerflow.report.blocks import Grid, Header, Line, Pair, Plate, View, cells
from layerflow.report.figures.depth import same_scale
from layerflow.report.text import ABSENT

Views = Sequence[tuple[View, tuple[pa.Table, ...]]]


def paired_head(first: str, views: Views, columns: Sequence[str], *last: str) -> tuple[tuple[Header, ...], ...]:
    """Head a table in which every view has the same columns, with further columns after them."""
    over = tuple(Header(view.label, len(columns)) for view, _ in views)
    return (
        (Header(first, rows=2), *over, *(Header(text, rows=2) for text in last)),
        tuple(Header(text) for _ in views for text in columns),
    )


def panels(
    views: Views, name: str, draw: Callable[..., Figure], *, alt: str, caption: str, scaled: bool = True
) -> Pair:
    """Draw a panel from each view's tables, on one vertical scale unless ``scaled`` is off.

    Args:
        views: Views with the tables that ``draw`` takes, in its order.
        name: File name; a view's suffix is added.
        draw: Turns a view's tables into a figure.
        alt: What the panel shows; the view's name is added.
        caption: Caption of the pair.
        scaled: Whether heights are to be compared across views.
    """
    drawn = [(view, draw(*tables)) for view, tables in views]
    if scaled:
        same_scale(figure for _, figure in drawn)
    sides = tuple((view.label, Plate(f"{name}{view.suffix}", figure, f"{view.label}. {alt}")) for view, figure in drawn)
    return Pair(sides, caption)


def at_working_width(draw: Callable[..., Figure]) -> Callable[[pa.Table], Figure]:
    """Fix a panel's ``n_components`` to the table's working width."""
    return lambda table: draw(table, n_components=working_width(table) or 0)


def by_width(caption: str, views: Views, columns: Sequence[str], values: Callable[[pa.Table], Sequence[str]]) -> Grid:
    """Lay out a table with a line a width; ``values`` turns one view's rows of one width into texts, a column each."""
    lines = []
    for width in sorted({width for _, (table, *_) in views for width in distinct(table, "n_components")}):
        shown: list[str] = []
        for _, (table, *_) in views:
            rows = where(table, n_components=width)
            shown += values(rows) if rows.num_rows else [ABSENT] * len(columns)
        lines.append(Line(str(width), cells(*shown)))
    return Grid(caption, paired_head("components", views, columns), tuple(lines))
