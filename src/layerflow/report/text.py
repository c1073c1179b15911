"""What was computed or read, as text a page and a figure can show: hostile strings made visible, numbers aligned."""

import math
import statistics
import unicodedata
from collections.abc import Iterable

import pyarrow as pa

ABSENT = "–"

# Controls, invisible formatting (bidirectional marks, zero-width), lone surrogates, private use, unassigned, and the
# two separators that break lines: drawn as they are they vanish, reorder the text around them, or break the file.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    r"""Write every character that would be invisible, or would disturb its surroundings, as a Python escape.

    ``"\x00"`` becomes a backslash and ``x00``, a right-to-left override ``\u202e``; letters of every script and emoji
    stay. The result is valid XML text and encodes to UTF-8. A leading combining mark gets a dotted circle to sit on.
    """
    shown = "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN_CATEGORIES else char
        for char in text
    )
    return f"◌{shown}" if shown and unicodedata.combining(shown[0]) else shown


def token_label(text: str, *, max_length: int = 14) -> str:
    """Show a token's text: outer spaces as ␣, the invisible as escapes, cut at ``max_length`` characters."""
    core = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if core else len(text)
    after = len(text) - before - len(core)
    shown = "␣" * before + visible(core) + "␣" * after
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"


def texts(column: pa.ChunkedArray) -> list[str]:
    """Read a string column; bytes that are not UTF-8 come back as escapes instead of an error."""
    return [
        "" if raw is None else raw.decode("utf-8", errors="backslashreplace")
        for raw in column.cast(pa.binary()).to_pylist()
    ]


def number(value: float | int | None, digits: int = 3, *, signed: bool = False) -> str:
    """Format a number with a true minus sign; nothing as a dash, and a NaN as itself: never silently."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    shown = f"{value:,.{digits}f}"
    if float(shown.replace(",", "")) == 0:
        shown = shown.lstrip("-")
    elif signed and value > 0:
        shown = f"+{shown}"
    return shown.replace("-", "−")


def compact(value: float | int | None) -> str:
    """Format a number of any size with three significant digits, in powers of ten when it is large or small."""
    if value is None or not math.isfinite(value) or value == 0 or 0.001 <= abs(value) < 100_000:
        return number(value, _decimals(value))
    mantissa, exponent = f"{value:.1e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{power}".removeprefix("1.0·").replace("-", "−")


def count(value: int | None) -> str:
    """Format a count with thousands separated."""
    return ABSENT if value is None else f"{value:,}"


def span(values: Iterable[float | int | None], digits: int = 2) -> str:
    """Format the smallest and the largest of some values."""
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    return f"{number(min(known), digits)} to {number(max(known), digits)}"


def median(values: Iterable[float | int | None]) -> float | int | None:
    """Return the median of the values that are there; None when there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _decimals(value: float | int | None) -> int:
    if value is None or value == 0 or not math.isfinite(value):
        return 0
    return max(0, 2 - math.floor(math.log10(abs(value))))
