"""The analysis of SPEC sections 3–5, written straight from its text with NumPy, SciPy and scikit-learn.

It shares no line with layerflow and takes no short cut: one neighbour search a split, one regression a law, one loop
round the bootstrap. The tests ask layerflow for the same numbers, and ``analysis.py`` for less time.
"""

from typing import NamedTuple

import numpy as np
from scipy.stats import multivariate_normal, norm
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

Row = dict[str, object]

VARIANCE_FLOOR = 1e-6
SHRINKAGE = 0.9


class Prediction(NamedTuple):
    """A law's mean step and noise at each held-out token: variances (d,) or (n, d), or covariances, one axis more."""

    mean: np.ndarray
    noise: np.ndarray


class Basis(NamedTuple):
    """Components (d, D), the raw states projected on them (L+1, n, d), and each one's share of the pooled variance."""

    components: np.ndarray
    reduced: np.ndarray
    explained: np.ndarray


def shared_basis(states: np.ndarray, width: int, sample: np.ndarray | None = None) -> Basis:
    """SPEC section 3: every state centred and scaled to unit radius, stacked, PCA; the raw states projected."""
    sample = np.arange(states.shape[1]) if sample is None else sample
    stack = []
    for state in states:
        state = state.astype(np.float64)
        centred = state - state.mean(axis=0)
        radius = np.sqrt((centred**2).sum(axis=1).mean())
        stack.append(centred[sample] / radius)
    pca = PCA(width, svd_solver="covariance_eigh").fit(np.concatenate(stack))
    reduced = np.stack([state.astype(np.float64) @ pca.components_.T for state in states])
    return Basis(pca.components_, reduced, pca.explained_variance_ratio_)


def retained_by_state(states: np.ndarray, components: np.ndarray) -> np.ndarray:
    """Each state's own retained variance, Σ‖Uᵀ(h−μ)‖² / Σ‖h−μ‖²."""
    shares = []
    for state in states:
        centred = state.astype(np.float64) - state.mean(axis=0, dtype=np.float64)
        shares.append(((centred @ components.T) ** 2).sum() / (centred**2).sum())
    return np.array(shares)


