from layerflow import tables
from layerflow.analysis.noise_floor import NoiseFloorRow
from layerflow.analysis.scoring import LawScore
from layerflow.report.terminal import headline


def scores(quadratic, affine):
    return tables.from_records(
        LawScore,
        [
            LawScore(16, 0, transition, law, "diagonal", r2, 0.0, 80, 20)
            for law, values in (("quadratic", quadratic), ("affine", affine))
            for transition, r2 in enumerate(values)
        ],
    )


def test_wins_medians_and_noise_floor_of_both_views():
    floor = tables.from_records(NoiseFloorRow, [NoiseFloorRow(5, 5, 1234, 0.4), NoiseFloorRow(1001, None, 0, None)])
    lines = headline(
        {
            "results": {"law_scores": scores([0.8, 0.6, 0.9], [0.7, 0.65, 0.5]), "noise_floor": floor},
            "results-without-sinks": {"law_scores": scores([0.8, 0.7, 0.9], [0.7, 0.6, 0.5])},
        }
    )
    assert lines[0].split() == ["results", "results-without-sinks"]
    contest = next(line for line in lines if line.startswith("Quadratic over affine"))
    assert contest.split("   ", 1)[1].split() == [
        "2",
        "of",
        "3",
        "0.800",
        "/",
        "0.650",
        "3",
        "of",
        "3",
        "0.800",
        "/",
        "0.600",
    ]
    assert next(line for line in lines if "5–5" in line).split()[-3:] == ["0.400", "(1,234", "tokens)"]
    assert len({len(line) for line in lines}) == 1


def test_nothing_scored_is_a_head_without_rows():
    assert headline({"results": {"law_scores": scores([], [])}}) == ["   results"]
