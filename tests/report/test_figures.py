import subprocess
import sys
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver
from matplotlib.text import Annotation
from tests.report.synthetic import HOSTILE, make_results

from layerflow.query import where
from layerflow.report import figures
from layerflow.report.figures.clouds import labelled_rows, shown_states
from layerflow.report.figures.drift_fields import common_step, plane
from layerflow.report.figures.reach import reach

DEPTH_FIGURES: dict[str, tuple[Any, str, dict[str, int]]] = {
    "laws": (figures.laws, "law_scores", {"n_components": 16}),
    "contests": (figures.contests, "law_contests", {"n_components": 16}),
    "retained": (figures.retained, "basis", {}),
    "norms": (figures.norms, "norms", {}),
    "alignment": (figures.alignment, "gradient", {"n_components": 16}),
    "potential": (figures.potential, "potential", {"n_components": 16}),
    "rollout": (figures.rollout, "rollout", {}),
    "ranks": (figures.ranks, "conserved", {}),
}


def _lines(figure: Figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in figure.axes[0].lines
    }


def test_importing_the_report_opens_no_window_system_and_no_torch() -> None:
    code = (
        "import sys, layerflow.report; "
        "sys.exit(bool({'matplotlib.pyplot', 'torch', 'transformers', 'tkinter'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("n_states", "shown"), [(31, [0, 4, 9, 13, 17, 21, 26, 30]), (8, [*range(8)]), (3, [0, 1, 2]), (1, [0])]
)
def test_cloud_shows_first_last_and_evenly_spaced_states(n_states: int, shown: list[int]) -> None:
    assert shown_states(pa.table({"state": np.repeat(np.arange(n_states), 2)})) == shown


def test_cloud_draws_every_token_of_a_panel(results: dict[str, pa.Table]) -> None:
    table = results["figure_cloud"]
    figure = figures.cloud(table)
    panels = [ax for ax in figure.axes if ax.get_title(loc="left").startswith("State")]
    assert len(panels) == 7
    for ax, state in zip(panels, range(7), strict=True):
        (points,) = (artist for artist in ax.collections if len(artist.get_offsets()) > 1)
        rows = where(table, state=state)
        expected = sorted(zip(rows["x"].to_pylist(), rows["y"].to_pylist(), strict=True))
        assert sorted(map(tuple, np.asarray(points.get_offsets()).tolist())) == expected


def test_cloud_says_how_many_tokens_its_frame_leaves_out() -> None:
    rng = np.random.default_rng(0)
    n = 1000
    x, y = rng.standard_normal((2, n))
    x[:3] = 1e4
    table = pa.table(
        {"state": [0] * n, "row": range(n), "x": x, "y": y, "count": [5] * n, "text": ["a"] * n},
    )
    ax = figures.cloud(table).axes[0]
    low, high = ax.get_xlim()
    assert high < 100
    (label,) = (text.get_text() for text in ax.texts if text.get_text().endswith("outside"))
    left, right = ax.get_ylim()
    assert label == f"{int(((x < low) | (x > high) | (y < left) | (y > right)).sum())} outside"


def test_cloud_labels_neither_overlap_nor_leave_their_panel() -> None:
    figure = figures.cloud(make_results(n_transitions=10, n_tokens=400)["figure_cloud"])
    renderer = FigureCanvasAgg(figure).get_renderer()
    n_labels = 0
    for ax in figure.axes:
        labels = [text for text in ax.texts if isinstance(text, Annotation)]
        boxes = [label.get_window_extent(renderer) for label in labels]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        frame = ax.get_window_extent(renderer)
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
        n_labels += len(labels)
    assert n_labels >= 24


def test_cloud_labels_prefer_frequent_words_and_fall_back_to_what_there_is() -> None:
    words = ["<script>", " the", "\x00", " music", "中文"]
    table = pa.table(
        {"state": [0] * 5, "row": range(5), "x": [0.0, 1, 2, 3, 4], "y": [0.0] * 5, "count": [9, 8, 7, 6, 5]}
    )
    labels = labelled_rows(table.append_column("text", pa.array(words)))
    assert next(iter(labels)) == 1
    assert labels == {0: "<script>", 1: "␣the", 2: r"\x00", 3: "␣music", 4: r"\u4e2d\u6587"}


@pytest.mark.parametrize("text", HOSTILE)
def test_cloud_draws_hostile_tokens_without_a_warning(text: str) -> None:
    table = pa.table(
        {"state": [0, 0], "row": [0, 1], "x": [0.0, 1], "y": [0.0, 1], "count": [5, 6], "text": [text, text]}
    )
    figure = figures.cloud(table)
    FigureCanvasAgg(figure).draw()


def test_fields_draw_each_law_over_the_observed_steps(results: dict[str, pa.Table]) -> None:
    table = results["figure_fields"]
    observed_rows = where(table, series="observed")
    common = [np.average(observed_rows[axis].to_numpy(), weights=observed_rows["n"].to_numpy()) for axis in ("u", "v")]
    assert common_step(table) == pytest.approx(common)
    figure = figures.fields(table)
    for ax, series in zip(figure.axes, ("affine", "quadratic", "km"), strict=True):
        observed, law = (artist for artist in ax.collections if isinstance(artist, Quiver))
        assert observed.scale == law.scale
        for quiver, name in ((observed, "observed"), (law, series)):
            rows = where(table, series=name)
            drawn = np.column_stack([quiver.X, quiver.Y, quiver.U, quiver.V])
            expected = np.column_stack([rows[column].to_numpy() for column in ("x", "y", "u", "v")])
            np.testing.assert_allclose(drawn, expected - [0, 0, *common], atol=1e-12)
    (note,) = (text.get_text() for text in figure.texts if "transition" in text.get_text())
    assert "state 4, transition 4 → 5" in note
    assert plane(table) == "leading principal plane of state 4, transition 4 → 5"


