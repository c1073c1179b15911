import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.report.conftest import Written
from tests.report.html_page import Element
from tests.report.synthetic import HOSTILE, make_results, write_run

from layerflow import report
from layerflow.errors import InputError
from layerflow.query import where
from layerflow.report import page as page_module
from layerflow.report.sections.contents import EXPECTED

MIB = 1 << 20
COMPLETE = {
    "headline",
    "run",
    "noise-floor",
    "claims",
    "figure-1",
    "table-1",
    "figure-2",
    "table-2",
    "every-law",
    "locality",
    "gradient",
    "figure-3",
    "conserved",
    "rollout",
    "affinity",
    "basis",
    "norms",
    "diagnostics",
    "missing",
    "files",
}


def _value(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").removesuffix(" %"))


def _sections(page: Element) -> set[str]:
    return {str(section.attributes["id"]) for section in page.all("section")}


def _mean(scores: pa.Table, column: str, **equal: Any) -> float:
    return float(pc.mean(where(scores, **equal)[column]).as_py())


def test_a_complete_run_has_every_section(written: Written) -> None:
    assert _sections(written.page) == COMPLETE
    assert "Nothing is missing" in written.page.by_id("missing").text


def test_the_page_asks_for_nothing_from_outside(written: Written) -> None:
    assert not re.search(r"""(?i)https?:|["'(=]\s*//|@import|javascript:""", written.html)
    allowed = {
        "script": False,
        "link": False,
        "iframe": False,
        "object": False,
        "embed": False,
        "base": False,
        "form": False,
    }
    assert not [element.tag for element in written.page.walk() if element.tag in allowed]
    for element in written.page.walk():
        assert not [name for name in element.attributes if name.startswith("on")]
        for name in ("src", "href"):
            address = element.attributes.get(name) or ""
            assert address.startswith(("#", "data:image/png;base64,", "results", "figures/")) or not address
    (policy,) = (m.attributes["content"] for m in written.page.all("meta") if "http-equiv" in m.attributes)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_every_link_leads_somewhere(written: Written) -> None:
    ids = [str(element.attributes["id"]) for element in written.page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    links = [str(link.attributes["href"]) for link in written.page.all("a")]
    for link in links:
        assert link[1:] in ids if link.startswith("#") else (written.run / link).is_file()
    for folder in ("results", "results-without-sinks"):
        for path in (written.run / folder).iterdir():
            assert f"{folder}/{path.name}" in links


def test_every_figure_says_what_it_shows(written: Written) -> None:
    pictures = written.page.all("svg")
    assert len(pictures) == len(written.files.figures) / 2 == 22
    alts = [str(picture.attributes["aria-label"]) for picture in pictures]
    assert len(set(alts)) == len(alts)
    assert all(picture.attributes["role"] == "img" for picture in pictures)
    assert all(len(alt) > 40 for alt in alts)


def test_tables_are_read_aloud_right(written: Written) -> None:
    assert written.page.all("html")[0].attributes["lang"] == "en"
    for table in written.page.all("table"):
        assert table.all("caption")[0].text
        assert all(header.attributes["scope"] in ("col", "colgroup", "row") for header in table.all("th"))
        widths = {
            sum(int(cell.attributes.get("colspan") or 1) for cell in row.children if isinstance(cell, Element))
            for row in table.all("tbody")[0].all("tr")
        }
        first = sum(
            int(header.attributes.get("colspan") or 1) for header in table.all("thead")[0].all("tr")[0].all("th")
        )
        assert widths == {first}


@pytest.mark.parametrize(("label", "view"), [("with sinks", "results"), ("without sinks", "without_sinks")])
def test_table_1_shows_the_scores(written: Written, label: str, view: str) -> None:
    scores = getattr(written, view)["law_scores"]
    laws = [
        ("km", "local_diagonal"),
        ("km", "local_full"),
        ("null_a", "diagonal"),
        ("null_b", "diagonal"),
        ("null_c", "full"),
        ("affine", "diagonal"),
        ("affine", "full"),
    ]
    columns: list[list[float]] = [[] for _ in range(9)]
    table = written.page.table(f"Table 1, {label}")
    *rows, summary = table.rows()
    assert [row[0] for row in rows] == [f"{transition} → {transition + 1}" for transition in range(6)]
    for transition, row in enumerate(rows):
        at = {"n_components": 16, "transition": transition}
        expected = [_mean(scores, "log_likelihood", law=law, noise=noise, **at) for law, noise in laws]
        expected += [_mean(scores, "r2", law=law, **at) for law in ("km", "affine")]
        for column, value in zip(columns, expected, strict=True):
            column.append(value)
        assert [_value(text) for text in row[1:8]] == pytest.approx(expected[:7], abs=0.0051)
        assert [_value(text) for text in row[8:]] == pytest.approx(expected[7:], abs=0.00051)
    assert [_value(text) for text in summary[1:]] == pytest.approx([median(column) for column in columns], abs=0.0051)


def test_table_1_prints_the_best_of_each_row_in_bold(written: Written) -> None:
    table = written.page.table("Table 1, with sinks")
    for row in table.all("tbody")[0].all("tr")[:-1]:
        cells = row.all("td")
        for group in (cells[:7], cells[7:]):
            bold = [cell for cell in group if cell.all("strong")]
            assert {cell.text for cell in bold} == {max((cell.text for cell in group), key=_value)}


@pytest.mark.parametrize(
    ("caption", "name", "columns"),
    [("All training tokens", "law_scores", 4), ("Equal budget: 200 training tokens", "law_scores_equal_budget", 3)],
)
def test_table_2_shows_wins_and_medians_by_width(written: Written, caption: str, name: str, columns: int) -> None:
    rows = written.page.table(caption).rows()
    assert [row[0] for row in rows] == ["8", "16", "32"]
    for row in rows:
        for start, results in ((1, written.results), (1 + columns, written.without_sinks)):
            at = {"n_components": int(row[0])}
            means = {
                law: [_mean(results[name], "r2", law=law, transition=t, **at) for t in range(6)]
                for law in ("quadratic", "affine")
            }
            wins = int(np.sum(np.subtract(means["quadratic"], means["affine"]) > 0))
            assert row[start] == f"{wins}/6"
            shown = [_value(text) for text in row[start + 1 : start + 3]]
            assert shown == pytest.approx([median(means["quadratic"]), median(means["affine"])], abs=0.00051)


def test_the_headline_counts_what_the_tables_hold(written: Written) -> None:
    rows = {row[0]: row[1:] for row in written.page.table("Contests between laws").rows()}
    contests = where(
        written.results["law_contests"], law="km", opponent="affine", metric="log_likelihood", n_components=16
    )
    contests = where(contests, noise="local_full")
    differences = [_mean(contests, "difference", transition=transition) for transition in range(6)]
    clear = sum(pc.min(where(contests, transition=transition)["low"]).as_py() > 0 for transition in range(6))
    won, clearly, _, margin = rows["KM over affine, both full (nats)"][:4]
    assert won == f"{sum(difference > 0 for difference in differences)}/6"
    assert clearly == str(clear)
    assert _value(margin) == pytest.approx(median(differences), abs=0.0051)
    lead = next(p.text for p in written.page.all("p") if p.attributes.get("class") == "lead")
    assert f"at {rows['Quadratic over affine (R²)'][0].replace('/', ' of ')} transitions with sinks" in lead
    assert "transitions without sinks" in lead


def test_noise_floor_norms_and_basis_are_those_of_the_tables(written: Written) -> None:
    rows = written.page.table("Noise floor by frequency").rows()
    assert rows[0] == ["exactly 5", "900", "0.401", "900", "0.401", "0.40"]
    assert [row[0] for row in rows] == ["exactly 5", "10 to 100", "1,001 or more"]
    norm = written.page.table("Norms by state").rows()[3]
    expected = written.results["norms"].to_pylist()[3]
    assert _value(norm[1]) == pytest.approx(expected["median"], rel=0.006)
    assert norm[4] == f"{expected['n_sinks']:,}"
    kept = written.page.table("Pooled variance kept").rows()
    assert [_value(row[1]) for row in kept] == [80.0, 85.0, 90.0]


def test_locality_stands_beside_wins_for_every_k_and_width(written: Written) -> None:
    rows = written.page.table("Locality of the Kramers–Moyal estimate").rows()
    assert len(rows) == 9
    table = where(written.results["locality"], k=256, n_components=16)
    radii = [_mean(table, "radius_ratio", transition=transition) for transition in range(6)]
    (row,) = (row for row in rows if row[0] == "k = 256, 16 components")
    assert _value(row[1]) == pytest.approx(100 * median(radii), abs=0.051)


def test_claims_say_what_holds(written: Written) -> None:
    rows = written.page.table("Claims").rows()
    assert rows[0] == ["claim 0 <b>&</b>", "12/12", "–", "not tested", "25/30", "holds", "needs halves"]
    assert [row[3] for row in rows] == ["not tested", "holds", "does not", "not tested", "holds"]


def test_the_strongest_correlate_of_the_potential_is_in_bold(written: Written) -> None:
    table = written.page.table("Rank correlation of the potential’s values with other quantities, over tokens")
    rows = table.all("tbody")[0].all("tr")
    assert [row.all("th")[0].text for row in rows if row.all("strong")] == ["norm"]
    (norm,) = (row for row in table.rows() if row[0] == "norm")
    assert _value(norm[1]) == pytest.approx(-0.6 + 0.01 * 2.5, abs=0.0051)


def test_the_calibration_puts_plain_and_translated_side_by_side(written: Written) -> None:
    caption = "Calibration: what the instrument reads on the control, by its ratio of drift to noise"
    rows = written.page.table(caption).rows()
    assert [row[0] for row in rows] == ["0.9", "4.0", "25.0", "106.0"]
    by_key = {(r["drift_to_noise"], r["translated"]): r for r in written.results["gradient_calibration"].to_pylist()}
    for row, ratio in zip(rows, (0.9, 4.0, 25.0, 106.0), strict=True):
        expected = [by_key[ratio, False]["alignment"], by_key[ratio, True]["alignment"]]
        assert [_value(row[2]), _value(row[4])] == pytest.approx(expected, abs=0.00051)


def test_figure_files_are_written_and_are_what_the_page_shows(written: Written) -> None:
    names = [path.name for path in written.files.figures]
    assert names[:4] == [
        "figure-1-cloud.svg",
        "figure-1-cloud.png",
        "figure-1-cloud-without-sinks.svg",
        "figure-1-cloud-without-sinks.png",
    ]
    assert {"figure-2-fields.svg", "figure-3-potential.png", "panel-rollout-without-sinks.svg"} <= set(names)
    assert {path.name for path in (written.run / "figures").iterdir()} == set(names)
    assert {path.name for path in written.run.iterdir()} == {
        "manifest.json",
        "results",
        "results-without-sinks",
        "figures",
        "report.html",
    }


def test_panels_of_both_views_share_a_scale(written: Written) -> None:
    def heights(name: str) -> list[str]:
        text = (written.run / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        return re.findall(r">([−\d.]+)</text>", text)

    assert heights("panel-contests") == heights("panel-contests-without-sinks")


def test_a_page_of_full_size_stays_small(write_page: Callable[..., Written]) -> None:
    sizes = {"n_transitions": 32, "n_tokens": 2000, "widths": (8, 16, 32, 64), "seeds": (0,)}
    written = write_page(make_results(0, **sizes), make_results(1, **sizes))
    assert written.files.page.stat().st_size < 3 * MIB


def test_a_run_of_the_first_tables_only_says_what_it_lacks(write_page: Callable[..., Written]) -> None:
    sizes = {"n_transitions": 2, "n_tokens": 30, "seeds": (0,), "complete": False}
    written = write_page(make_results(0, **sizes), make_results(1, **sizes))
    gone = {"claims", "gradient", "figure-3", "conserved", "rollout", "affinity"}
    assert _sections(written.page) == COMPLETE - gone
    missing = written.page.by_id("missing").text
    assert missing.count("in either view") == 10
    assert "figure 3" in missing.lower()
    assert "layerflow analyse" in missing


@pytest.mark.parametrize("table", sorted(EXPECTED))
def test_any_table_may_be_missing_or_without_rows(write_page: Callable[..., Written], table: str) -> None:
    some = make_results(n_transitions=2, widths=(8,), seeds=(0,), n_tokens=30)
    few = {"basis": some["basis"], "noise_floor": some["noise_floor"], table: some[table].slice(0, 0)}
    page = write_page(few, {"norms": some["norms"]}).page
    assert EXPECTED[table] in page.by_id("missing").text
    assert "norms" in _sections(page)


def test_one_view_alone_is_said(write_page: Callable[..., Written], results: dict[str, pa.Table]) -> None:
    written = write_page({"law_scores": results["law_scores"]})
    assert "One view only" in written.page.text
    assert "no sums over sink positions were kept" in written.page.by_id("missing").text
    assert "Without sinks" not in written.page.by_id("headline").text


def test_runs_without_halves_or_norms_say_why(write_page: Callable[..., Written], results: dict[str, pa.Table]) -> None:
    written = write_page({"law_diagnostics": results["law_diagnostics"]})
    missing = written.page.by_id("missing").text
    assert "keeps no split halves" in missing
    assert "neither norms nor samples" in missing


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"options": {"quick": True, "max_documents": 300}}, "A first look: --quick"),
        ({"options": {"max_documents": 1200}}, "At most 1,200 documents were read"),
        ({"status": "partial"}, "status is “partial”"),
        ({"left_out": [{"row": 3, "document": 2}]}, "1 rows of text gave states that are not finite"),
    ],
)
def test_what_limits_the_numbers_is_said_on_top(
    write_page: Callable[..., Written], results: dict[str, pa.Table], manifest: dict[str, Any], said: str
) -> None:
    some = {"noise_floor": results["noise_floor"]}
    written = write_page(some, some, manifest)
    notes = [p.text for p in written.page.all("p") if p.attributes.get("role") == "note"]
    assert len(notes) == 1
    assert said in notes[0]


