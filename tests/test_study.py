import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from benchmarks import straightforward
from tests.flows import bent_flow
from threadpoolctl import threadpool_limits

import layerflow as lf
from layerflow import tables
from layerflow.data.trajectories import Halves, Samples, SinkSums
from layerflow.errors import InputError
from layerflow.plan import StudyOptions
from layerflow.study import analyse, study
from layerflow.tables import WITH_SINKS, WITHOUT_SINKS

# SPEC section 7, in its order.
CONTRACT = {
    "law_scores": "n_components seed transition law noise r2 log_likelihood n_train n_test",
    "law_contests": "n_components seed transition law noise opponent opponent_noise metric difference low high",
    "locality": "n_components seed k transition radius_ratio r2",
    "basis": "n_components state retained",
    "gradient": "n_components transition subject alignment shuffled gap low high energy_share",
    "gradient_calibration": "drift_to_noise translated direction_agreement alignment energy_share",
    "gradient_diffusion": "n_components transition subject constraint r2 r2_shuffled",
    "potential": "n_components transition r2_affine r2_quadratic r2_potential r2_potential_antisymmetric "
    "potential_share rotational_share symmetric_share symmetric_share_shuffled",
    "conserved": "observable state from_first from_previous",
    "noise_floor": "low high n_tokens ratio",
    "rollout": "law noise seed state spread_ratio n_escaped",
    "affinity": "kind transition nonaffine_step nonaffine_state nonlinear_gain n",
    "claims": "claim published measured holds measured_without_sinks holds_without_sinks note",
    "norms": "state median p99 maximum n_sinks",
}
KEYS = {
    "law_scores": ("n_components", "seed", "transition", "law", "noise"),
    "law_scores_equal_budget": ("n_components", "seed", "transition", "law", "noise"),
    "law_contests": (
        *("n_components", "seed", "transition", "law", "noise"),
        *("opponent", "opponent_noise", "metric"),
    ),
    "locality": ("n_components", "seed", "k", "transition"),
    "basis": ("n_components", "state"),
}
WIDTHS, SEEDS = (4, 8, 16), (0, 1)
QUICK = StudyOptions(widths=(4,), seeds=(0,), k=16, n_resamples=20)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small matrices: a second thread only waits."""
    with threadpool_limits(1):
        yield


class Compared(NamedTuple):
    """One flow, analysed twice over."""

    states: np.ndarray
    ours: dict[str, pa.Table]
    theirs: dict[str, list[straightforward.Row]]

    def pairs(self, name: str) -> list[tuple[dict[str, object], straightforward.Row]]:
        """Rows of one table about the same thing; every row of the straightforward analysis has its counterpart."""
        ours = {tuple(row[key] for key in KEYS[name]): row for row in self.ours[name].to_pylist()}
        assert len(ours) == self.ours[name].num_rows
        return [(ours[tuple(row[key] for key in KEYS[name])], row) for row in self.theirs[name]]


@pytest.fixture(scope="module", params=[0.0, 300.0], ids=["bulk", "outliers"])
def compared(request: pytest.FixtureRequest) -> Compared:
    states = bent_flow(1300, 24, 2, seed=3, outliers=request.param)
    options = StudyOptions(widths=WIDTHS, seeds=SEEDS, n_resamples=1000)
    ours = analyse(lf.Trajectories.from_arrays(states), options)
    return Compared(states, ours, straightforward.analyse(states, widths=WIDTHS, seeds=SEEDS, n_resamples=1))


def test_law_scores_are_those_of_a_straightforward_analysis(compared):
    pairs = compared.pairs("law_scores")
    assert len(pairs) == compared.ours["law_scores"].num_rows == len(WIDTHS) * len(SEEDS) * 2 * 10
    for ours, theirs in pairs:
        assert ours["r2"] == pytest.approx(theirs["r2"], rel=1e-8, abs=1e-8)
        assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], rel=1e-6, abs=1e-8)
        assert (ours["n_train"], ours["n_test"]) == (theirs["n_train"], theirs["n_test"]) == (1040, 260)


def test_contests_differ_by_what_a_straightforward_analysis_finds(compared):
    pairs = compared.pairs("law_contests")
    assert len(pairs) == compared.ours["law_contests"].num_rows == len(WIDTHS) * len(SEEDS) * 2 * 9 * 2
    for ours, theirs in pairs:
        assert ours["difference"] == pytest.approx(theirs["difference"], rel=1e-6, abs=1e-8)


def test_intervals_are_those_of_a_bootstrap_loop_within_monte_carlo_error(compared):
    """One cell: each bound lies between the loop's own percentiles that four standard errors of a percentile span."""
    reduced = straightforward.shared_basis(compared.states, 8).reduced
    train, test = straightforward.split(1, reduced.shape[1])
    laws = straightforward.predictions(reduced, 1, train, test, 64)
    loop = straightforward.bootstrap((reduced[2] - reduced[1])[test], laws, 2000, np.random.default_rng(9))
    ours = {tuple(row[key] for key in KEYS["law_contests"]): row for row in compared.ours["law_contests"].to_pylist()}
    margin = 100 * 4 * np.sqrt(0.025 * 0.975 * (1 / 1000 + 1 / 2000))
    for number, pair in enumerate(loop.pairs):
        for column, metric in enumerate(straightforward.METRICS):
            found = ours[8, 1, 1, *pair, metric]
            for bound, percent in (("low", 2.5), ("high", 97.5)):
                percents = np.clip([percent - margin, percent + margin], 0, 100)
                least, most = np.percentile(loop.drawn[:, number, column], percents)
                assert least - 1e-9 * abs(least) <= found[bound] <= most + 1e-9 * abs(most), (pair, metric, bound)
            assert found["low"] < found["high"]


