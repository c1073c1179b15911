"""What drives the flow: the gradient of its log-density, a potential, circulation."""

from collections.abc import Callable

import pyarrow as pa

from layerflow.report import figures
from layerflow.report.blocks import Block, Grid, Header, Line, Row, Run, Section, cells
from layerflow.report.layout import Views, at_working_width, by_width, panels
from layerflow.report.query import where
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
        "lies along the gradient; a diffusion matrix is fitted on training tokens and scored on the others.",
        tuple(blocks),
    )


def potential(run: Run) -> Section | None:
    """Lay out figure 3 and the shares by width."""
    views = list(run.having("potential"))
    if not views:
        return None
    alt = "Potential, rotational and symmetric share by transition, with the symmetric share of shuffled steps."
    caption = "Figure 3. Shares of the fitted drift by depth."
    return Section(
        "figure-3",
        "Figure 3: potential and circulation",
        "The potential share is what the best cubic potential explains of what the unconstrained quadratic field "
        "explains; the rotational share is the rest, and “recovered” the part of it that an antisymmetric linear "
        "part brings back. The symmetric share is that of the affine map’s matrix.",
        (
            panels(views, "figure-3-potential", at_working_width(figures.potential), alt=alt, caption=caption),
            by_width(
                "Shares over transitions, smallest to largest",
                views,
                ("potential", "rotation", "recovered", "symmetric", "shuffled"),
                _share_texts,
            ),
        ),
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
    recovered = [
        (row["r2_potential_antisymmetric"] - row["r2_potential"]) / (row["r2_quadratic"] - row["r2_potential"])
        for row in rows.to_pylist()
        if row["r2_quadratic"] > row["r2_potential"]
    ]
    return [
        span(rows["potential_share"].to_pylist()),
        span(rows["rotational_share"].to_pylist()),
        span(recovered),
        span(rows["symmetric_share"].to_pylist()),
        span(rows["symmetric_share_shuffled"].to_pylist()),
    ]


def _calibration(views: Views) -> Row:
    head = (
        tuple(
            Header(text)
            for text in ("drift ÷ noise", "translated", "direction agreement", "alignment", "energy along g")
        ),
    )
    grids = []
    for view, (table,) in views:
        lines = tuple(
            Line(
                number(row["drift_to_noise"], 1),
                cells(
                    "yes" if row["translated"] else "no",
                    number(row["direction_agreement"]),
                    number(row["alignment"]),
                    number(row["energy_share"]),
                ),
            )
            for row in table.to_pylist()
        )
        grids.append(Grid(f"Calibration of the control, {view.label.lower()}", head, lines))
    return Row(tuple(grids))
