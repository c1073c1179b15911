"""How well laws predict the steps of held-out tokens, and whether one beats another (SPEC §5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from layerflow.errors import InputError
from layerflow.numerics.bootstrap import mean_interval, r2_difference_interval
from layerflow.numerics.gaussian import Gaussian
from layerflow.numerics.r2 import squared_errors, total_square

TRAIN_SHARE = 0.8


@dataclass(frozen=True)
class LawScore:
    """One law on the held-out steps of one transition: R² of its drift, log-likelihood in nats per step."""

    n_components: int
    seed: int
    transition: int
    law: str
    noise: str
    r2: float
    log_likelihood: float
    n_train: int
    n_test: int


@dataclass(frozen=True)
class LawContest:
    """One law minus its opponent on the same held-out tokens, with a paired bootstrap 95 % interval."""

    n_components: int
    seed: int
    transition: int
    law: str
    noise: str
    opponent: str
    opponent_noise: str
    metric: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Split:
    """Token rows of one seed: a random 80 % to fit on, the rest to score on."""

    seed: int
    train: Int64[np.ndarray, " n_train"]
    test: Int64[np.ndarray, " n_test"]


@dataclass(frozen=True)
class HeldOut:
    """What one law says of the held-out steps, token by token.

    ``errors`` are squared distances between step and drift, in squared z units; ``log_density`` is in nats.
    """

    law: str
    noise: str
    errors: Float64[np.ndarray, " m"]
    log_density: Float64[np.ndarray, " m"]


@dataclass(frozen=True)
class Setting:
    """Where a score was taken: the leading columns of every row."""

    n_components: int
    seed: int
    transition: int


# The same form of noise on both sides, so that a contest is about the drift …
_MATCHED = (
    (("km", "local_diagonal"), ("affine", "diagonal")),
    (("km", "local_full"), ("affine", "full")),
    (("quadratic", "diagonal"), ("affine", "diagonal")),
    (("quadratic", "full"), ("affine", "full")),
    (("km", "local_diagonal"), ("null_a", "diagonal")),
    (("km", "local_diagonal"), ("null_b", "diagonal")),
    (("km", "local_full"), ("null_c", "full")),
)
# … and the two the paper sets beside them, where a richer noise may win by itself.
_RICHER_NOISE = (
    (("affine", "full"), ("km", "local_diagonal")),
    (("null_c", "full"), ("km", "local_diagonal")),
)


def split(n_tokens: int, seed: int) -> Split:
    """Split tokens by a seeded permutation: the first ⌊0.8 n⌋ train, the rest test.

    Raises:
        InputError: Too few tokens for either side.
    """
    order = np.random.default_rng(seed).permutation(n_tokens)
    n_train = int(TRAIN_SHARE * n_tokens)
    if n_train < 2 or n_tokens - n_train < 2:
        raise InputError(f"{n_tokens} tokens are too few to split into 80 % train and 20 % test; at least 6 are needed")
    return Split(seed, order[:n_train], order[n_train:])


def hold_out(step: Gaussian, dz: Float[np.ndarray, "m d"], *, law: str, noise: str) -> HeldOut:
    """Compare what a law says of the held-out steps, ``law.at(z)``, with the steps ``dz`` themselves."""
    return HeldOut(law, noise, squared_errors(dz, step.mean), step.log_density(dz))


def scores(
    entries: Sequence[HeldOut], dz: Float[np.ndarray, "m d"], setting: Setting, *, n_train: int
) -> list[LawScore]:
    """R² = 1 − Σ‖Δ−â‖² / Σ‖Δ−mean_test(Δ)‖² and mean log-density of each law on the held-out steps."""
    total = total_square(dz)
    return [
        LawScore(
            setting.n_components,
            setting.seed,
            setting.transition,
            entry.law,
            entry.noise,
            r2=float(1.0 - entry.errors.sum() / total) if total > 0 else float("nan"),
            log_likelihood=float(entry.log_density.mean()),
            n_train=n_train,
            n_test=len(dz),
        )
        for entry in entries
    ]


def contests(
    entries: Sequence[HeldOut], dz: Float[np.ndarray, "m d"], weights: Float64[np.ndarray, "b m"], setting: Setting
) -> list[LawContest]:
    """Differences in R² and in log-likelihood between laws, each with its paired bootstrap interval.

    A positive difference is a win of ``law``. Every contest of a split shares the resampling ``weights``. A contest of
    which one side was not fitted is left out.
    """
    held_out = {(entry.law, entry.noise): entry for entry in entries}
    pairs = [pair for pair in (*_MATCHED, *_RICHER_NOISE) if held_out.keys() >= set(pair)]
    if not pairs:
        return []
    laws, opponents = (_side([held_out[pair[index]] for pair in pairs]) for index in (0, 1))
    by_metric = {
        "r2": r2_difference_interval(dz, laws.errors, opponents.errors, weights),
        "log_likelihood": mean_interval(laws.log_density - opponents.log_density, weights),
    }
    return [
        LawContest(
            setting.n_components,
            setting.seed,
            setting.transition,
            *law,
            *opponent,
            metric,
            difference=float(interval.estimate[column]),
            low=float(interval.low[column]),
            high=float(interval.high[column]),
        )
        for metric, interval in by_metric.items()
        for column, (law, opponent) in enumerate(pairs)
    ]


@dataclass(frozen=True)
class _Side:
    errors: Float64[np.ndarray, "m c"]
    log_density: Float64[np.ndarray, "m c"]


def _side(entries: Sequence[HeldOut]) -> _Side:
    return _Side(
        np.stack([entry.errors for entry in entries], axis=1),
        np.stack([entry.log_density for entry in entries], axis=1),
    )