def test_locality_is_that_of_a_straightforward_analysis(compared):
    pairs = compared.pairs("locality")
    assert len(pairs) == compared.ours["locality"].num_rows == len(WIDTHS) * len(SEEDS) * 2 * 3
    for ours, theirs in pairs:
        assert ours["radius_ratio"] == pytest.approx(theirs["radius_ratio"], rel=1e-9)
        assert ours["r2"] == pytest.approx(theirs["r2"], rel=1e-9, abs=1e-9)


def test_retained_variance_is_that_of_a_straightforward_analysis(compared):
    pairs = compared.pairs("basis")
    assert len(pairs) == compared.ours["basis"].num_rows == len(WIDTHS) * 4
    for ours, theirs in pairs:
        assert ours["retained"] == pytest.approx(theirs["retained"], rel=1e-9)


def test_the_flow_tells_the_laws_apart(compared):
    """The comparison would mean little if all laws scored alike."""
    rows = compared.ours["law_scores"].to_pylist()
    r2 = [row["r2"] for row in rows if row["n_components"] == 4]
    assert max(r2) > 0.1
    assert max(r2) - min(r2) > 0.1


def test_the_equal_budget_block_is_that_of_a_straightforward_analysis(compared):
    pairs = compared.pairs("law_scores_equal_budget")
    assert len(pairs) == compared.ours["law_scores_equal_budget"].num_rows == len(WIDTHS) * 2 * 4
    for ours, theirs in pairs:
        assert ours["r2"] == pytest.approx(theirs["r2"], rel=1e-8, abs=1e-8)
        assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], rel=1e-5, abs=1e-7)
        assert (ours["n_train"], ours["n_test"]) == (theirs["n_train"], theirs["n_test"]) == (520, 260)


def test_a_sampled_basis_is_used_for_all_tokens():
    states = bent_flow(400, 12, 1, seed=4)
    sample = np.sort(np.random.default_rng(7).choice(400, 90, replace=False))
    options = dataclasses.replace(QUICK, basis_tokens=90, random_state=7)
    ours = analyse(lf.Trajectories.from_arrays(states), options)
    theirs = straightforward.analyse(states, widths=(4,), seeds=(0,), k=16, n_resamples=1, sample=sample)
    for name, column in (("law_scores", "log_likelihood"), ("basis", "retained")):
        for mine, other in Compared(states, ours, theirs).pairs(name):
            assert mine[column] == pytest.approx(other[column], rel=1e-9)


def flow(n_tokens: int = 240, width: int = 10, n_transitions: int = 2, seed: int = 0) -> np.ndarray:
    return bent_flow(n_tokens, width, n_transitions, seed=seed)


@pytest.fixture(scope="module")
def plain() -> lf.Trajectories:
    """Nothing but states: no halves, samples or sinks."""
    return lf.Trajectories.from_arrays(flow())


