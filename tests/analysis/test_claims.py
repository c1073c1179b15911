import numpy as np

import layerflow as lf
from layerflow import tables
from layerflow.analysis.claims import CLAIMS, claims
from layerflow.analysis.conserved import ConservedRow
from layerflow.analysis.noise_floor import NoiseFloorRow
from layerflow.analysis.rollout import RolloutRow
from layerflow.analysis.scoring import LawScore
from layerflow.analysis.transition import Locality


def law_scores(r2, *, width=16, seeds=(0, 1), likelihood=0.0):
    """Scores by law and transition; seeds scatter about the value given."""
    return [
        LawScore(width, seed, transition, law, noise, value + (0.01 if seed else -0.01), likelihood + value, 100, 25)
        for (law, noise), values in r2.items()
        for transition, value in enumerate(values)
        for seed in seeds
    ]


def results(**rows):
    kinds = {
        "law_scores": LawScore,
        "law_scores_equal_budget": LawScore,
        "locality": Locality,
        "conserved": ConservedRow,
        "noise_floor": NoiseFloorRow,
        "rollout": RolloutRow,
    }
    return {name: tables.from_records(kinds[name], given) for name, given in rows.items()}


def row(found, words):
    (match,) = [each for each in found if words in each.claim]
    return match


QUADRATIC, AFFINE, KM = ("quadratic", "diagonal"), ("affine", "diagonal"), ("km", "local_diagonal")


def test_wins_are_counted_over_transitions_after_averaging_seeds():
    found = claims(results(law_scores=law_scores({QUADRATIC: [0.8, 0.7, 0.9], AFFINE: [0.7, 0.6, 0.5]})), None)
    quadratic = row(found, "quadratic drift beats")
    assert (quadratic.measured, quadratic.holds) == ("3 of 3 at 16", True)
    last = row(found, "largest margin")
    assert last.holds
    assert last.measured == "margin +0.400 at the last, 2 of 2 (+0.1 to +0.1) without it"


def test_one_lost_transition_is_no_longer_every():
    found = claims(results(law_scores=law_scores({QUADRATIC: [0.8, 0.6, 0.9], AFFINE: [0.7, 0.65, 0.5]})), None)
    assert row(found, "quadratic drift beats").measured == "2 of 3 at 16"
    assert row(found, "quadratic drift beats").holds is False


def test_a_share_is_met_to_within_one_transition():
    win, lose = [0.8] * 12, [0.8] * 10 + [0.5] * 2
    scores = law_scores({KM: lose, AFFINE: [0.7] * 12, QUADRATIC: win})
    found = claims(results(law_scores=scores), None)
    assert row(found, "KM beats the affine map in R²").holds  # 10 of 12 for a published 11 of 12
    assert row(found, "KM beats the affine map in likelihood").holds is False  # and 10 of 12 for 12 of 12


def test_k_and_width_are_judged_by_their_trend():
    scores = [
        each
        for width, km in ((8, [0.9] * 4), (16, [0.9, 0.9, 0.1, 0.1]), (32, [0.1] * 4))
        for each in law_scores({KM: km, AFFINE: [0.5] * 4}, width=width)
    ]
    locality = [
        Locality(width, 0, k, transition, radius, r2)
        for width, radius in ((8, 0.1), (16, 0.2), (32, 0.3))
        for k, r2 in ((64, 0.9), (256, 0.4))
        for transition in range(4)
    ]
    found = claims(results(law_scores=scores, locality=locality), None)
    assert row(found, "degrades with width").measured == "4 at 8, 2 at 16, 0 at 32"
    assert row(found, "degrades with width").holds
    assert row(found, "neighbourhood grows").measured == "10% at 8, 20% at 16, 30% at 32"
    assert row(found, "degrades with k").measured == "4 at k = 64, 0 at k = 256"
    assert row(found, "degrades with k").holds


def test_ranks_floors_and_rollouts():
    ranks = {"cosine": 0.76, "norm": -0.17, "participation_ratio": -0.59, "local_density": 0.2}
    conserved = [
        ConservedRow(name, state, value if state else 1.0, None) for name, value in ranks.items() for state in (0, 1)
    ]
    floor = [NoiseFloorRow(5, 5, 9, 0.4), NoiseFloorRow(10, 100, 9, 0.2), NoiseFloorRow(1001, None, 0, None)]
    rolled = [
        RolloutRow(law, noise, 0, state, float(spread), 0)
        for law, noise, spreads in (
            ("km", "local_diagonal", [1, 0.5, 0.8, 0.3]),
            ("stationary_control", "local_diagonal", [1, 1.2, 1.5, 2.0]),
            ("affine", "none", [1, 0.9, 0.8, 0.7]),
        )
        for state, spread in enumerate(spreads)
    ]
    found = claims(results(conserved=conserved, noise_floor=floor, rollout=rolled), None)
    assert [row(found, words).holds for words in ("cosine", "norm is", "participation", "local density")] == [
        True,
        True,
        True,
        False,
    ]
    assert row(found, "cosine").measured == "+0.76"
    assert (row(found, "noise floor").measured, row(found, "noise floor").holds) == ("0.400 / 0.200 / –", True)
    assert row(found, "rollouts shrink").measured == "0.50 mid-network, 0.80 at the last raw state, 0.30 at the last"
    assert row(found, "rollouts shrink").holds
    assert row(found, "stationary control").holds
    assert row(found, "composed affine").holds is False


def test_what_a_run_cannot_test_is_empty_and_says_so():
    for each in claims({}, None):
        assert each.measured is each.holds is each.measured_without_sinks is each.holds_without_sinks is None
        assert "not tested with sinks: there is no table" in each.note
        assert "not tested without sinks: this run recorded no sinks" in each.note


def test_both_views_stand_side_by_side():
    kept = results(law_scores=law_scores({QUADRATIC: [0.8], AFFINE: [0.7]}))
    apart = results(law_scores=law_scores({QUADRATIC: [0.6], AFFINE: [0.7]}))
    both = row(claims(kept, apart), "quadratic drift beats")
    assert (both.holds, both.holds_without_sinks) == (True, False)
    assert (both.measured, both.measured_without_sinks) == ("1 of 1 at 16", "0 of 1 at 16")


def test_a_whole_analysis_answers_all_but_what_needs_more():
    rng = np.random.default_rng(0)
    states = [rng.standard_normal((600, 20)) * np.geomspace(2, 0.5, 20)]
    for _ in range(3):
        matrix = rng.standard_normal((20, 20)) * 0.1
        states.append(states[-1] + states[-1] @ matrix + 0.1 * (states[-1] ** 2) @ matrix)
        states[-1] += rng.standard_normal((600, 20)) * 0.1
    flow = np.stack(states).astype(np.float32)
    samples = {"states": flow[:, :300], "row": np.arange(300)}
    record = lf.Trajectories.from_arrays(
        flow, counts=rng.integers(5, 2000, 600), halves=(flow[-1] - 0.01, flow[-1] + 0.01), samples=samples
    )
    found = claims(lf.analyse(record, lf.StudyOptions(widths=(4, 8), seeds=(0,), n_resamples=20)), None)
    assert len(found) == len(CLAIMS)
    untested = {each.claim for each in found if each.holds is None}
    assert untested == {"the quadratic's drop at 64 components is a limit of estimation"}
