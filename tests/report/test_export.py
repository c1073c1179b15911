import io
import re
import xml.etree.ElementTree as ET

import matplotlib
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from PIL import Image
from tests.report.html_page import parse
from tests.report.synthetic import HOSTILE

from layerflow.report import figures
from layerflow.report.figures.clouds import drawable
from layerflow.report.figures.export import inline, png, svg
from layerflow.report.figures.style import PALETTE, styled
from layerflow.report.text import visible


@styled
def _labelled(text: str) -> Figure:
    figure = Figure(figsize=(2, 2))
    ax = figure.subplots()
    ax.scatter([0, 1], [0, 1], rasterized=True)
    ax.plot([0, 1], [1, 0], color=PALETTE["km"])
    ax.set_title(text)
    return figure


def test_files_are_reproducible(results: dict[str, pa.Table]) -> None:
    first, second = (figures.cloud(results["figure_cloud"]) for _ in range(2))
    assert svg(first) == svg(second)
    assert png(first) == png(second)
    assert b"<dc:date>" not in svg(first)


def test_png_is_a_picture_with_something_on_it() -> None:
    picture = Image.open(io.BytesIO(png(_labelled("title"))))
    assert picture.format == "PNG"
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 10


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    label = drawable(visible(text))
    document = svg(_labelled(label))
    titles = [element.text or "" for element in ET.fromstring(document).iter("{http://www.w3.org/2000/svg}text")]
    # Matplotlib writes no element for a blank title.
    assert label in titles or not label.strip()
    page = parse(str(inline(document, name="figure", alt=label)))
    (picture,) = page.all("svg")
    assert picture.attributes["aria-label"] == label
    assert not [element for element in picture.walk() if element.tag in ("script", "img", "style", "a")]


def test_inline_figure_shares_nothing_with_another() -> None:
    document = svg(_labelled("title"))
    pages = [parse(str(inline(document, name=name, alt="x"))) for name in ("one", "two")]
    ids = [{element.attributes["id"] for element in page.walk() if "id" in element.attributes} for page in pages]
    assert ids[0]
    assert not ids[0] & ids[1]
    for page, known in zip(pages, ids, strict=True):
        used = set(re.findall(r"#([\w-]+)", " ".join(str(element.attributes) for element in page.walk())))
        assert used == known


def test_inline_figure_follows_the_theme() -> None:
    markup = str(inline(svg(_labelled("title")), name="figure", alt="x"))
    assert "var(--km)" in markup
    assert "#ffffff" not in markup
    assert PALETTE["ink"] not in markup
    assert "http" not in markup.replace("data:", "")


def test_user_settings_neither_reach_the_figure_nor_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = svg(_labelled("$5"))
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 31.0)
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    before = dict(matplotlib.rcParams)
    assert svg(_labelled("$5")) == plain
    assert dict(matplotlib.rcParams) == before