@pytest.fixture(scope="module")
def complete() -> lf.Trajectories:
    """All that a collection records; three tokens keep fewer than five occurrences without their sinks."""
    rng = np.random.default_rng(1)
    states = flow()
    n_states, n_tokens, width = states.shape
    counts = rng.integers(12, 60, n_tokens)
    touched = np.arange(0, n_tokens, 8)
    sink_counts = np.where(np.arange(len(touched)) < 3, counts[touched] - 4, 2)
    sums = (100.0 * sink_counts[:, None] * rng.standard_normal((n_states, 1, width))).astype(np.float32)
    means = states.astype(np.float64)
    means[:, touched] += sums / counts[touched][:, None]
    count_a = counts // 2
    noise = rng.standard_normal((n_tokens, width)) / np.sqrt(counts)[:, None]
    half_b = (counts[:, None] * means[-1] - count_a[:, None] * (means[-1] + noise)) / (counts - count_a)[:, None]
    rows = rng.integers(0, n_tokens, 300)
    single = states[:, rows] + rng.standard_normal((n_states, 300, width)).astype(np.float32)
    return lf.Trajectories(
        states=means.astype(np.float32),
        counts=counts,
        tokens=np.array([f"<b>{row}</b>" for row in range(n_tokens)], dtype=object),
        halves=Halves((means[-1] + noise).astype(np.float32), half_b.astype(np.float32), count_a, counts - count_a),
        samples=Samples(single.astype(np.float32), rows, np.zeros(300, bool)),
        sinks=SinkSums(touched, sink_counts, sums, sink_counts // 2, sums[-1] / 2),
    )


@pytest.fixture(scope="module")
def plain_results(plain: lf.Trajectories) -> dict[str, pa.Table]:
    return analyse(plain, QUICK)


@pytest.fixture(scope="module")
def complete_results(complete: lf.Trajectories) -> dict[str, pa.Table]:
    return analyse(complete, QUICK)


@pytest.fixture(scope="module")
def studied(
    complete: lf.Trajectories, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tables.Results]]:
    """A complete run, analysed where an earlier analysis left tables that are no longer made."""
    run = complete.save(tmp_path_factory.mktemp("complete"))
    for view in (WITH_SINKS, WITHOUT_SINKS):
        (run / view).mkdir()
        (run / view / "obsolete.csv").write_text("a\n1\n")
        pa.parquet.write_table(pa.table({"a": [1]}), run / view / "obsolete.parquet")
    return run, study(run, QUICK)


def same(first: tables.Results, second: tables.Results) -> None:
    """Equal bit for bit: NaN where there is NaN."""
    assert first.keys() == second.keys()
    for name, table in first.items():
        assert table.schema == second[name].schema
        for column in table.column_names:
            np.testing.assert_array_equal(table[column].to_numpy(), second[name][column].to_numpy(), err_msg=name)


def test_every_table_has_the_columns_of_the_contract_in_order(studied):
    for results in studied[1].values():
        assert results.keys() >= set(CONTRACT), "a table of the contract is missing"
        for name, columns in CONTRACT.items():
            assert results[name].column_names == columns.split(), name
            assert results[name].num_rows > 0, name


def test_both_views_are_written_as_parquet_and_csv(studied):
    run, views = studied
    assert list(views) == [WITH_SINKS, WITHOUT_SINKS]
    for view, results in views.items():
        same(tables.read(run / view), results)
        expected = {f"{name}.{suffix}" for name in results for suffix in ("csv", "parquet")}
        assert {path.name for path in (run / view).iterdir()} == expected, "stale tables go"
        for name, table in results.items():
            text = pa.csv.read_csv(run / view / f"{name}.csv")
            assert (text.column_names, text.num_rows) == (table.column_names, table.num_rows)


def measured(results: tables.Results) -> tables.Results:
    """All but the claims, which set the views side by side."""
    return {name: table for name, table in results.items() if name != "claims"}


