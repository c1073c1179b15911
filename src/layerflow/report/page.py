"""The report: figures and one offline page, read from a run directory and written into it."""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from layerflow import tables
from layerflow.data.storage import read_manifest, replacing
from layerflow.errors import InputError
from layerflow.report.blocks import Pair, Plate, Run, Section, Stack, View
from layerflow.report.figures.export import inline, png, svg
from layerflow.report.sections import contents, fate, flow, laws, provenance, states, summary
from layerflow.report.text import visible
from layerflow.tables import WITH_SINKS, WITHOUT_SINKS

PAGE = "report.html"
FIGURES = "figures"

SECTIONS: tuple[Callable[[Run], Section | None], ...] = (
    summary.headline,
    provenance.what_was_run,
    summary.noise_floor,
    fate.claims,
    states.cloud,
    laws.table_1,
    laws.drift_fields,
    laws.table_2,
    laws.every_law,
    laws.locality,
    flow.gradient,
    flow.potential,
    fate.conserved,
    fate.rollout,
    fate.affinity,
    states.retained,
    states.norms,
    laws.diagnostics,
)


@dataclass(frozen=True)
class ReportFiles:
    """What `write` wrote: the page, and the figures' SVG and PNG files in the page's order."""

    page: Path
    figures: tuple[Path, ...]


def write(run_dir: str | Path) -> ReportFiles:
    """Draw a run's figures and lay out its page, ``report.html``, from what the analysis left there.

    The page needs nothing beside itself: figures and style stand in it, it holds no script and asks for nothing from
    anywhere. A section whose tables are missing is left out and listed with the reason. The same run gives the same
    bytes. Each file appears whole or not at all.

    Args:
        run_dir: Run directory, with ``manifest.json`` and ``results/`` or ``results-without-sinks/``.

    Raises:
        InputError: No run, or one that has not been analysed.
    """
    run_dir = Path(run_dir)
    run = read(run_dir)
    sections = [section for make in SECTIONS if (section := make(run)) is not None]
    folder = run_dir / FIGURES
    folder.mkdir(exist_ok=True)
    documents: dict[str, bytes] = {}
    for plate in _plates(sections):
        documents[plate.name] = svg(plate.figure)
        for suffix, content in (("svg", documents[plate.name]), ("png", png(plate.figure))):
            with replacing(folder / f"{plate.name}.{suffix}") as file:
                file.write(content)
    with replacing(run_dir / PAGE) as file:
        file.write(render(run, sections, documents).encode())
    paths = tuple(folder / f"{name}.{suffix}" for name in documents for suffix in ("svg", "png"))
    return ReportFiles(run_dir / PAGE, paths)


def read(run_dir: Path) -> Run:
    """Read what the report is made from.

    Raises:
        InputError: No run, or one that has not been analysed.
    """
    manifest = read_manifest(run_dir)
    views = tuple(
        View(folder, results) for folder in (WITH_SINKS, WITHOUT_SINKS) if (results := tables.read(run_dir / folder))
    )
    if not views:
        raise InputError(f"{run_dir} has no results to report; run `layerflow analyse {run_dir}` first")
    collected = frozenset(path.name for path in (run_dir / "trajectories").glob("*"))
    return Run(str(run_dir), manifest, views, collected)


def render(run: Run, sections: list[Section], documents: Mapping[str, bytes]) -> str:
    """Lay out the page as HTML.

    Args:
        run: The run.
        sections: Its sections, in order.
        documents: Each plate's SVG file, by name.
    """
    environment = Environment(
        loader=PackageLoader("layerflow.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["address"] = quote
    environment.globals["inline"] = lambda plate: inline(documents[plate.name], name=plate.name, alt=visible(plate.alt))
    style = PackageLoader("layerflow.report").get_source(environment, "style.css")[0]
    return environment.get_template("page.html.jinja").render(
        title=provenance.title(run.manifest),
        subtitle=provenance.subtitle(run),
        lead=summary.lead(run),
        notices=provenance.notices(run),
        tiles=summary.tiles(run),
        sections=sections,
        missing=contents.missing(run),
        files=contents.files(run),
        figures=list(documents),
        style=Markup(style),  # ours, and a style element knows no entities
        version=importlib.metadata.version("layerflow"),
    )


def _plates(sections: list[Section]) -> list[Plate]:
    blocks = [block for section in sections for block in section.blocks if isinstance(block, (Pair, Stack))]
    return [side for block in blocks for _, side in block.sides if isinstance(side, Plate)]


def _shown(value: Any) -> Any:
    """Make every string the template prints visible text; markup made here passes."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
