import dataclasses
from importlib.metadata import version

import numpy as np
import pyarrow.parquet as pq
import pytest

import layerflow as lf
from layerflow.data.trajectories import Halves, Samples, SinkSums, StateNorms
from layerflow.errors import InputError

HOSTILE = ["<script>alert(1)</script>", "a\x00", "\ud800", "=1+1", "\u202eabc", '"', "🙂", "\x1b[31m"]


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def occurrences(rng):
    """Single states (L+1, positions, D) with their token, half and sink flag; sinks are a hundred times longer."""
    rows = np.repeat(np.arange(8), [5, 6, 7, 8, 20, 5, 9, 30])
    sinks = rng.random(len(rows)) < 0.2
    states = rng.standard_normal((3, len(rows), 4)) * np.where(sinks, 100, 1)[:, None]
    return states, rows, rng.random(len(rows)) < 0.5, sinks


def means(states, rows, n):
    counts = np.bincount(rows, minlength=n)
    sums = np.stack([np.stack([state[rows == v].sum(axis=0) for v in range(n)]) for state in states])
    return sums / np.maximum(counts, 1)[:, None], counts, sums


@pytest.fixture
def full(occurrences):
    states, rows, in_a, sinks = occurrences
    mean, counts, _ = means(states, rows, 8)
    half_a, count_a, _ = means(states[-1:, in_a], rows[in_a], 8)
    half_b, count_b, _ = means(states[-1:, ~in_a], rows[~in_a], 8)
    _, sink_counts, sink_sums = means(states[:, sinks], rows[sinks], 8)
    _, sink_count_a, sink_half_a = means(states[-1:, sinks & in_a], rows[sinks & in_a], 8)
    touched = np.flatnonzero(sink_counts)
    norms = tuple(StateNorms(state, 1.0, 2.0, 3.0, state) for state in range(3))
    return lf.Trajectories(
        states=mean.astype(np.float32),
        counts=counts,
        tokens=np.array(HOSTILE, dtype=object),
        token_ids=np.arange(8) * 10,
        halves=Halves(half_a[0].astype(np.float32), half_b[0].astype(np.float32), count_a, count_b),
        samples=Samples(states.astype(np.float32), rows, sinks),
        sinks=SinkSums(
            touched,
            sink_counts[touched],
            sink_sums[:, touched].astype(np.float32),
            sink_count_a[touched],
            sink_half_a[0, touched].astype(np.float32),
        ),
        norms=norms,
        norms_without_sinks=norms,
        manifest={"corpus": {"name": "made up"}},
    )


def test_load_returns_what_was_saved(full, tmp_path):
    loaded = lf.Trajectories.load(full.save(tmp_path / "run"))
    for name in ("states", "counts", "token_ids"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(full, name))
    for part in ("halves", "samples", "sinks"):
        for field in dataclasses.fields(getattr(full, part)):
            np.testing.assert_array_equal(
                getattr(getattr(loaded, part), field.name), getattr(getattr(full, part), field.name)
            )
    assert loaded.norms == full.norms
    assert loaded.manifest["corpus"] == {"name": "made up"}
    assert (loaded.n_states, loaded.n_transitions, loaded.n_tokens, loaded.width) == (3, 2, 8, 4)
    assert loaded.samples.sinks.dtype == bool


def test_hostile_token_texts_survive(full, tmp_path):
    loaded = lf.Trajectories.load(full.save(tmp_path / "run"))
    assert list(loaded.tokens) == [text if text != "\ud800" else "\ufffd" for text in HOSTILE]


def test_token_table_has_the_promised_columns(full, tmp_path):
    table = pq.read_table(full.save(tmp_path / "run") / "trajectories" / "tokens.parquet")
    assert table.column_names == ["row", "token_id", "text", "count", "count_a", "count_b"]
    np.testing.assert_array_equal(table["count"].to_numpy(), full.counts)
    np.testing.assert_array_equal(table["count_b"].to_numpy(), full.counts - full.halves.count_a)


def test_without_sinks_is_the_mean_over_the_other_positions(full, occurrences):
    states, rows, in_a, sinks = occurrences
    mean, counts, _ = means(states[:, ~sinks], rows[~sinks], 8)
    half_a, count_a, _ = means(states[-1:, ~sinks & in_a], rows[~sinks & in_a], 8)
    half_b, count_b, _ = means(states[-1:, ~sinks & ~in_a], rows[~sinks & ~in_a], 8)
    kept = np.flatnonzero(counts >= 5)
    assert 0 < len(kept) < 8, "the case must drop a token and keep some"
    apart = full.without_sinks()
    np.testing.assert_array_equal(apart.counts, counts[kept])
    np.testing.assert_array_equal(apart.token_ids, full.token_ids[kept])
    np.testing.assert_allclose(apart.states, mean[:, kept], atol=2e-4)
    np.testing.assert_array_equal(apart.halves.count_a, count_a[kept])
    np.testing.assert_array_equal(apart.halves.count_b, count_b[kept])
    np.testing.assert_allclose(apart.halves.a, half_a[0, kept], atol=5e-4)
    np.testing.assert_allclose(apart.halves.b, half_b[0, kept], atol=5e-4)
    stays = ~sinks & np.isin(rows, kept)
    np.testing.assert_array_equal(kept[apart.samples.rows], rows[stays])
    np.testing.assert_array_equal(apart.samples.states, states[:, stays].astype(np.float32))


