"""What a page is made of, and the run it is made from: plain records, laid out by the template."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from matplotlib.figure import Figure

from layerflow.tables import WITH_SINKS, WITHOUT_SINKS, Results

LABELS = {WITH_SINKS: "With sinks", WITHOUT_SINKS: "Without sinks"}


@dataclass(frozen=True)
class View:
    """The results of one way to treat attention sinks."""

    folder: str
    results: Results

    @property
    def label(self) -> str:
        """What the page calls this view."""
        return LABELS[self.folder]

    @property
    def suffix(self) -> str:
        """What the names of this view's figures end in."""
        return self.folder.removeprefix(WITH_SINKS)


@dataclass(frozen=True)
class Run:
    """A run as the report reads it: its manifest, the views it has results for, and what else lies there."""

    name: str
    manifest: Mapping[str, Any]
    views: tuple[View, ...]
    trajectory_files: frozenset[str]

    def having(self, *tables: str) -> Iterator[tuple[View, tuple[pa.Table, ...]]]:
        """Yield the views that have all these tables, not empty, with the tables."""
        for view in self.views:
            if all(name in view.results and view.results[name].num_rows for name in tables):
                yield view, tuple(view.results[name] for name in tables)


@dataclass(frozen=True)
class Cell:
    """A number or a word in a table; ``strong`` marks the best of its row, ``tone`` is good, bad or empty."""

    text: str
    strong: bool = False
    tone: str = ""


@dataclass(frozen=True)
class Header:
    """A column header over one or more columns."""

    text: str
    columns: int = 1
    rows: int = 1


@dataclass(frozen=True)
class Line:
    """A table row: its header and its cells. A ``summary`` line stands apart at the foot."""

    header: str
    cells: tuple[Cell, ...]
    summary: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: caption, header rows (the first header is the row headers' own), lines. Cells are numbers or words."""

    caption: str
    head: tuple[tuple[Header, ...], ...]
    lines: tuple[Line, ...]
    words: bool = False

    @property
    def group_starts(self) -> frozenset[int]:
        """Columns, numbered from 1 after the row headers, at which a group under one header begins."""
        return _starts(self.head[0][1:])

    @property
    def subhead_starts(self) -> frozenset[int]:
        """The same columns counted in the second header row, where only groups have cells."""
        return _starts(tuple(header for header in self.head[0][1:] if header.columns > 1))


@dataclass(frozen=True)
class Plate:
    """A figure: file name without suffix, what it shows in words (``alt``), and its caption."""

    name: str
    figure: Figure
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Pair:
    """The same block for each view, side by side where the page is wide enough."""

    sides: tuple[tuple[str, "Grid | Plate"], ...]
    caption: str = ""


@dataclass(frozen=True)
class Stack:
    """The same wide figure for each view, one below the other."""

    sides: tuple[tuple[str, Plate], ...]
    caption: str = ""


@dataclass(frozen=True)
class Row:
    """Small tables that may stand beside one another."""

    grids: tuple[Grid, ...]


@dataclass(frozen=True)
class Facts:
    """Names and values, in groups."""

    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


Block: TypeAlias = Grid | Row | Pair | Stack | Facts


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    anchor: str
    title: str
    intro: str
    blocks: tuple[Block, ...]

    @property
    def short(self) -> str:
        """The title as the page's list of sections shows it."""
        return self.title.partition(":")[0]


def cells(*shown: str) -> tuple[Cell, ...]:
    """Wrap plain texts as cells."""
    return tuple(Cell(text) for text in shown)


def _starts(headers: tuple[Header, ...]) -> frozenset[int]:
    starts, column = set(), 1
    for header in headers:
        if header.columns > 1:
            starts.add(column)
        column += header.columns
    return frozenset(starts)
