"""Figures and the page: draw and lay out what was computed."""

from layerflow.report import figures
from layerflow.report.page import ReportFiles, write

__all__ = ["ReportFiles", "figures", "write"]
