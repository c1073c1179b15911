"""Synthetic results of a plausible shape: what a study writes, from a seeded generator."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from layerflow import tables

HOSTILE = (
    "<script>alert(1)</script>",
    "</svg></script><img src=x onerror=alert(1)>",
    "\"quoted\" & 'single'",
    "$\\frac{1}{2}$",
    "$unbalanced",
    "\x00\x07\x1b[31m",
    "\u202eevil\u202c",
    "\ufeff\u200b\u2028",
    "\ufffe\uffff",
    "\ufffd",
    "👩\u200d🚀",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u0301",
    "中文",
    "]]>",
    "url(https://example.com/x)",
    "   ",
    "",
    "x" * 300,
)
WORDS = ("the", "of", "history", "music", "river", "Paris", "king", "software", "theory", "green")
LAWS = (
    ("km", "local_diagonal", 0.78, -21.0),
    ("km", "local_full", 0.78, -17.0),
    ("affine", "diagonal", 0.72, -22.5),
    ("affine", "full", 0.72, -19.0),
    ("quadratic", "diagonal", 0.80, -21.5),
    ("quadratic", "full", 0.80, -17.5),
    ("null_a", "diagonal", -0.01, -33.0),
    ("null_b", "diagonal", -1.4, -41.0),
    ("null_c", "full", -0.01, -24.0),
    ("rotation_stretch", "isotropic", 0.31, -29.0),
)
CONTESTS = (
    ("quadratic", "diagonal", "affine", "diagonal", "r2"),
    ("km", "local_diagonal", "affine", "diagonal", "r2"),
    ("km", "local_diagonal", "affine", "diagonal", "log_likelihood"),
    ("km", "local_full", "affine", "full", "log_likelihood"),
    ("km", "local_diagonal", "null_a", "diagonal", "log_likelihood"),
    ("km", "local_diagonal", "null_b", "diagonal", "log_likelihood"),
    ("km", "local_full", "null_c", "full", "log_likelihood"),
)


def make_results(
    seed: int = 0,
    *,
    n_transitions: int = 6,
    n_tokens: int = 120,
    widths: tuple[int, ...] = (8, 16, 32),
    seeds: tuple[int, ...] = (0, 1),
    complete: bool = True,
) -> dict[str, pa.Table]:
    """Draw results; ``complete`` adds the tables of the paper's later sections."""
    rng = np.random.default_rng(seed)
    results = _law_tables(rng, n_transitions, widths, seeds) | _state_tables(rng, n_transitions, widths)
    results |= {"figure_cloud": _cloud(rng, n_transitions, n_tokens), "figure_fields": _fields(rng, n_transitions - 2)}
    return results | _flow_tables(rng, n_transitions, widths, seeds) if complete else results


