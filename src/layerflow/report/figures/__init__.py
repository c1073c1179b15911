"""Figures: each a pure function from a result table to a matplotlib figure, drawn without pyplot."""

from layerflow.report.figures.clouds import cloud
from layerflow.report.figures.depth import (
    alignment,
    contests,
    laws,
    norms,
    potential,
    ranks,
    retained,
    rollout,
)
from layerflow.report.figures.drift_fields import fields
from layerflow.report.figures.reach import locality

__all__ = [
    "alignment",
    "cloud",
    "contests",
    "fields",
    "laws",
    "locality",
    "norms",
    "potential",
    "ranks",
    "retained",
    "rollout",
]
