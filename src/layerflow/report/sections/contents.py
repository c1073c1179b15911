"""What this run cannot show, and where its tables lie."""

from dataclasses import dataclass

from layerflow.report.blocks import LABELS, Run
from layerflow.tables import WITHOUT_SINKS

EXPECTED = {
    "law_scores": "Tables 1 and 2, the contests",
    "law_scores_equal_budget": "Table 2 at an equal budget",
    "law_contests": "Intervals of the contests",
    "law_diagnostics": "What the fits report",
    "locality": "How local Kramers–Moyal is",
    "basis": "What the reduced state keeps",
    "noise_floor": "The noise floor",
    "norms": "Norms and attention sinks",
    "figure_cloud": "Figure 1",
    "figure_fields": "Figure 2",
    "gradient": "The gradient of the log-density",
    "gradient_calibration": "The calibration of its control",
    "gradient_diffusion": "The fitted diffusion matrix",
    "potential": "Figure 3, potential and circulation",
    "potential_correlates": "What the potential goes with",
    "conserved": "What the flow conserves",
    "rollout": "Generated trajectories",
    "affinity": "The non-affine share at full width",
    "affinity_corrected": "The non-affine share without sampling noise",
    "claims": "The paper’s claims",
}


@dataclass(frozen=True)
class Missing:
    """A table that is not there: what it would show, in which view, and why not."""

    table: str
    shows: str
    where: str
    reason: str


@dataclass(frozen=True)
class TableFiles:
    """One result table's files, relative to the page."""

    name: str
    n_rows: int
    parquet: str
    csv: str


def missing(run: Run) -> list[Missing]:
    """List what the page does not show and why."""
    found = []
    for table, shows in EXPECTED.items():
        lacking = [view for view in run.views if table not in view.results or not view.results[table].num_rows]
        if lacking and not (table == "claims" and len(lacking) < len(run.views)):
            place = "in either view" if len(lacking) == len(run.views) > 1 else lacking[0].label.lower()
            found.append(Missing(table, shows, place, _reason(run, table, lacking[0].folder)))
    if all(view.folder != WITHOUT_SINKS for view in run.views):
        reason = (
            "no sums over sink positions were kept when these trajectories were made"
            if "sinks.safetensors" not in run.trajectory_files
            else f"run `layerflow analyse {run.name}` again"
        )
        found.append(
            Missing(WITHOUT_SINKS, "Every number without attention sinks", LABELS[WITHOUT_SINKS].lower(), reason)
        )
    return found


def files(run: Run) -> list[tuple[str, list[TableFiles]]]:
    """List every table of every view with the relative addresses of its files."""
    return [
        (
            view.label,
            [
                TableFiles(name, table.num_rows, f"{view.folder}/{name}.parquet", f"{view.folder}/{name}.csv")
                for name, table in sorted(view.results.items())
            ],
        )
        for view in run.views
    ]


def _reason(run: Run, table: str, folder: str) -> str:
    """Say why a table is not there: what the collection did not keep, however often the run is analysed."""
    if table == "noise_floor" and "halves.safetensors" not in run.trajectory_files:
        return "the run keeps no split halves of the final state"
    if table == "norms" and "samples.safetensors" not in run.trajectory_files and not run.manifest.get("norms"):
        return "the run keeps neither norms nor samples of single positions"
    return f"there is no {folder}/{table}.parquet with rows in it; `layerflow analyse {run.name}` writes what it can"