def test_without_sinks_leaves_the_record_alone(full):
    before = full.states.copy()
    full.without_sinks()
    np.testing.assert_array_equal(full.states, before)


def test_without_sinks_refuses_a_run_that_recorded_none(rng):
    with pytest.raises(InputError, match="recorded no sinks"):
        lf.Trajectories.from_arrays(rng.standard_normal((2, 5, 3))).without_sinks()


def test_without_sinks_refuses_a_count_nobody_keeps(full):
    with pytest.raises(InputError, match="no token keeps 1000 occurrences"):
        full.without_sinks(min_count=1000)


def test_from_arrays_fills_what_is_not_given(rng, tmp_path):
    states = rng.standard_normal((3, 6, 4))
    plain = lf.Trajectories.load(lf.Trajectories.from_arrays(states).save(tmp_path / "run"))
    np.testing.assert_array_equal(plain.states, states.astype(np.float32))
    assert list(plain.tokens) == ["0", "1", "2", "3", "4", "5"]
    assert plain.counts.tolist() == [1] * 6
    assert plain.halves is plain.samples is plain.sinks is plain.token_ids is plain.norms is None


def test_saving_again_leaves_no_stale_part(full, tmp_path):
    full.save(tmp_path / "run")
    loaded = lf.Trajectories.load(dataclasses.replace(full, halves=None, sinks=None).save(tmp_path / "run"))
    assert loaded.halves is None
    assert loaded.sinks is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"states": np.zeros((3, 4))}, "three axes"),
        ({"states": np.zeros((1, 4, 2))}, "L\\+1 ≥ 2"),
        ({"states": np.zeros((3, 0, 2))}, "n ≥ 1"),
        ({"states": np.full((3, 4, 2), np.nan)}, "not finite"),
        ({"states": np.zeros((3, 4, 2)), "counts": [1, 2]}, r"counts has shape \(2,\); .* needs \(4,\)"),
        ({"states": np.zeros((3, 4, 2)), "tokens": ["a"]}, r"tokens has shape \(1,\); .* needs \(4,\)"),
        (
            {"states": np.zeros((3, 4, 2)), "halves": (np.zeros((2, 2)), np.zeros((4, 2)))},
            r"halves\.a has shape \(2, 2\)",
        ),
        (
            {"states": np.zeros((3, 4, 2)), "samples": {"states": np.zeros((3, 5, 2)), "row": [0, 1, 2, 3, 4]}},
            "samples point at token rows 0 to 4",
        ),
        (
            {"states": np.zeros((3, 4, 2)), "samples": {"states": np.zeros((2, 5, 2)), "row": [0] * 5}},
            r"samples have states, rows and sinks of shape \(2, 5, 2\), \(5,\) and \(5,\)",
        ),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        lf.Trajectories.from_arrays(**arguments)


HALF = np.zeros((4, 2))
HOLE = np.where(np.arange(4)[:, None] == 2, np.nan, HALF)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"states": [[1.0], [1.0, 2.0]]}, "states cannot be read as numbers"),
        ({"states": np.full((3, 4, 2), 1e300)}, "row 0 of states is not finite in float32"),
        ({"counts": [3, 2, 0, -1]}, "token row 2 has count 0; .* the 2 such rows"),
        ({"counts": [1, 1.5, 1, 1]}, "counts hold 1.5"),
        ({"counts": [1, np.nan, 1, 1]}, "counts hold nan"),
        ({"halves": (HALF, HOLE)}, r"row 2 of halves\.b is not finite in float32 \(1 such rows\)"),
        ({"halves": (np.zeros((4, 3)), HALF)}, r"halves\.a has shape \(4, 3\); .* needs \(4, 2\)"),
        ({"halves": [HALF]}, "halves are list and no pair"),
        ({"halves": 3}, "halves are int and no pair"),
        ({"halves": {"a": HALF, "b": HALF}}, r"halves\.a cannot be read as numbers"),
        ({"halves": Halves(HALF, HALF, np.ones(4, int), np.ones(4, int))}, "row 0 count 1 and 1 occurrences of 1"),
        ({"halves": Halves(HALF, HALF, np.full(4, 2), np.full(4, -1))}, "row 0 count 2 and -1 occurrences of 1"),
        ({"halves": Halves(HALF, HALF, np.ones(4, int), np.zeros(3, int))}, r"halves\.count_b has shape \(3,\)"),
        ({"samples": {"states": np.stack([HOLE] * 3), "row": range(4)}}, r"row 2 of samples\.states is not finite"),
        ({"samples": {"states": np.zeros((3, 4, 2))}}, r"samples \(dict\) lack row; give"),
        ({"samples": {"rows": [0]}}, "lack states and row; give"),
        ({"samples": np.zeros((3, 4, 2))}, r"samples \(ndarray\) lack states and row; give"),
        ({"samples": {"states": np.zeros((3, 1, 2)), "row": 0}}, "samples have states, rows and sinks of shape"),
        ({"samples": {"states": np.zeros((3, 1, 2)), "row": [0], "sink": [0, 1]}}, r"\(1,\) and \(2,\)"),
    ],
)
def test_wrong_arrays_are_named_with_the_rule(untyped, arguments, words):
    with pytest.raises(InputError, match=words) as refusal:
        lf.Trajectories.from_arrays(**{"states": np.zeros((3, 4, 2)), **arguments})
    assert "\n" not in str(refusal.value)