def test_the_views_are_the_analyses_of_the_two_trajectories(studied, complete, complete_results):
    run, views = studied
    assert isinstance(lf.Trajectories.load(run).states, np.memmap), "a mapped run gives the same numbers"
    apart = complete.without_sinks()
    assert apart.n_tokens == complete.n_tokens - 3
    same(measured(views[WITH_SINKS]), measured(complete_results))
    same(measured(views[WITHOUT_SINKS]), measured(analyse(apart, QUICK)))
    tested = [views[view]["law_scores"]["n_test"].to_pylist()[0] for view in views]
    assert tested == [complete.n_tokens - complete.n_tokens * 4 // 5, apart.n_tokens - apart.n_tokens * 4 // 5]
    assert views[WITH_SINKS]["law_scores"] != views[WITHOUT_SINKS]["law_scores"]


def test_the_manifest_says_what_was_analysed_and_loses_nothing(studied, complete, tmp_path):
    run, _ = studied
    before = json.loads((complete.save(tmp_path / "again") / "manifest.json").read_text())
    after = json.loads((run / "manifest.json").read_text())
    analysis = after.pop("analysis")
    assert after == before
    assert analysis["options"] == {**dataclasses.asdict(QUICK), "widths": [4], "seeds": [0]}
    assert analysis["version"]
    assert lf.Trajectories.load(run).n_tokens == complete.n_tokens


def test_a_run_without_sinks_has_one_view_and_loses_the_stale_one(plain, tmp_path, capsys):
    run = plain.save(tmp_path / "run")
    (run / WITHOUT_SINKS).mkdir()
    (run / WITHOUT_SINKS / "law_scores.csv").write_text("stale\n")
    assert list(study(run, QUICK)) == [WITH_SINKS]
    assert not (run / WITHOUT_SINKS).exists()
    assert f"{WITHOUT_SINKS}: left out, this run recorded no sinks" in capsys.readouterr().err


def test_tables_without_their_data_are_left_out_and_said(capsys):
    results = analyse(lf.Trajectories.from_arrays(flow(40, 4, 1)), QUICK)
    lines = capsys.readouterr().err.splitlines()
    for name in ("noise_floor", "norms"):
        assert name not in results
        assert [line for line in lines if line.startswith(f"{name}: left out, this run has n")], name
    assert results.keys() >= {"law_scores", "law_contests", "locality", "basis"}


def test_a_refused_analysis_leaves_the_run_as_it_was(plain, tmp_path):
    run = plain.save(tmp_path / "run")
    study(run, QUICK)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="--k 193"):
        study(run, dataclasses.replace(QUICK, k=193))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a run"):
        study(tmp_path, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_analysis_is_deterministic_and_leaves_its_input_alone(complete, complete_results):
    guarded = dataclasses.replace(
        complete, **{name: getattr(complete, name).copy() for name in ("states", "counts", "tokens")}
    )
    guarded.states.setflags(write=False)
    guarded.counts.setflags(write=False)
    same(analyse(guarded, QUICK), complete_results)
    np.testing.assert_array_equal(guarded.states, complete.states)


def test_other_random_states_change_intervals_and_nothing_measured(plain, plain_results):
    other = analyse(plain, dataclasses.replace(QUICK, random_state=1))
    assert other["law_scores"] == plain_results["law_scores"]
    assert other["law_contests"]["difference"] == plain_results["law_contests"]["difference"]
    assert other["law_contests"]["low"] != plain_results["law_contests"]["low"]


def test_threads_change_nothing_but_rounding(plain, plain_results):
    with threadpool_limits(2):
        two = analyse(plain, QUICK)
    for name in ("law_scores", "law_contests", "locality", "basis"):
        for column in two[name].column_names:
            values = [results[name][column].to_pylist() for results in (plain_results, two)]
            if name != "basis" and pa.types.is_floating(two[name][column].type):
                np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-9)
            else:
                assert values[0] == pytest.approx(values[1])


def test_default_options_take_the_widths_and_neighbourhoods_that_the_data_allow(plain, capsys):
    results = analyse(plain, StudyOptions(n_resamples=5))
    assert set(results["law_scores"]["n_components"].to_pylist()) == {8}
    assert set(results["locality"]["k"].to_pylist()) == {64}
    assert set(results["law_scores"]["seed"].to_pylist()) == {0, 1, 2}
    lines = capsys.readouterr().err.splitlines()
    assert "widths: 8; the data allow no more of 8,16,32,64" in lines
    assert "locality: k above 192 is left out, there are no more training tokens" in lines