def test_a_whole_run_needs_no_notice(written: Written) -> None:
    assert not [p for p in written.page.all("p") if p.attributes.get("role") == "note"]


def test_what_was_run_is_on_the_page(written: Written) -> None:
    facts = written.page.by_id("run").text
    for part in ("smollm2-135m", "float32", "wikipedia-sample", "2,961", "350,123", "2.13.0", "complete"):
        assert part in facts
    assert "norms" not in facts


def test_hostile_tokens_never_become_markup(written: Written) -> None:
    assert "<script" not in written.html
    assert not written.page.all("img")
    labels = str([picture.attributes["aria-label"] for picture in written.page.all("svg")])
    assert "Labelled tokens" in labels


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800", '"><script>alert(1)</script>', "' onload='x"])
def test_hostile_manifests_never_become_markup(
    write_page: Callable[..., Written], results: dict[str, pa.Table], text: str
) -> None:
    manifest = {"model": text, "corpus": {"name": text}, "options": {text: text}, "status": text}
    written = write_page({"noise_floor": results["noise_floor"]}, None, manifest)
    assert not [element for element in written.page.walk() if element.tag in ("script", "img")]
    assert not [name for element in written.page.walk() for name in element.attributes if name.startswith("on")]
    shown = report.text.visible(text) if text else "these trajectories"
    assert written.page.all("h1")[0].text.strip() == f"The depth flow of {shown}".strip()