def split(seed: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """SPEC section 5: the first ⌊0.8 n⌋ of the seeded permutation train, the rest test."""
    order = np.random.default_rng(seed).permutation(n_tokens)
    n_train = 8 * n_tokens // 10
    return order[:n_train], order[n_train:]


def r_squared(step: np.ndarray, predicted: np.ndarray) -> float:
    """1 − Σ‖Δ−â‖² / Σ‖Δ−mean(Δ)‖², coordinates pooled."""
    return 1 - ((step - predicted) ** 2).sum() / ((step - step.mean(axis=0)) ** 2).sum()


def log_density(step: np.ndarray, prediction: Prediction, *, full: bool) -> np.ndarray:
    """Gaussian log-density of each step, nats."""
    mean, noise = prediction
    if not full:
        return norm.logpdf(step, mean, np.sqrt(noise)).sum(axis=1)
    if noise.ndim == 2:
        return multivariate_normal(np.zeros(step.shape[1]), noise).logpdf(step - mean)
    residual = step - mean
    _, log_determinant = np.linalg.slogdet(noise)
    squared = np.einsum("ni,ni->n", residual, np.linalg.solve(noise, residual[:, :, None])[:, :, 0])
    return -0.5 * (squared + log_determinant + step.shape[1] * np.log(2 * np.pi))


def kramers_moyal(z: np.ndarray, step: np.ndarray, queries: np.ndarray, k: int, floor: np.ndarray) -> list[Prediction]:
    """The `km` law's local_diagonal and local_full predictions."""
    near = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(z).kneighbors(queries, return_distance=False)
    mean = np.empty_like(queries)
    covariance = np.empty((len(queries), z.shape[1], z.shape[1]))
    for i, row in enumerate(near):
        steps = step[row]
        mean[i] = steps.mean(axis=0)
        covariance[i] = np.cov(steps.T, bias=True)
    variance = np.maximum(np.diagonal(covariance, axis1=1, axis2=2), floor)
    covariance *= SHRINKAGE
    every = np.arange(z.shape[1])
    covariance[:, every, every] = variance
    return [Prediction(mean, variance), Prediction(mean, covariance)]


def polynomial(z: np.ndarray, step: np.ndarray, queries: np.ndarray, degree: int) -> list[Prediction]:
    """The `affine` and `quadratic` laws' diagonal and full predictions.

    Two scalers and a small ``tol``, because a few states may be a thousand times larger than the rest: from release 1.9
    LinearRegression leaves out every direction below 1e-6 of the largest, and then predicts something else.
    """
    features = PolynomialFeatures(degree, include_bias=False)
    regression = make_pipeline(StandardScaler(), features, StandardScaler(), LinearRegression(tol=1e-14)).fit(z, step)
    residual = step - regression.predict(z)
    mean = regression.predict(queries)
    return [Prediction(mean, residual.var(axis=0)), Prediction(mean, np.cov(residual.T, bias=True))]


def rotation_stretch(z: np.ndarray, after: np.ndarray, queries: np.ndarray) -> Prediction:
    """The `rotation_stretch` law: U′ S′ S⁻¹ Uᵀ about the two means, isotropic noise."""
    mean, mean_after = z.mean(axis=0), after.mean(axis=0)
    scores, stretch, axes = np.linalg.svd(z - mean, full_matrices=False)
    scores_after, stretch_after, axes_after = np.linalg.svd(after - mean_after, full_matrices=False)
    sign = np.sign((scores * scores_after).sum(axis=0))
    matrix = (axes_after.T * sign * stretch_after / stretch) @ axes

    def drift(at: np.ndarray) -> np.ndarray:
        return mean_after + (at - mean) @ matrix.T - at

    return Prediction(drift(queries), np.full(z.shape[1], ((after - z - drift(z)) ** 2).mean()))


def predictions(
    reduced: np.ndarray, transition: int, train: np.ndarray, test: np.ndarray, k: int
) -> dict[tuple[str, str], Prediction]:
    """Every law and noise form of SPEC section 4 at the held-out tokens of one transition."""
    steps = np.diff(reduced[:, train], axis=0)
    z, after, step = reduced[transition][train], reduced[transition + 1][train], steps[transition]
    queries = reduced[transition][test]

    def everywhere(mean: np.ndarray) -> np.ndarray:
        return np.broadcast_to(mean, queries.shape)

    km = kramers_moyal(z, step, queries, k, VARIANCE_FLOOR * step.var(axis=0))
    affine = polynomial(z, step, queries, 1)
    constant = everywhere(step.mean(axis=0))
    every = steps.reshape(-1, steps.shape[2])
    found = {
        ("km", "local_diagonal"): km[0],
        ("km", "local_full"): km[1],
        ("affine", "diagonal"): affine[0],
        ("affine", "full"): affine[1],
        ("null_a", "diagonal"): Prediction(constant, step.var(axis=0)),
        ("null_b", "diagonal"): Prediction(everywhere(every.mean(axis=0)), every.var(axis=0)),
        ("null_c", "full"): Prediction(constant, np.cov(step.T, bias=True)),
        ("rotation_stretch", "isotropic"): rotation_stretch(z, after, queries),
    }
    width = z.shape[1]
    if len(train) > 1 + width + width * (width + 1) // 2:
        quadratic = polynomial(z, step, queries, 2)
        found[("quadratic", "diagonal")], found[("quadratic", "full")] = quadratic
    return found


# Each contest of SPEC section 5, the same noise form on both sides, and the two of the paper in which it is not.
CONTESTS = (
    ("km", "local_diagonal", "affine", "diagonal"),
    ("km", "local_full", "affine", "full"),
    ("quadratic", "diagonal", "affine", "diagonal"),
    ("quadratic", "full", "affine", "full"),
    ("km", "local_diagonal", "null_a", "diagonal"),
    ("km", "local_diagonal", "null_b", "diagonal"),
    ("km", "local_full", "null_c", "full"),
    ("affine", "full", "km", "local_diagonal"),
    ("null_c", "full", "km", "local_diagonal"),
)
METRICS = ("r2", "log_likelihood")


class Resampled(NamedTuple):
    """Differences (pairs, metrics) on the held-out tokens, and on each resample of them (resamples, pairs, metrics)."""

    pairs: list[tuple[str, str, str, str]]
    found: np.ndarray
    drawn: np.ndarray


def bootstrap(
    step: np.ndarray, laws: dict[tuple[str, str], Prediction], n_resamples: int, rng: np.random.Generator
) -> Resampled:
    """Draw held-out tokens with replacement and compare every pair of laws on them."""
    pairs = [pair for pair in CONTESTS if pair[:2] in laws]
    errors = {key: ((step - law.mean) ** 2).sum(axis=1) for key, law in laws.items()}
    nats = {key: log_density(step, law, full="full" in key[1]) for key, law in laws.items()}
    better = np.array([errors[pair[2:]] - errors[pair[:2]] for pair in pairs])
    likelier = np.array([nats[pair[:2]] - nats[pair[2:]] for pair in pairs])

    def differences(tokens: np.ndarray) -> np.ndarray:
        total = ((step[tokens] - step[tokens].mean(axis=0)) ** 2).sum()
        return np.stack([better[:, tokens].sum(axis=1) / total, likelier[:, tokens].mean(axis=1)], axis=1)

    n = len(step)
    drawn = np.array([differences(rng.integers(n, size=n)) for _ in range(n_resamples)])
    return Resampled(pairs, differences(np.arange(n)), drawn)


def contests(
    step: np.ndarray, laws: dict[tuple[str, str], Prediction], n_resamples: int, rng: np.random.Generator
) -> list[Row]:
    """Every contest in both metrics, with its interval."""
    resampled = bootstrap(step, laws, n_resamples, rng)
    low, high = np.percentile(resampled.drawn, [2.5, 97.5], axis=0)
    rows: list[Row] = []
    for number, pair in enumerate(resampled.pairs):
        for column, metric in enumerate(METRICS):
            who = dict(zip(("law", "noise", "opponent", "opponent_noise"), pair, strict=True))
            numbers = {"difference": resampled.found, "low": low, "high": high}
            rows.append(who | {"metric": metric} | {name: values[number, column] for name, values in numbers.items()})
    return rows


def locality(reduced: np.ndarray, transition: int, train: np.ndarray, test: np.ndarray, k: int) -> Row:
    """Mean distance of a held-out token to its k-th training neighbour ÷ the cloud's radius, and KM's R² at that k."""
    z, queries = reduced[transition][train], reduced[transition][test]
    step = reduced[transition + 1] - reduced[transition]
    distances, near = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(z).kneighbors(queries)
    cloud = reduced[transition]
    radius = np.sqrt(((cloud - cloud.mean(axis=0)) ** 2).sum(axis=1).mean())
    predicted = np.array([step[train[row]].mean(axis=0) for row in near])
    return {"radius_ratio": distances[:, -1].mean() / radius, "r2": r_squared(step[test], predicted)}


def score(step: np.ndarray, law: str, noise: str, prediction: Prediction) -> Row:
    """R² and mean log-density of one law on the held-out steps."""
    nats = log_density(step, prediction, full="full" in noise).mean()
    return {"law": law, "noise": noise, "r2": r_squared(step, prediction.mean), "log_likelihood": nats}


def equal_budget(reduced: np.ndarray, transition: int, train: np.ndarray, test: np.ndarray, budget: int) -> list[Row]:
    """The polynomial laws fitted on the first training tokens only; asked of the first split."""
    few, z = train[:budget], reduced[transition]
    step = reduced[transition + 1] - z
    rows = []
    for degree, law, n_coefficients in (
        (1, "affine", 1 + z.shape[1]),
        (2, "quadratic", 1 + z.shape[1] + z.shape[1] * (z.shape[1] + 1) // 2),
    ):
        if len(few) > n_coefficients:
            both = polynomial(z[few], step[few], z[test], degree)
            told = zip(("diagonal", "full"), both, strict=True)
            rows += [score(step[test], law, noise, prediction) for noise, prediction in told]
    return rows


def analyse(
    states: np.ndarray,
    *,
    widths: tuple[int, ...],
    seeds: tuple[int, ...] = (0, 1, 2),
    k: int = 64,
    sweep: tuple[int, ...] = (64, 256, 1024),
    n_resamples: int = 1000,
    sample: np.ndarray | None = None,
) -> dict[str, list[Row]]:
    """Tables law_scores, law_scores_equal_budget, law_contests, locality and basis, as lists of rows."""
    tables: dict[str, list[Row]] = {
        name: [] for name in ("law_scores", "law_scores_equal_budget", "law_contests", "locality", "basis")
    }
    rng = np.random.default_rng(0)
    for width in widths:
        basis = shared_basis(states, width, sample)
        retained = [basis.explained.sum(), *retained_by_state(states, basis.components)]
        for state, share in zip((None, *range(len(states))), retained, strict=True):
            tables["basis"].append({"n_components": width, "state": state, "retained": share})
        for seed in seeds:
            train, test = split(seed, states.shape[1])
            budget = min(9549, len(train) // 2)
            for transition in range(len(states) - 1):
                where = {"n_components": width, "seed": seed, "transition": transition}
                laws = predictions(basis.reduced, transition, train, test, k)
                step = basis.reduced[transition + 1][test] - basis.reduced[transition][test]
                size = {"n_train": len(train), "n_test": len(test)}
                tables["law_scores"] += [where | score(step, *key, told) | size for key, told in laws.items()]
                if seed == seeds[0]:
                    few = equal_budget(basis.reduced, transition, train, test, budget)
                    tables["law_scores_equal_budget"] += [where | row | size | {"n_train": budget} for row in few]
                tables["law_contests"] += [where | row for row in contests(step, laws, n_resamples, rng)]
                for size_k in sweep:
                    if size_k <= len(train):
                        row = locality(basis.reduced, transition, train, test, size_k)
                        tables["locality"].append(where | {"k": size_k} | row)
    return tables