def _rows(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def _law_tables(
    rng: np.random.Generator, n_transitions: int, widths: tuple[int, ...], seeds: tuple[int, ...]
) -> dict[str, pa.Table]:
    scores, equal, diagnostics, contests, locality = [], [], [], [], []
    for width in widths:
        for transition in range(n_transitions):
            depth = transition / max(1, n_transitions - 1)
            shift = 0.12 * np.sin(5 * depth) + 0.02 * rng.standard_normal()
            for split in seeds:
                split_shift = shift + 0.003 * rng.standard_normal()
                measured = {}
                for law, noise, r2, likelihood in LAWS:
                    bend = {"quadratic": 0.05 * depth, "km": -0.05 * np.log2(width / 8)}.get(law, 0.0)
                    row = {"n_components": width, "seed": split, "transition": transition, "law": law, "noise": noise}
                    score = {
                        "r2": r2 + split_shift + bend,
                        "log_likelihood": likelihood * width / 16 + 6 * depth + rng.standard_normal() * 0.2,
                    }
                    measured[law, noise] = score
                    budget = {"n_train": 480, "n_test": 120}
                    scores.append({**row, **score, **budget})
                    if law in ("affine", "quadratic"):
                        equal.append({**row, **score, "r2": score["r2"] - 0.002 * width, **budget, "n_train": 200})
                    if noise in ("local_full", "full") and law in ("km", "affine", "quadratic"):
                        features = {"affine": width + 1, "quadratic": (width + 1) * (width + 2) // 2}.get(law)
                        diagnostics.append(
                            {
                                **{key: row[key] for key in ("n_components", "seed", "transition", "law")},
                                "n_floored": None if features else int(rng.integers(0, 3)),
                                "n_features": features,
                                "rank": features,
                                "condition": float(10 ** rng.uniform(1, 7)) if features else None,
                            }
                        )
                for law, noise, opponent, opponent_noise, metric in CONTESTS:
                    difference = measured[law, noise][metric] - measured[opponent, opponent_noise][metric]
                    half = 0.02 if metric == "r2" else 0.5
                    contests.append(
                        {
                            "n_components": width,
                            "seed": split,
                            "transition": transition,
                            "law": law,
                            "noise": noise,
                            "opponent": opponent,
                            "opponent_noise": opponent_noise,
                            "metric": metric,
                            "difference": difference,
                            "low": difference - half,
                            "high": difference + half,
                        }
                    )
                for index, k in enumerate((64, 256, 1024)):
                    locality.append(
                        {
                            "n_components": width,
                            "seed": split,
                            "k": k,
                            "transition": transition,
                            "radius_ratio": 0.1 + 0.05 * np.log2(width / 8) + 0.08 * index + 0.01 * rng.random(),
                            "r2": measured["km", "local_diagonal"]["r2"] - 0.06 * index,
                        }
                    )
    return {
        "law_scores": _rows(scores),
        "law_scores_equal_budget": _rows(equal),
        "law_diagnostics": _rows(diagnostics),
        "law_contests": _rows(contests),
        "locality": _rows(locality),
    }


def _state_tables(rng: np.random.Generator, n_transitions: int, widths: tuple[int, ...]) -> dict[str, pa.Table]:
    basis, norms = [], []
    for index, width in enumerate(widths):
        basis.append({"n_components": width, "state": None, "retained": 0.8 + 0.05 * index})
        for state in range(n_transitions + 1):
            share = (0.15 + 0.6 * np.sin(np.pi * (state + 0.4) / (n_transitions + 1.6))) * (0.8 + 0.1 * index)
            basis.append({"n_components": width, "state": state, "retained": share})
    for state in range(n_transitions + 1):
        median = 2.0 * 1.5**state
        sinks = state > 1 and state < n_transitions
        norms.append(
            {
                "state": state,
                "median": median,
                "p99": 2.2 * median,
                "maximum": median * (300 * rng.uniform(0.8, 1.2) if sinks else 3.0),
                "n_sinks": 2971 if sinks else 0,
            }
        )
    floor = [
        {"low": 5, "high": 5, "n_tokens": 900, "ratio": 0.4012},
        {"low": 10, "high": 100, "n_tokens": 3100, "ratio": 0.2034},
        {"low": 1001, "high": None, "n_tokens": 61, "ratio": 0.0217},
    ]
    return {"basis": _rows(basis), "norms": _rows(norms), "noise_floor": _rows(floor)}


def _cloud(rng: np.random.Generator, n_transitions: int, n_tokens: int) -> pa.Table:
    words = [f" {WORDS[index % len(WORDS)]}" for index in range(n_tokens - len(HOSTILE))]
    texts = [*HOSTILE, *words]
    counts = np.maximum(5, rng.pareto(0.9, n_tokens) * 6).astype(int)
    place = rng.standard_normal((n_tokens, 2)) * (1.0, 0.5)
    rows = []
    for state in range(n_transitions + 1):
        for row in range(n_tokens):
            x, y = place[row]
            rows.append(
                {
                    "state": state,
                    "row": row * 3,
                    "x": float(x) * 1.4**state,
                    "y": float(y) * 1.4**state,
                    "count": int(counts[row]),
                    "text": texts[row],
                }
            )
        turn = 0.35
        rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        place = place @ rotation.T + 0.12 * np.column_stack([place[:, 0] ** 2, -(place[:, 0] * place[:, 1])])
        place = place / place.std() + 0.03 * rng.standard_normal(place.shape)
    return _rows(rows)


def _fields(rng: np.random.Generator, transition: int) -> pa.Table:
    rows = []
    for x in np.linspace(-3, 3, 13):
        for y in np.linspace(-2, 2, 11):
            support = int(140 * np.exp(-(x**2) / 3 - y**2 / 1.5))
            if support < 2:
                continue
            affine = np.array([-0.3 * x - 0.4 * y, 0.5 * x - 0.2 * y])
            bend = np.array([0.12 * x * y, -0.12 * x**2])
            steps = {
                "affine": affine,
                "quadratic": affine + bend,
                "km": affine + 0.9 * bend,
                "observed": affine + bend + rng.standard_normal(2) * 0.3 / np.sqrt(support),
            }
            place = {"transition": transition, "state": transition, "x": float(x), "y": float(y)}
            rows += [
                {**place, "series": series, "u": float(u), "v": float(v), "n": support}
                for series, (u, v) in steps.items()
            ]
    return _rows(rows)


def _flow_tables(
    rng: np.random.Generator, n_transitions: int, widths: tuple[int, ...], seeds: tuple[int, ...]
) -> dict[str, pa.Table]:
    gradient, diffusion, potential = [], [], []
    for width in widths:
        for transition in range(n_transitions):
            for subject, gap in (("flow", -0.01 + 0.04 * rng.standard_normal()), ("control", rng.uniform(0.6, 0.9))):
                gradient.append(
                    {
                        "n_components": width,
                        "transition": transition,
                        "subject": subject,
                        "alignment": gap + 0.05,
                        "shuffled": 0.05,
                        "gap": gap,
                        "low": gap - 0.02,
                        "high": gap + 0.02,
                        "energy_share": 0.1 if subject == "flow" else 0.6,
                    }
                )
                for constraint in ("free", "psd"):
                    r2 = 0.03 if subject == "flow" else 0.4
                    diffusion.append(
                        {
                            "n_components": width,
                            "transition": transition,
                            "subject": subject,
                            "constraint": constraint,
                            "r2": r2 + 0.01 * rng.standard_normal(),
                            "r2_shuffled": 0.001,
                        }
                    )
            share = 0.6 + 0.3 * rng.random()
            potential.append(
                {
                    "n_components": width,
                    "transition": transition,
                    "r2_affine": 0.7,
                    "r2_quadratic": 0.8,
                    "r2_potential": 0.8 * share,
                    "r2_potential_antisymmetric": 0.79,
                    "potential_share": share,
                    "rotational_share": 1 - share,
                    "symmetric_share": 0.5 + 0.3 * transition / n_transitions,
                    "symmetric_share_shuffled": 0.5 + 0.02 * rng.random(),
                }
            )
    calibration = [
        {
            "drift_to_noise": ratio,
            "translated": translated,
            "direction_agreement": 0.914,
            "alignment": 0.914 * np.sqrt(ratio / (1 + ratio)) * (0.4 if translated else 1),
            "energy_share": 0.5,
        }
        for ratio in (0.9, 4.0, 25.0, 106.0)
        for translated in (False, True)
    ]
    conserved = [
        {
            "observable": observable,
            "state": state,
            "from_first": 1 + (last - 1) * state / n_transitions,
            "from_previous": 0.97 if state else None,
        }
        for observable, last in (
            ("cosine", 0.76),
            ("norm", -0.17),
            ("participation_ratio", -0.59),
            ("local_density", 0.5),
        )
        for state in range(n_transitions + 1)
    ]
    rollout = [
        {
            "law": law,
            "noise": noise,
            "seed": split,
            "state": state,
            "spread_ratio": 1 + (last - 1) * state / n_transitions + 0.01 * rng.standard_normal(),
            "n_escaped": 3 if law == "quadratic" else 0,
        }
        for law, noise, last in (
            ("km", "local_diagonal", 0.4),
            ("km", "local_full", 0.5),
            ("affine", "full", 0.9),
            ("quadratic", "full", 0.7),
            ("rotation_stretch", "isotropic", 0.6),
            ("affine", "none", 1.7),
            ("stationary_control", "local_diagonal", 2.0),
        )
        for split in seeds
        for state in range(n_transitions + 1)
    ]
    affinity = [
        {
            "kind": kind,
            "transition": transition,
            "nonaffine_step": step,
            "nonaffine_state": state,
            "nonlinear_gain": 0.04,
            "n": 500,
        }
        for kind, step, state in (("mean", 0.3, 0.03), ("individual", 0.5, 0.17))
        for transition in range(n_transitions)
    ]
    claims = [
        {
            "claim": f"claim {index} <b>&</b>",
            "published": "12/12",
            "measured": "30/30" if index else None,
            "holds": (None, True, False)[index % 3],
            "measured_without_sinks": "25/30",
            "holds_without_sinks": (True, False, None)[index % 3],
            "note": "" if index else "needs halves",
        }
        for index in range(5)
    ]
    correlates = [
        {"n_components": 16, "transition": transition, "quantity": quantity, "spearman": rho + 0.01 * transition}
        for quantity, rho in (("log_frequency", -0.1), ("norm", -0.6), ("cosine", 0.2), ("local_density", 0.0))
        for transition in range(n_transitions)
    ]
    corrected = [{"transition": n_transitions - 1, "nonaffine_state": 0.038, "floor": 0.012, "corrected": 0.026}]
    return {
        "potential_correlates": _rows(correlates),
        "affinity_corrected": _rows(corrected),
        "gradient": _rows(gradient),
        "gradient_calibration": _rows(calibration),
        "gradient_diffusion": _rows(diffusion),
        "potential": _rows(potential),
        "conserved": _rows(conserved),
        "rollout": _rows(rollout),
        "affinity": _rows(affinity),
        "claims": _rows(claims),
    }


MANIFEST: dict[str, Any] = {
    "format": "layerflow",
    "format_version": 1,
    "status": "complete",
    "model": {
        "name": "smollm2-135m",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "special_ids": [*range(17)],
    },
    "corpus": {"name": "wikipedia-sample", "package": "gensim"},
    "options": {"min_count": 5, "max_tokens": 128, "max_documents": None},
    "counts": {"documents_used": 2961, "tokens": 350_123, "tokens_kept": 600},
    "versions": {"layerflow": "0.1.0", "torch": "2.13.0"},
    "left_out": [],
    "norms": None,
    "checksums": {"trajectories/states.safetensors": "00"},
}


def write_run(
    run: Path,
    results: dict[str, pa.Table],
    without_sinks: dict[str, pa.Table] | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Write a run directory as `layerflow analyse` leaves it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "manifest.json").write_text(json.dumps({**MANIFEST, **(manifest or {})}), encoding="utf-8")
    tables.write(run / "results", results)
    if without_sinks is not None:
        tables.write(run / "results-without-sinks", without_sinks)
    return run
