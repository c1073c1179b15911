import math
import unicodedata
import xml.etree.ElementTree as ET

import pyarrow as pa
import pytest
from tests.report.synthetic import HOSTILE

from layerflow.report.text import compact, median, number, span, texts, token_label, visible


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800", "a\udfffb", "\U000e0001", "\ue000"])
def test_visible_text_can_stand_anywhere(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    element = ET.Element("text")
    element.text = shown
    assert ET.fromstring(ET.tostring(element)).text in (shown, None if shown == "" else shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x00", r"\x00"),
        ("a\nb", r"a\nb"),
        ("\u202eevil", r"\u202eevil"),
        ("\ud800", r"\ud800"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("שלום 中文 🚀 <&>\"'", "שלום 中文 🚀 <&>\"'"),
        ("", ""),
    ],
)
def test_visible_escapes_the_invisible_only(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "label"),
    [(" the", "␣the"), ("the", "the"), ("   ", "␣␣␣"), ("", ""), ("  a ", "␣␣a␣"), ("x" * 99, "x" * 13 + "…")],
)
def test_token_label(text: str, label: str) -> None:
    assert token_label(text) == label


def test_texts_survive_bytes_that_are_not_utf8() -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff\xfe", b"ok"], pa.binary()).buffers())
    assert texts(pa.chunked_array([bad, pa.array([None, "é"])])) == [r"\xff\xfe", "ok", "", "é"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
        (-0.0004, "0.000"),
        (-1.23456, "−1.235"),
        (1234.5, "1,234.500"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_signed_number() -> None:
    assert [number(value, 2, signed=True) for value in (0.5, -0.5, 0.0)] == ["+0.50", "−0.50", "0.00"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (3.14159, "3.14"),
        (31.4159, "31.4"),
        (99_999.4, "99,999"),
        (2.5e7, "2.5·10⁷"),
        (1e-5, "10⁻⁵"),
    ],
)
def test_compact(value: float, shown: str) -> None:
    assert compact(value) == shown


def test_span_and_median_skip_what_is_not_there() -> None:
    assert span([0.5, None, -0.25]) == "−0.25 to 0.50"
    assert span([None]) == "–"
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([]) is None