def test_directions_in_which_nothing_differs_are_no_components(capsys):
    states = np.pad(flow(200, width=6), ((0, 0), (0, 0), (0, 20)))
    results = analyse(lf.Trajectories.from_arrays(states), StudyOptions(seeds=(0,), k=8, n_resamples=5))
    assert set(results["law_scores"]["n_components"].to_pylist()) == {6}
    assert "widths: 6; the states differ in 6 directions only" in capsys.readouterr().err.splitlines()
    with pytest.raises(InputError, match="--widths 8 must lie between 1 and 6: the data have 6 directions"):
        analyse(lf.Trajectories.from_arrays(states), StudyOptions(widths=(4, 8), seeds=(0,), k=8))


def test_a_transition_that_moves_nothing_is_left_out(capsys):
    states = flow(200, width=6)
    still = np.concatenate([states, states[-1:]])
    results = analyse(lf.Trajectories.from_arrays(still), StudyOptions(widths=(4,), seeds=(0,), k=8, n_resamples=5))
    last = len(still) - 2
    assert last not in results["law_scores"]["transition"].to_pylist()
    assert last - 1 in results["law_scores"]["transition"].to_pylist()
    assert f"transition {last}: left out" in capsys.readouterr().err


def test_every_k_asked_for_has_its_locality():
    results = analyse(
        lf.Trajectories.from_arrays(flow(200)), StudyOptions(widths=(4,), seeds=(0,), k=10, n_resamples=5)
    )
    assert set(results["locality"]["k"].to_pylist()) == {10, 64}


def test_a_narrow_flow_is_analysed_at_its_own_width():
    results = analyse(lf.Trajectories.from_arrays(flow(width=3)), dataclasses.replace(QUICK, widths=None))
    assert set(results["law_scores"]["n_components"].to_pylist()) == {3}
    pooled = [row for row in results["basis"].to_pylist() if row["state"] is None]
    assert [row["retained"] for row in pooled] == [pytest.approx(1.0)]


def test_polynomials_that_too_few_tokens_cannot_determine_are_left_out(capsys):
    """Sixty tokens train on 48: enough for the 45 monomials of 8 components, too few for the 55 of 9."""
    trajectories = lf.Trajectories.from_arrays(flow(60))
    for width, fitted in ((8, True), (9, False)):
        results = analyse(trajectories, dataclasses.replace(QUICK, widths=(width,)))
        assert ("quadratic" in results["law_scores"]["law"].to_pylist()) is fitted
        assert ("quadratic" in results["law_contests"]["law"].to_pylist()) is fitted
        assert ("figure_fields" in results) is fitted
        line = "figure_fields: left out, the quadratic drift of 9 components needs more than 55 training tokens"
        assert (line in capsys.readouterr().err) is not fitted


@pytest.mark.parametrize(("n_tokens", "widths"), [(6, None), (9, None), (30, (3,))])
def test_the_smallest_flows_are_analysed(n_tokens, widths):
    options = StudyOptions(widths=widths, k=2, n_resamples=5)
    results = analyse(lf.Trajectories.from_arrays(flow(n_tokens)), options)
    assert results["law_scores"].num_rows > 0
    assert np.isfinite(results["law_scores"]["log_likelihood"].to_numpy()).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widths": (4, 11)}, "--widths 11 must lie between 1 and 10: the data have"),
        ({"widths": (0,)}, "--widths 0 must be whole numbers of at least 1"),
        ({"widths": ()}, "--widths .* must be whole numbers"),
        ({"k": 193}, "--k 193 must lie between 1 and the 192 training tokens; choose a smaller k"),
        ({"k": 0}, "--k 0 must be at least 1"),
        ({"budget": 193}, "--budget 193 must lie between 2 and the 192 training tokens"),
        ({"budget": 1}, "--budget 1 must be at least 2"),
        ({"seeds": ()}, "--seeds .* must be different whole numbers"),
        ({"seeds": (0, -1)}, "--seeds 0,-1 must be different whole numbers, none below 0"),
        ({"seeds": (2, 2)}, "--seeds 2,2 must be different whole numbers"),
        ({"n_resamples": 0}, "--resamples 0 must be at least 1"),
    ],
)
def test_options_the_data_do_not_allow_are_refused(plain, options, words):
    with pytest.raises(InputError, match=words) as caught:
        analyse(plain, dataclasses.replace(QUICK, **options))
    assert "\n" not in str(caught.value)


def test_widths_are_ascending_and_once_each(plain):
    results = analyse(plain, dataclasses.replace(QUICK, widths=(5, 3, 5)))
    assert results["basis"]["n_components"].to_pylist() == [3] * 4 + [5] * 4
