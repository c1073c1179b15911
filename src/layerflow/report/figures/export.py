"""Figures as bytes: reproducible SVG and PNG files, and SVG to stand inside an HTML page."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from layerflow.report.figures.style import DPI, GROUND, PALETTE, styled

_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"
_ROLE_OF_COLOUR = {colour: role for role, colour in PALETTE.items()}
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r'(?:href="|url\()#([^")]+)')
_FONT_FAMILY = re.compile(r" ?font-family:[^;]*;")
_GEOMETRY = {"d", "x", "y", "width", "height", "transform", "points"}
_DROPPED = {f"{_SVG}metadata", f"{_SVG}style", f"{_SVG}title"}


@styled
def svg(figure: Figure) -> bytes:
    """Draw a figure as an SVG file, the same bytes for the same figure (no date, fixed ids)."""
    buffer = io.BytesIO()
    _settle(figure)
    FigureCanvasSVG(figure)
    figure.savefig(buffer, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@styled
def png(figure: Figure) -> bytes:
    """Draw a figure as a PNG file on white."""
    buffer = io.BytesIO()
    _settle(figure)
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": "layerflow"})
    return buffer.getvalue()


def inline(document: bytes, *, name: str, alt: str) -> Markup:
    """Rewrite an SVG file so that it can stand in an HTML page, beside others.

    Ids get the figure's name in front, so that no two figures share one; colours of the palette become CSS variables
    (``var(--ink)``) and the white ground goes, so that the figure follows the page's theme; coordinates are rounded to
    a hundredth of a point. Text is escaped by the XML writer: whatever a token holds stays text.

    Args:
        document: What `svg` returned.
        name: Prefix of the ids, unique in the page.
        alt: What the figure shows, for those who cannot see it.
    """
    root = ET.fromstring(document)
    view_box = root.attrib["viewBox"]
    referenced = set(_REFERENCE.findall(document.decode()))
    for parent in root.iter():
        for child in [child for child in parent if child.tag in _DROPPED]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib = dict(_rewritten(element.attrib, name, referenced))
        element.tail = None
    root.attrib = {"viewBox": view_box, "role": "img", "aria-label": alt}
    return Markup(ET.tostring(root, encoding="unicode"))


def _settle(figure: Figure) -> None:
    """Lay the figure out once, not again for each file."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def _rewritten(attributes: dict[str, str], name: str, referenced: set[str]) -> Iterator[tuple[str, str]]:
    for key, value in attributes.items():
        if key == "id":
            if value in referenced:
                yield "id", f"{name}-{value}"
        elif key == f"{_XLINK}href":
            yield "href", value.replace("#", f"#{name}-", 1) if value.startswith("#") else "".join(value.split())
        elif key == "style":
            themed = _COLOUR.sub(_variable, _FONT_FAMILY.sub("", value))
            yield "style", themed.replace("url(#", f"url(#{name}-")
        elif key == "clip-path":
            yield "clip-path", value.replace("url(#", f"url(#{name}-")
        else:
            yield key, _rounded(value) if key in _GEOMETRY else value


def _variable(colour: re.Match[str]) -> str:
    if colour[0] == GROUND:
        return "none"
    role = _ROLE_OF_COLOUR.get(colour[0])
    return f"var(--{role})" if role else colour[0]


def _rounded(geometry: str) -> str:
    return _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", geometry).replace(" \n", " ")
