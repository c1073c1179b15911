"""Reading result tables: rows that match, means over seeds, the working width."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

WORKING_WIDTH = 16


def where(table: pa.Table, **equal: Any) -> pa.Table:
    """Return the rows whose columns equal the given values; ``None`` matches an empty cell."""
    for column, value in equal.items():
        values = table[column]
        table = table.filter(pc.is_null(values) if value is None else pc.equal(values, value))
    return table


def distinct(table: pa.Table, column: str) -> list[Any]:
    """Return a column's different values in ascending order, empty cells left out."""
    return sorted(value for value in pc.unique(table[column]).to_pylist() if value is not None)


def means(table: pa.Table, keys: list[str], value: str) -> dict[tuple[Any, ...], float | None]:
    """Average a column over everything but the keys (over seeds, where a table has them); None where all is empty."""
    grouped = table.group_by(keys, use_threads=False).aggregate([(value, "mean")])
    columns = [grouped[key].to_pylist() for key in keys]
    return dict(zip(zip(*columns, strict=True), grouped[f"{value}_mean"].to_pylist(), strict=True))


def by_transition(table: pa.Table, value: str) -> dict[int, float]:
    """Average a column over everything but the transition; a transition without values is left out."""
    found = sorted(means(table, ["transition"], value).items())
    return {transition: mean for (transition,), mean in found if mean is not None}


def nearest_width(widths: Iterable[int]) -> int:
    """Return 16 or the width nearest to it, the smaller one when two are as near."""
    return min(widths, key=lambda width: (abs(width - WORKING_WIDTH), width))


def working_width(table: pa.Table) -> int | None:
    """Return 16 or the nearest width in the table; None when it is empty."""
    widths = distinct(table, "n_components")
    return nearest_width(widths) if widths else None
