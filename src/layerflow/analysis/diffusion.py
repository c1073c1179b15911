"""Does any diffusion matrix make the flow a gradient flow of its log-density? D fitted, and scored where it was not."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64

from layerflow.analysis.shuffle import derangement
from layerflow.numerics.r2 import r2
from layerflow.numerics.semidefinite import fit_free, fit_semidefinite

N_SHUFFLES = 3


@dataclass(frozen=True)
class GradientDiffusionRow:
    """Held-out R2 of steps predicted as D g, D fitted under one ``constraint``, and the same with steps shuffled."""

    n_components: int
    transition: int
    subject: str
    constraint: str
    r2: float
    r2_shuffled: float


def diffusion_rows(
    direction: Float[np.ndarray, "n d"],
    steps: Float[np.ndarray, "n d"],
    train: Int64[np.ndarray, " a"],
    test: Int64[np.ndarray, " b"],
    *,
    transition: int,
    subject: str,
    rng: np.random.Generator,
    n_shuffles: int = N_SHUFFLES,
) -> list[GradientDiffusionRow]:
    """Fit one constant matrix D in step = D g on training tokens, free and positive semidefinite; score held out.

    R2 is the protocol's, 1 - sum ||D - a||^2 / sum ||D - mean(D)||^2. The drift of a gradient flow is
    D grad log p and nothing else, so rows of ``subject`` itself have no intercept: R2 is far below zero where
    all tokens share a translation, which no D makes and which the denominator leaves out (-77 on one transition of
    SmolLM2, -76 shuffled). Rows of ``subject``_centred grant the translation: steps and directions less their
    training means, as for the potential. They are the test that a translation cannot decide. A control has no
    translation, and the same scores either way.

    The null shuffles the steps over all tokens, fits and scores again; it is the mean over ``n_shuffles``
    derangements.

    What each constraint means: a *free* D may be antisymmetric, so it also lets a circulation around the
    density's level sets through, and where g is nearly linear in z it can imitate any linear drift. Only
    *psd* is the claim that the flow climbs its density.

    ``direction`` g and ``steps`` (n, d), ``train`` and ``test`` their rows. Cost: n d^2 a shuffle, and two
    fits of d x d. SPEC section 6.
    """
    pairings = [np.arange(len(steps)), *(derangement(len(steps), rng) for _ in range(n_shuffles))]
    rows = []
    for name, g, moved in (
        (subject, direction, steps),
        (f"{subject}_centred", direction - direction[train].mean(axis=0), steps - steps[train].mean(axis=0)),
    ):
        scores = np.array([_scores(g, moved[partner], train, test) for partner in pairings])
        rows += [
            GradientDiffusionRow(direction.shape[1], transition, name, constraint, float(score), float(null))
            for constraint, score, null in zip(("free", "psd"), scores[0], scores[1:].mean(axis=0), strict=True)
        ]
    return rows


def fit_diffusion(
    direction: Float[np.ndarray, "n d"], steps: Float[np.ndarray, "n d"]
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "d d"]]:
    """Least-squares D in step = D g: unconstrained, and symmetric positive semidefinite. Each (d, d)."""
    gram, cross = direction.T @ direction / len(steps), steps.T @ direction / len(steps)
    return fit_free(gram, cross), fit_semidefinite(gram, cross).matrix


def _scores(direction: np.ndarray, steps: np.ndarray, train: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Held-out R2 of the free and of the semidefinite fit."""
    free, semidefinite = fit_diffusion(direction[train], steps[train])
    held_out = direction[test]
    return r2(steps[test], held_out @ free.T), r2(steps[test], held_out @ semidefinite.T)
