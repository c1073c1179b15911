"""Exact neighbours, 25,268 x 25,268, d = 16, k = 110: layerflow against scikit-learn (SPEC section 8).

Run: python benchmarks/neighbors.py [--sweep]
"""

import sys
import time
from collections.abc import Callable

import numpy as np
from sklearn.neighbors import NearestNeighbors

from layerflow.numerics.neighbors import nearest, neighbor_means, restrict

POINTS, WIDTHS, K = 25_268, (8, 16, 32, 64), 110


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cloud(width: int) -> np.ndarray:
    """Draw heavy-tailed points with a decaying spectrum, as reduced states have."""
    return np.random.default_rng(0).standard_t(5, size=(POINTS, width)) * np.geomspace(3, 0.3, width)


def compare() -> None:
    """Time both in turns so that a busy machine slows both alike, and compare what they found."""
    points = cloud(16)
    oracle = NearestNeighbors(n_neighbors=K, algorithm="brute").fit(points)
    found, (_, indices) = nearest(points, K), oracle.kneighbors()
    same = np.mean(found.indices == indices)
    times = np.array([(seconds(oracle.kneighbors), seconds(lambda: nearest(points, K))) for _ in range(5)])
    theirs, ours = np.median(times, axis=0)
    print(f"neighbours, {POINTS:,} points, d = 16, k = {K}: scikit-learn {theirs:.2f} s, layerflow {ours:.2f} s")
    print(f"ratio {np.median(times[:, 0] / times[:, 1]):.1f}, same neighbours in {100 * same:.4f} % of places")


def sweep() -> None:
    """Time what the study asks for at every width: one search of the cloud, and of one split's held-out states."""
    shuffled = np.random.default_rng(0).permutation(POINTS)
    train, test = shuffled[: POINTS * 4 // 5], shuffled[POINTS * 4 // 5 :]
    members = np.isin(np.arange(POINTS), train)
    for width in WIDTHS:
        points = cloud(width)
        steps = np.tanh(points)
        whole = seconds(lambda points=points: nearest(points, K))
        found = nearest(points, K)
        read = seconds(lambda points=points, found=found: restrict(found, points, members, 64, rows=test))
        means = seconds(
            lambda points=points, steps=steps: neighbor_means(
                points[train], steps[train], points[test], (64, 256, 1024)
            )
        )
        print(f"d = {width}: whole cloud {whole:.2f} s, split read off {read:.3f} s, its k sweep {means:.2f} s")


if __name__ == "__main__":
    compare()
    if "--sweep" in sys.argv:
        sweep()
