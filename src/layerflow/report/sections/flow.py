"""What drives the flow: the gradient of its log-density, a potential, circulation."""

from collections.abc import Callable
from statistics import mean

import pyarrow as pa

from layerflow.query import where
from layerflow.report import figures
from layerflow.report.blocks import Block, Cell, Grid, Line, Row, Run, Section, cells
from layerflow.report.layout import Views, at_working_width, by_width, paired_head, panels
from layerflow.report.text import median, number, span


def gradient(run: Run) -> Section | None:
    """Lay out whether steps follow the density's gradient: gaps, energy, fitted diffusion, calibration."""
    views = list(run.having("gradient"))
    if not views:
        return None
    alt = "Alignment gap between steps and the density gradient by transition, for the flow and for its control."
    caption = (
        "Alignment gap with its 95 % interval: mean cosine of a token’s step with the density gradient, minus the "
        "same with gradients shuffled over tokens. The control’s drift is the gradient by construction."
    )
    blocks: list[Block] = [
        panels(views, "panel-alignment", at_working_width(figures.alignment), alt=alt, caption=caption),
        Row(
            (
                by_width("Alignment gap over transitions", views, ("mean", "range", "control, range"), _gap_texts),
                by_width("Step energy along the gradient, range", views, ("flow", "control"), _energy_texts),
            )
        ),
    ]
    diffusion = list(run.having("gradient_diffusion"))
    if diffusion:
        columns = ("flow", "shuffled", "control", "shuffled")
        grids = (
            by_width(f"Best diffusion matrix, {name}: median R²", diffusion, columns, _diffusion_texts(constraint))
            for constraint, name in (("free", "unconstrained"), ("psd", "positive semidefinite"))
        )
        blocks.append(Row(tuple(grids)))
    calibration = list(run.having("gradient_calibration"))
    if calibration:
        blocks.append(_calibration(calibration))
    return Section(
        "gradient",
        "Is the drift the gradient of the log-density?",
        "The direction of the density’s gradient is estimated at every token from its nearest neighbours and held "
        "against the token’s own step. The control is an Ornstein–Uhlenbeck process of the same mean and covariance, "
        "pushed through the same code. By chance, one part in as many as there are components of a step’s energy "
        "lies along the gradient; a diffusion matrix is fitted on training tokens and scored on the others, "
        "without an intercept, so that R² is below zero where all tokens share a step. “Translated” is the alignment "
        "when a step shared by all tokens is added to the control.",
        tuple(blocks),
    )


def potential(run: Run) -> Section | None:
    """Lay out figure 3, the shares by width, and what the potential goes with."""
    views = list(run.having("potential"))
    if not views:
        return None
    alt = "Potential, rotational and symmetric share by transition, with the symmetric share of shuffled steps."
    caption = "Figure 3. Shares of the fitted drift by depth."
    blocks: list[Block] = [
        panels(views, "figure-3-potential", at_working_width(figures.potential), alt=alt, caption=caption),
        by_width(
            "Shares over transitions, smallest to largest",
            views,
            ("potential", "rotation", "symmetric", "shuffled"),
            _share_texts,
        ),
        by_width(
            "Held-out R², median over transitions",
            views,
            ("affine", "potential", "+ antisymmetric", "quadratic"),
            _fit_texts,
        ),
    ]
    correlates = list(run.having("potential_correlates"))
    if correlates:
        blocks.append(_correlates(correlates))
    return Section(
        "figure-3",
        "Figure 3: potential and circulation",
        "The potential share is what the best cubic potential explains of what the unconstrained quadratic field "
        "explains; the rotational share is the rest. An antisymmetric linear part added to the potential shows how "
        "much of that rest is linear rotation. The symmetric share is that of the affine map’s matrix.",
        tuple(blocks),
    )


def _gap_texts(rows: pa.Table) -> list[str]:
    flow = where(rows, subject="flow")["gap"].to_pylist()
    control = where(rows, subject="control")["gap"].to_pylist()
    known = [gap for gap in flow if gap is not None]
    return [number(sum(known) / len(known) if known else None), span(flow, 3), span(control)]


def _energy_texts(rows: pa.Table) -> list[str]:
    return [span(where(rows, subject=subject)["energy_share"].to_pylist()) for subject in ("flow", "control")]


def _diffusion_texts(constraint: str) -> Callable[[pa.Table], list[str]]:
    def texts(rows: pa.Table) -> list[str]:
        fitted = where(rows, constraint=constraint)
        return [
            number(median(where(fitted, subject=subject)[column].to_pylist()))
            for subject in ("flow", "control")
            for column in ("r2", "r2_shuffled")
        ]

    return texts


def _share_texts(rows: pa.Table) -> list[str]:
    shares = ("potential_share", "rotational_share", "symmetric_share", "symmetric_share_shuffled")
    return [span(rows[share].to_pylist()) for share in shares]


def _fit_texts(rows: pa.Table) -> list[str]:
    fits = ("r2_affine", "r2_potential", "r2_potential_antisymmetric", "r2_quadratic")
    return [number(median(rows[fit].to_pylist())) for fit in fits]


def _correlates(views: Views) -> Grid:
    """Lay out what the potential's values go with; the strongest, by mean size over transitions, in bold."""
    quantities = list(dict.fromkeys(name for _, (table,) in views for name in table["quantity"].to_pylist()))
    values = [
        {
            name: [rho for rho in where(table, quantity=name)["spearman"].to_pylist() if rho is not None]
            for name in quantities
        }
        for _, (table,) in views
    ]
    strongest = [
        max((name for name in quantities if view[name]), key=lambda name: mean(map(abs, view[name])), default=None)
        for view in values
    ]
    lines = [
        Line(
            name.replace("_", " "),
            tuple(
                Cell(text, strong=name == best and bool(view[name]))
                for view, best in zip(values, strongest, strict=True)
                for text in (number(median(view[name]), 2), span(view[name]))
            ),
        )
        for name in quantities
    ]
    caption = "Rank correlation of the potential’s values with other quantities, over tokens"
    return Grid(caption, paired_head("quantity", views, ("median", "range")), tuple(lines))


def _calibration(views: Views) -> Grid:
    """Lay out the sweep: a line a ratio, the plain control beside the translated one."""
    found = [{(row["drift_to_noise"], row["translated"]): row for row in table.to_pylist()} for _, (table,) in views]
    lines = []
    for ratio in sorted({ratio for rows in found for ratio, _ in rows}):
        shown: list[str] = []
        for rows in found:
            plain, translated = (rows.get((ratio, moved), {}) for moved in (False, True))
            shown += [number(plain.get(key)) for key in ("direction_agreement", "alignment", "energy_share")]
            shown.append(number(translated.get("alignment")))
        lines.append(Line(number(ratio, 1), cells(*shown)))
    columns = ("agreement", "alignment", "energy", "translated")
    return Grid(
        "Calibration: what the instrument reads on the control, by its ratio of drift to noise",
        paired_head("drift ÷ noise", views, columns),
        tuple(lines),
    )
