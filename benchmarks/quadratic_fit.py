"""Quadratic fit at d = 16, 20,000 rows: layerflow against scikit-learn, same coefficients (SPEC section 8).

Run: python benchmarks/quadratic_fit.py
"""

import time
from collections.abc import Callable

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import PolynomialFeatures

from layerflow.numerics.least_squares import fit_polynomial

ROWS, WIDTH, REPEATS = 20_000, 16, 9


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Time both, in turns so that a busy machine slows both alike, and compare coefficients."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(ROWS, WIDTH)) @ rng.normal(size=(WIDTH, WIDTH))
    dz = np.tanh(z @ rng.normal(size=(WIDTH, WIDTH)) / 10) + rng.normal(size=(ROWS, WIDTH))

    def theirs() -> np.ndarray:
        fit = LinearRegression().fit(PolynomialFeatures(2, include_bias=False).fit_transform(z), dz)
        return np.vstack([fit.intercept_, fit.coef_.T])

    def ours() -> np.ndarray:
        return fit_polynomial(z, dz).coefficients

    gap = np.abs(ours() - theirs()).max()
    times = np.array([(seconds(theirs), seconds(ours)) for _ in range(REPEATS)])
    theirs_s, ours_s = np.median(times, axis=0)
    print(f"quadratic fit, {ROWS:,} rows, d = {WIDTH}: scikit-learn {theirs_s:.3f} s, layerflow {ours_s:.3f} s")
    print(f"ratio {np.median(times[:, 0] / times[:, 1]):.1f} (reach 2), coefficients differ by {gap:.1e} (reach 1e-8)")


if __name__ == "__main__":
    main()