def test_the_record_itself_refuses_what_does_not_belong_together(full, untyped):
    for change, words in (
        ({"states": full.states[0]}, "three axes"),
        ({"counts": full.counts - full.counts[0]}, "token row 0 has count 0"),
        ({"counts": full.counts + 1}, "must be counts"),
    ):
        with pytest.raises(InputError, match=words):
            dataclasses.replace(full, **change)


@pytest.mark.parametrize("pair", [tuple, list, np.stack])
def test_halves_are_any_two_arrays_and_survive(rng, tmp_path, pair):
    a, b = rng.standard_normal((2, 4, 3)).astype(np.float32)
    counts = [1, 2, 5, 1]
    flow = lf.Trajectories.from_arrays(rng.standard_normal((2, 4, 3)), counts, halves=pair([a, b]))
    for halves in (flow.halves, lf.Trajectories.load(flow.save(tmp_path / "run")).halves):
        np.testing.assert_array_equal(halves.a, a)
        np.testing.assert_array_equal(halves.b, b)
        assert halves.count_a.tolist() == [1, 1, 3, 1]
        assert halves.count_b.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("name", ["states.safetensors", "samples.safetensors", "tokens.parquet"])
def test_a_flipped_bit_is_found(full, tmp_path, name):
    path = full.save(tmp_path / "run") / "trajectories" / name
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="differs from its checksum"):
        lf.Trajectories.load(tmp_path / "run")


def test_a_lost_file_is_named(full, tmp_path):
    run = full.save(tmp_path / "run")
    (run / "trajectories" / "halves.safetensors").unlink()
    with pytest.raises(InputError, match=r"halves\.safetensors is missing"):
        lf.Trajectories.load(run)


def test_an_unfinished_collection_says_how_to_go_on(full, tmp_path):
    run = full.save(tmp_path / "run")
    manifest = (run / "manifest.json").read_text().replace('"complete"', '"collecting"')
    (run / "manifest.json").write_text(manifest)
    with pytest.raises(InputError, match="layerflow collect"):
        lf.Trajectories.load(run)


def analysed(run):
    for folder in ("results", "results-without-sinks", "figures", "notes"):
        (run / folder).mkdir(parents=True)
        (run / folder / "one").write_text("of the old data")
    (run / "report.html").write_text("of the old data")


def test_saving_over_an_analysed_run_removes_what_was_made_from_it(full, tmp_path):
    run = full.save(tmp_path / "run")
    analysed(run)
    (run / "figures" / "one").unlink()
    (run / "figures").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "figure.svg").write_text("kept")
    (run / "figures").symlink_to(tmp_path / "elsewhere")
    dataclasses.replace(full, manifest={"analysis": {}, "quick": True, "corpus": "kept"}).save(run)
    assert sorted(path.name for path in run.iterdir()) == ["manifest.json", "notes", "trajectories"]
    assert (tmp_path / "elsewhere" / "figure.svg").exists()
    manifest = lf.Trajectories.load(run).manifest
    assert manifest["corpus"] == "kept"
    assert not {"analysis", "quick"} & manifest.keys()


def test_folders_where_no_run_was_are_somebody_elses(full, tmp_path):
    analysed(tmp_path)
    full.save(tmp_path)
    assert (tmp_path / "results" / "one").exists()
    assert (tmp_path / "report.html").exists()


def test_the_manifest_of_bare_arrays_says_how_many_and_by_what(rng, tmp_path):
    flow = lf.Trajectories.from_arrays(rng.standard_normal((2, 5, 3)))
    manifest = lf.Trajectories.load(flow.save(tmp_path / "run")).manifest
    assert manifest["counts"] == {"tokens_kept": 5}
    assert manifest["versions"] == {"layerflow": version("layerflow"), "numpy": np.__version__}
    assert manifest["options"] == {}
    told = dataclasses.replace(flow, manifest={"counts": {"tokens": 7}, "options": {"seed": 1}})
    manifest = lf.Trajectories.load(told.save(tmp_path / "run")).manifest
    assert (manifest["counts"], manifest["options"]) == ({"tokens": 7}, {"seed": 1})
