from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from tests.report.html_page import Page, parse
from tests.report.synthetic import make_results, write_run

from layerflow import report


@dataclass(frozen=True)
class Written:
    """A run whose report was written once for all tests that only read it."""

    run: Path
    results: dict[str, pa.Table]
    without_sinks: dict[str, pa.Table]
    files: report.ReportFiles
    html: str
    page: Page


def write_and_parse(run: Path, results: dict[str, pa.Table], without_sinks: dict[str, pa.Table]) -> Written:
    files = report.write(run)
    html = files.page.read_text(encoding="utf-8")
    return Written(run, results, without_sinks, files, html, parse(html))


@pytest.fixture(scope="session")
def results() -> dict[str, pa.Table]:
    return make_results()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, results: dict[str, pa.Table]) -> Written:
    """A complete run with hostile tokens, both views."""
    without_sinks = make_results(1)
    run = write_run(tmp_path_factory.mktemp("runs") / "complete", results, without_sinks)
    return write_and_parse(run, results, without_sinks)


@pytest.fixture
def write_page(tmp_path: Path) -> Callable[..., Written]:
    """Write a run of some results and its report."""

    def write(
        results: dict[str, pa.Table],
        without_sinks: dict[str, pa.Table] | None = None,
        manifest: dict[str, object] | None = None,
    ) -> Written:
        run = write_run(tmp_path / "run", results, without_sinks, manifest)
        return write_and_parse(run, results, without_sinks or {})

    return write
