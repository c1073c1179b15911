from typing import Any

import pyarrow as pa
import pytest

from layerflow.query import distinct, means, where, working_width
from layerflow.report.headline import KM_AFFINE_MATCHED, QUADRATIC_AFFINE, outcome


def _score(
    transition: int, seed: int, law: str, r2: float, *, noise: str = "full", nats: float = 0.0
) -> dict[str, Any]:
    row = {"n_components": 16, "seed": seed, "transition": transition, "law": law, "noise": noise}
    return {**row, "r2": r2, "log_likelihood": nats, "n_train": 8, "n_test": 2}


def _contest(transition: int, seed: int, low: float) -> dict[str, Any]:
    row = {"n_components": 16, "seed": seed, "transition": transition, "law": "quadratic", "noise": "full"}
    rest = {"opponent": "affine", "opponent_noise": "full", "metric": "r2", "difference": low + 0.1}
    return {**row, **rest, "low": low, "high": low + 0.2}


SCORES = [
    # Transition 0: won at both seeds. Transition 1: lost at one seed by less than it is won at the other.
    # Transition 2: lost on average.
    *(_score(0, seed, law, r2) for seed in (0, 1) for law, r2 in (("quadratic", 0.9), ("affine", 0.5))),
    _score(1, 0, "quadratic", 0.5),
    _score(1, 0, "affine", 0.6),
    _score(1, 1, "quadratic", 0.9),
    _score(1, 1, "affine", 0.6),
    *(_score(2, seed, law, r2) for seed in (0, 1) for law, r2 in (("quadratic", 0.3), ("affine", 0.4))),
]


def test_outcome_counts_transitions_won_on_average_and_clearly() -> None:
    contests = [
        _contest(0, 0, 0.3),
        _contest(0, 1, 0.3),
        _contest(1, 0, -0.2),
        _contest(1, 1, 0.2),
        _contest(2, 0, -0.2),
    ]
    results = {"law_scores": pa.Table.from_pylist(SCORES), "law_contests": pa.Table.from_pylist(contests)}
    found = outcome(results, QUADRATIC_AFFINE, 16)
    assert found is not None
    assert (found.wins, found.n_transitions, found.clear) == (2, 3, 1)
    assert found.median == pytest.approx(0.7)
    assert found.opponent_median == pytest.approx(0.5)
    assert found.margin == pytest.approx(0.1)


def test_outcome_without_intervals_or_without_a_side() -> None:
    results = {"law_scores": pa.Table.from_pylist(SCORES)}
    found = outcome(results, QUADRATIC_AFFINE, 16)
    assert found is not None
    assert found.clear is None
    assert outcome(results, KM_AFFINE_MATCHED, 16) is None
    assert outcome(results, QUADRATIC_AFFINE, 8) is None
    assert outcome({}, QUADRATIC_AFFINE, 16) is None


def test_likelihood_contest_compares_the_noise_forms_it_names() -> None:
    rows = [
        _score(0, 0, "km", 0.0, noise="local_diagonal", nats=-3.0),
        _score(0, 0, "km", 0.0, noise="local_full", nats=-9.0),
        _score(0, 0, "affine", 0.0, noise="diagonal", nats=-4.0),
        _score(0, 0, "affine", 0.0, noise="full", nats=-1.0),
    ]
    found = outcome({"law_scores": pa.Table.from_pylist(rows)}, KM_AFFINE_MATCHED, 16)
    assert found is not None
    assert (found.wins, found.margin) == (1, 1.0)


@pytest.mark.parametrize(("widths", "chosen"), [([8, 16, 32], 16), ([8, 24], 8), ([2, 4], 4), ([64], 64), ([], None)])
def test_working_width_is_16_or_the_nearest(widths: list[int], chosen: int | None) -> None:
    assert working_width(pa.table({"n_components": pa.array(widths, pa.int64())})) == chosen


def test_where_matches_values_and_empty_cells() -> None:
    table = pa.table({"state": [None, 0, 1], "retained": [0.9, 0.1, 0.2]})
    assert where(table, state=None)["retained"].to_pylist() == [0.9]
    assert where(table, state=1)["retained"].to_pylist() == [0.2]
    assert distinct(table, "state") == [0, 1]


def test_means_average_over_everything_but_the_keys() -> None:
    table = pa.table({"law": ["a", "a", "b"], "seed": [0, 1, 0], "r2": [1.0, 2.0, None]})
    assert means(table, ["law"], "r2") == {("a",): 1.5, ("b",): None}