def test_hostile_claims_stay_text(write_page: Callable[..., Written]) -> None:
    text = "</td><script>alert(1)</script>"
    row = {"claim": text, "published": text, "measured": text, "holds": "true", "note": text}
    claims = pa.Table.from_pylist([{**row, "measured_without_sinks": text, "holds_without_sinks": "false"}])
    page = write_page({"claims": claims}).page
    assert page.table("Claims").rows() == [[text, text, text, "holds", text, "does not", text]]


def test_numbers_that_are_not_finite_are_shown(
    write_page: Callable[..., Written], results: dict[str, pa.Table]
) -> None:
    rows = results["law_scores"].to_pylist()
    for row in rows:
        if row["law"] == "km" and row["transition"] == 2:
            row["r2"] = row["log_likelihood"] = float("nan")
    page = write_page({"law_scores": pa.Table.from_pylist(rows)}).page
    row = page.table("Table 1, with sinks").rows()[2]
    assert (row[1], row[8]) == ("NaN", "NaN")
    assert [cell.text for cell in page.table("Table 1, with sinks").all("tr")[4].all("strong")][-1] == row[9]


def test_trajectories_from_arrays_are_reported(
    write_page: Callable[..., Written], results: dict[str, pa.Table]
) -> None:
    manifest = {"model": None, "corpus": None, "counts": None, "options": None, "versions": None, "left_out": None}
    page = write_page({"law_scores": results["law_scores"]}, None, manifest).page
    assert page.all("h1")[0].text == "The depth flow of these trajectories"
    assert "600 trajectories with sinks" in page.text


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    some = make_results(n_transitions=2, widths=(8,), seeds=(0,), n_tokens=40)
    run = write_run(tmp_path / "run", {name: some[name] for name in ("figure_fields", "norms", "law_scores")})
    files = report.write(run)
    first = {path: path.read_bytes() for path in (files.page, *files.figures)}
    assert report.write(run) == files
    assert {path: path.read_bytes() for path in first} == first


def test_a_report_that_fails_leaves_the_last_one(
    tmp_path: Path, results: dict[str, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", {"norms": results["norms"]})
    before = report.write(run).page.read_bytes()

    def fail(*_: object) -> str:
        raise RuntimeError("disk full")

    monkeypatch.setattr(page_module, "render", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        report.write(run)
    assert (run / "report.html").read_bytes() == before
    assert not [path for path in run.rglob("*") if "partial" in path.name]


def test_a_run_that_was_not_analysed_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {})
    with pytest.raises(InputError, match="has no results to report; run `layerflow analyse"):
        report.write(run)
    assert not (run / "figures").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run: it holds no manifest\.json"):
        report.write(tmp_path)
