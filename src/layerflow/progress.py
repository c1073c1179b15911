"""Progress with an estimate, on standard error, for anything that takes more than a few seconds."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
Advance = Callable[[int], None]


def say(message: str) -> None:
    """Print one line for the person watching, on standard error, above any progress bar."""
    tqdm.write(message, file=sys.stderr)


def track(items: Iterable[T], *, label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items while a bar shows how many are done and how long the rest will take."""
    yield from tqdm(items, desc=label, total=total, file=sys.stderr, dynamic_ncols=True, disable=_is_quiet())


@contextmanager
def counting(*, label: str, total: int, unit: str) -> Iterator[Advance]:
    """Yield a function that advances a bar by a number of units: tokens, rows, bytes."""
    with tqdm(
        desc=label,
        total=total,
        unit=unit,
        unit_scale=True,
        file=sys.stderr,
        dynamic_ncols=True,
        disable=_is_quiet(),
    ) as bar:
        yield bar.update


def _is_quiet() -> bool:
    # A bar redrawn into a log file is noise; there the stages' own lines are enough.
    return not sys.stderr.isatty()