def test_fields_scale_keeps_all_but_the_longest_arrows_within_a_bin_and_a_third(results: dict[str, pa.Table]) -> None:
    table = results["figure_fields"]
    scale = next(a for a in figures.fields(table).axes[0].collections if isinstance(a, Quiver)).scale
    u, v = common_step(table)
    lengths = np.hypot((table["u"].to_numpy() - u) / 0.5, (table["v"].to_numpy() - v) / 0.4) / scale
    assert np.percentile(lengths, 90) == pytest.approx(1.3)


@pytest.mark.parametrize("name", DEPTH_FIGURES)
def test_depth_figures_label_both_axes(results: dict[str, pa.Table], name: str) -> None:
    draw, table, options = DEPTH_FIGURES[name]
    ax = draw(results[table], **options).axes[0]
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.has_data()


@pytest.mark.parametrize("name", DEPTH_FIGURES)
def test_depth_figures_of_tables_without_rows_are_blank_and_do_not_fail(
    results: dict[str, pa.Table], name: str
) -> None:
    draw, table, options = DEPTH_FIGURES[name]
    figure = draw(results[table].slice(0, 0), **options)
    FigureCanvasAgg(figure).draw()


def test_laws_draw_the_mean_over_seeds(results: dict[str, pa.Table]) -> None:
    scores = results["law_scores"]
    lines = _lines(figures.laws(scores, n_components=16))
    for law, label in (
        ("quadratic", "quadratic"),
        ("km", "KM"),
        ("affine", "affine"),
        ("rotation_stretch", "rotation–stretch"),
    ):
        rows = where(scores, law=law, n_components=16)
        expected = [pc.mean(where(rows, transition=transition)["r2"]).as_py() for transition in range(6)]
        np.testing.assert_allclose(lines[label][1], expected, rtol=1e-12)


def test_contests_fill_the_points_whose_interval_clears_zero(results: dict[str, pa.Table]) -> None:
    table = where(results["law_contests"], law="km", opponent="affine", metric="r2", n_components=16)
    lifted = table.set_column(
        table.schema.get_field_index("low"),
        "low",
        pc.if_else(pc.greater(table["transition"], 3), pc.subtract(table["difference"], 1e-6), table["low"]),
    )
    lines = [line for line in figures.contests(lifted, n_components=16).axes[0].lines if line.get_marker() == "o"]
    points = {
        round(x): (y, line.get_markerfacecolor() != "none")
        for line in lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert sorted(points) == [*range(6)]
    assert {filled for _, filled in points.values()} == {True, False}
    for transition, (height, filled) in points.items():
        rows = where(lifted, transition=transition)
        assert filled == (pc.min(rows["low"]).as_py() > 0 or pc.max(rows["high"]).as_py() < 0)
        assert height == pytest.approx(pc.mean(rows["difference"]).as_py())


def test_rollout_names_the_law_that_leaves_its_axis() -> None:
    ratios = {"quadratic": [1.0, 5.0, 4.2e24], "km": [1.0, 0.8, 0.5]}
    rows = [
        {"law": law, "noise": {"km": "local_full"}.get(law, "full"), "seed": 0, "state": state, "spread_ratio": ratio}
        for law, values in ratios.items()
        for state, ratio in enumerate(values)
    ]
    ax = figures.rollout(pa.Table.from_pylist(rows)).axes[0]
    assert ax.get_ylim()[1] <= 30
    assert [text.get_text() for text in ax.texts] == ["off the axis: quadratic, full noise, to 4.2·10²⁴"]


def test_reach_counts_wins_over_the_affine_map() -> None:
    locality = pa.table(
        {
            "n_components": [16] * 4,
            "seed": [0, 1, 0, 1],
            "k": [64] * 4,
            "transition": [0, 0, 1, 1],
            "radius_ratio": [0.1, 0.2, 0.3, 0.4],
            "r2": [0.5, 0.7, 0.1, 0.2],
        }
    )
    scores = pa.table(
        {
            "n_components": [16, 16],
            "transition": [0, 1],
            "law": ["affine"] * 2,
            "noise": ["full"] * 2,
            "r2": [0.55, 0.3],
        }
    )
    radius, wins, n_transitions = reach(locality, scores, n_components=16, k=64)
    assert radius == pytest.approx(0.25)
    assert (wins, n_transitions) == (1, 2)
    assert reach(locality, scores, n_components=8, k=64) == (None, 0, 0)


def test_locality_draws_a_line_a_k(results: dict[str, pa.Table]) -> None:
    lines = _lines(figures.locality(results["locality"], results["law_scores"]))
    assert {"k = 64", "k = 256", "k = 1024"} <= set(lines)
    radii, wins = lines["k = 64"]
    for radius, n_wins, width in zip(radii, wins, (8, 16, 32), strict=True):
        assert (radius, n_wins) == reach(results["locality"], results["law_scores"], n_components=width, k=64)[:2]
