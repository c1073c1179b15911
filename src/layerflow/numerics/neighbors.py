"""Exact nearest neighbours by brute force, in bounded memory.

A float32 matrix product ranks all points for a tile of queries; a few more candidates than asked for are kept,
their distances are recomputed in float64 from coordinate differences, and a rounding-error bound certifies, query
by query, that nothing outside the candidates could be nearer. Queries that fail (ties, and outliers whose float32
scores are too coarse) are searched again in float64. The result is therefore the float64 one.

Candidates are found without sorting whole rows: the points fall into groups, and the `size`-th smallest of the
groups' minima is at least the `size`-th smallest score, so one comparison leaves a short list. Tiles run in as
many threads as BLAS would use. Tried and dropped: faiss-cpu (25,268 points, k = 110: a third slower at d = 16, a tenth
faster at d = 64, and no bound on its error), `numpy.partition` of whole rows (four times slower), trees (slow above 8
dimensions).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

from layerflow.errors import InputError
from layerflow.numerics.threads import n_threads, side_by_side

_SPARE = 16  # candidates kept beyond k: enough to certify all but ties and outliers
_TILE_SCORES = 1 << 21  # scores in one tile, 8 MiB of float32
_MAX_GROUP = 64
_FAR = 1e38  # beyond all scores, which end at 1e31; infinity times the zeros BLAS pads with would be invalid
_LARGEST = 1e150  # whose square float64 still holds


@dataclass(frozen=True)
class Neighbors:
    """The nearest points of each query, nearest first; equal distances in the order of their indices.

    Shapes: `indices` (m, k) into the points, `distances` (m, k), Euclidean, in the points' units.
    """

    indices: Int64[np.ndarray, "m k"]
    distances: Float64[np.ndarray, "m k"]


@dataclass(frozen=True)
class NeighborMeans:
    """Mean value over the k nearest points of each query, for several k at once.

    Shapes: `ks` (s,) ascending, `distances` (m, s) to the k-th nearest point, `means` (m, s, c).
    """

    ks: tuple[int, ...]
    distances: Float64[np.ndarray, "m s"]
    means: Float64[np.ndarray, "m s c"]


def nearest(
    points: Float[np.ndarray, "n d"],
    k: int,
    *,
    queries: Float[np.ndarray, "m d"] | None = None,
    exclude_self: bool = True,
) -> Neighbors:
    """Find the k nearest points of each query, or of each point.

    Without `queries` the points are their own queries, and with `exclude_self` a point is not its own neighbour
    (other points at distance 0 are). The answer is that of float64 arithmetic; ties go to the lower index.

    Cost: m n d multiplications; memory O(n d + m k) and one tile of scores a thread.

    Raises:
        InputError: k is below 1 or above the number of points on offer, or a coordinate is not finite.
    """
    points = _finite(points, "points")
    own = None
    if queries is None:
        queries = points
        own = np.arange(len(points)) if exclude_self else None
    else:
        queries = _finite(queries, "queries")
    return _search(points, queries, own, k)


def restrict(
    neighbors: Neighbors,
    points: Float[np.ndarray, "n d"],
    members: Bool[np.ndarray, " n"],
    k: int,
    *,
    rows: Int[np.ndarray, " m"] | None = None,
) -> Neighbors:
    """Read the k nearest members of a subset off the neighbour lists of the whole cloud.

    `neighbors` is `nearest(points, K)` for some K > k; the k nearest members of a point are the first k members in
    its list. A list that holds fewer is searched again, exactly, within the subset. Indices stay those of the
    whole cloud. `rows` selects the points whose neighbours are wanted (all by default).

    Raises:
        InputError: the subset has fewer than k members besides the query.
    """
    rows = np.arange(len(neighbors.indices)) if rows is None else rows
    listed = neighbors.indices[rows]
    inside = members[listed]
    rank = np.cumsum(inside, axis=1)
    enough = rank[:, -1] >= k
    keep = inside & (rank <= k) & enough[:, None]
    indices = np.empty((len(rows), k), dtype=np.int64)
    distances = np.empty((len(rows), k))
    indices[enough] = listed[keep].reshape(-1, k)
    distances[enough] = neighbors.distances[rows][keep].reshape(-1, k)
    if not enough.all():
        again = _search_members(_finite(points, "points"), members, rows[~enough], k)
        indices[~enough], distances[~enough] = again.indices, again.distances
    return Neighbors(indices, distances)


def neighbor_means(
    points: Float[np.ndarray, "n d"],
    values: Float[np.ndarray, "n c"],
    queries: Float[np.ndarray, "m d"],
    ks: tuple[int, ...],
) -> NeighborMeans:
    """Average `values` over the k nearest points of each query, for each k, in one search.

    Only the members on either side of each k-th place are ranked in float64, and only as many as the error bound
    calls for; the others' order does not matter. So this is far cheaper than `nearest` at k = 1024, and as exact.

    Raises:
        InputError: ks is empty, not ascending, below 1 or above the number of points; a coordinate is not finite.
    """
    points = _finite(points, "points")
    queries = _finite(queries, "queries")
    values = np.asarray(values, dtype=np.float64)
    if not ks or list(ks) != sorted(set(ks)):
        raise InputError(f"ks is {ks}: it must be ascending without repeats; give for example (64, 256, 1024)")
    _check_k(ks[0], len(points))
    _check_k(ks[-1], len(points))
    cloud = _Cloud(points, min(ks[-1] + _SPARE, len(points)))
    distances = np.empty((len(queries), len(ks)))
    means = np.empty((len(queries), len(ks), values.shape[1]))

    def tile(start: int, stop: int, scratch: "_Scratch") -> None:
        members, distances[start:stop] = _members(cloud, queries[start:stop], ks, scratch)
        means[start:stop] = _nested_means(members, values, ks)

    _in_tiles(tile, len(queries), cloud)
    return NeighborMeans(tuple(ks), distances, means)


class _Cloud:
    """Points laid out for ranking: rows -2 y, |y|² and 1, so that (x, 1, |x|²) @ plane = |x - y|².

    Coordinates are centred on their medians and divided by the median norm, which is where float32 is finest for
    the bulk whatever the outliers do. Columns are padded to whole groups with points farther than any other.
    """

    def __init__(self, points: Float64[np.ndarray, "n d"], size: int) -> None:
        n, d = points.shape
        self.points = points
        self.size = size
        self.center = np.median(points, axis=0)
        norms = np.linalg.norm(points - self.center, axis=1)
        # The second term only keeps squares of absurd outliers inside float32's range.
        self.scale = float(max(np.median(norms), norms.max() * 1e-15)) or 1.0
        group = int(np.clip(n // (2 * (size + 1)), 1, _MAX_GROUP))
        self.n_groups = -(-n // group)
        self.plane = np.zeros((d + 2, group * self.n_groups), dtype=np.float32)
        self.plane[:d, :n] = -2 * self.scaled(points).T
        self.plane[d] = _FAR
        self.plane[d, :n] = (norms / self.scale) ** 2
        self.plane[d + 1] = 1.0

    def scaled(self, points: Float64[np.ndarray, "m d"]) -> Float64[np.ndarray, "m d"]:
        return np.asarray((points - self.center) / self.scale)

    def error(self, norm: Float64[np.ndarray, " m"], reach: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
        """Bound the rounding error of the scores of every point that could lie within `reach` of a query.

        Such a point's norm is at most `norm + reach` (triangle inequality). A float32 dot product of length
        d + 2 errs by at most (d + 2) 2⁻²⁴ times the sum of its terms' sizes, (|x| + |y|)² here; the rest covers
        rounded inputs.
        """
        return np.asarray((len(self.plane) + 8) * 2.0**-24 * (2 * norm + reach) ** 2 + 1e-30)


class _Scratch:
    """The buffers one thread reuses for all its tiles; fresh ones would cost as much in page faults as the sums."""

    def __init__(self, rows: int, cloud: _Cloud) -> None:
        self.scores = np.empty((rows, cloud.plane.shape[1]), dtype=np.float32)
        self.below = np.empty(self.scores.shape, dtype=np.bool_)


def _search(
    points: Float64[np.ndarray, "n d"],
    queries: Float64[np.ndarray, "m d"],
    own: Int64[np.ndarray, " m"] | None,
    k: int,
) -> Neighbors:
    """Search in tiles; `own` holds each query's own point, never its neighbour (-1: it is not among the points)."""
    available = len(points) - (own is not None)
    _check_k(k, available)
    cloud = _Cloud(points, min(k + _SPARE, available))
    indices = np.empty((len(queries), k), dtype=np.int64)
    distances = np.empty((len(queries), k))

    def tile(start: int, stop: int, scratch: _Scratch) -> None:
        mine = None if own is None else own[start:stop]
        found = _nearest_in_tile(cloud, queries[start:stop], mine, k, scratch)
        indices[start:stop], distances[start:stop] = found

    _in_tiles(tile, len(queries), cloud)
    return Neighbors(indices, distances)


def _search_members(
    points: Float64[np.ndarray, "n d"], members: Bool[np.ndarray, " n"], rows: Int[np.ndarray, " m"], k: int
) -> Neighbors:
    subset = np.flatnonzero(members)
    own = np.where(members[rows], np.searchsorted(subset, rows), -1)
    found = _search(points[subset], points[rows], own if (own >= 0).any() else None, k)
    return Neighbors(subset[found.indices], found.distances)


def _nearest_in_tile(
    cloud: _Cloud,
    queries: Float64[np.ndarray, "m d"],
    own: Int64[np.ndarray, " m"] | None,
    k: int,
    scratch: _Scratch,
) -> tuple[Int64[np.ndarray, "m k"], Float64[np.ndarray, "m k"]]:
    keys, norm = _candidates(cloud, queries, own, scratch)
    columns = np.sort(_columns(keys), axis=1)  # so that a stable sort by distance keeps ties in order of index
    squared = _squared_distances(cloud.points, queries, columns)
    order = np.argsort(squared, axis=1, kind="stable")[:, :k]
    columns = np.take_along_axis(columns, order, axis=1)
    squared = np.take_along_axis(squared, order, axis=1)
    if cloud.size < len(cloud.points) - (own is not None):
        reach = np.sqrt(squared[:, -1]) / cloud.scale
        certified = reach**2 < _scores(keys[:, -1]) - cloud.error(norm, reach)
        for row in np.flatnonzero(~certified):
            mine = -1 if own is None else int(own[row])
            columns[row], squared[row] = _exact(cloud.points, queries[row], mine, k)
    return columns, np.sqrt(squared)


def _members(
    cloud: _Cloud, queries: Float64[np.ndarray, "m d"], ks: tuple[int, ...], scratch: _Scratch
) -> tuple[Int64[np.ndarray, "m k"], Float64[np.ndarray, "m s"]]:
    """Order each query's candidates so that, for each k, the first k are its k nearest points."""
    keys, norm = _candidates(cloud, queries, None, scratch)
    columns = _columns(keys)
    certified = np.ones(len(queries), dtype=np.bool_)
    reached = np.empty((len(queries), len(ks)))
    for place, k in enumerate(ks):
        low, high = max(k - _SPARE, 0), min(k + _SPARE, cloud.size)
        window = np.sort(columns[:, low:high], axis=1)
        squared = _squared_distances(cloud.points, queries, window)
        order = np.argsort(squared, axis=1, kind="stable")
        columns[:, low:high] = np.take_along_axis(window, order, axis=1)
        reached[:, place] = np.take_along_axis(squared, order[:, [k - 1 - low]], axis=1)[:, 0]
        reach = np.sqrt(reached[:, place]) / cloud.scale
        error = cloud.error(norm, reach)
        if low:
            certified &= np.maximum(_scores(keys[:, low - 1]), 0) + error < reach**2
        if high < len(cloud.points):
            certified &= reach**2 < _scores(keys[:, high - 1]) - error
    for row in np.flatnonzero(~certified):
        columns[row, : ks[-1]], squared = _exact(cloud.points, queries[row], -1, ks[-1])
        reached[row] = squared[np.array(ks) - 1]
    return columns[:, : ks[-1]], np.sqrt(reached)


def _nested_means(
    members: Int64[np.ndarray, "m k"], values: Float64[np.ndarray, "n c"], ks: tuple[int, ...]
) -> Float64[np.ndarray, "m s c"]:
    """Average the first k members' values for each k: a sparse product sums the rings, a running sum the discs."""
    m, largest = members.shape
    starts = np.arange(m)[:, None] * largest + np.array((0, *ks[:-1]))
    pointers = np.append(starts.ravel(), m * largest)
    choose = csr_array((np.ones(m * largest), members.ravel(), pointers), shape=(m * len(ks), len(values)))
    rings = (choose @ values).reshape(m, len(ks), values.shape[1])
    return np.asarray(np.cumsum(rings, axis=1) / np.array(ks)[:, None])


def _candidates(
    cloud: _Cloud, queries: Float64[np.ndarray, "m d"], own: Int64[np.ndarray, " m"] | None, scratch: _Scratch
) -> tuple[Int64[np.ndarray, "m c"], Float64[np.ndarray, " m"]]:
    """Rank the `cloud.size` points of lowest score for each query; also return the queries' scaled norms.

    A rank key is the score's bits above the column's: sorting such integers is several times faster than an argsort.
    Scores are in order where they are not negative. Rounding makes negatives of distances near 0; where they
    decide anything, `reach² < score - error` fails and the query is searched again.
    """
    m, size, width = len(queries), cloud.size, cloud.plane.shape[1]
    scaled = cloud.scaled(queries)
    norm = np.linalg.norm(scaled, axis=1)
    left = np.column_stack([scaled, np.ones(m), norm**2]).astype(np.float32)
    scores = np.matmul(left, cloud.plane, out=scratch.scores[:m])
    if own is not None:
        mine = np.flatnonzero(own >= 0)
        scores[mine, own[mine]] = np.inf
    minima = scores.reshape(m, -1, cloud.n_groups).min(axis=1)
    ceiling = np.partition(minima, size - 1, axis=1)[:, size - 1 : size]
    places = np.flatnonzero(np.less_equal(scores, ceiling, out=scratch.below[:m]))
    bounds = np.searchsorted(places, np.arange(m + 1) * width)
    counts = np.diff(bounds)
    keys = scores.ravel()[places].view(np.int32).astype(np.int64)
    keys <<= 32
    keys |= places
    keys -= np.repeat(np.arange(m) * width, counts)
    padded = np.full((m, counts.max()), np.iinfo(np.int64).max)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = keys
    padded.sort(axis=1)
    return padded[:, :size], norm


def _columns(keys: Int64[np.ndarray, "*s"]) -> Int64[np.ndarray, "*s"]:
    return keys & 0xFFFFFFFF


def _scores(keys: Int64[np.ndarray, "*s"]) -> Float64[np.ndarray, "*s"]:
    return (keys >> 32).astype(np.int32).view(np.float32).astype(np.float64)


def _squared_distances(
    points: Float64[np.ndarray, "n d"], queries: Float64[np.ndarray, "m d"], columns: Int64[np.ndarray, "m c"]
) -> Float64[np.ndarray, "m c"]:
    difference = np.take(points, columns, axis=0)
    difference -= queries[:, None]
    return np.asarray(np.einsum("mcd,mcd->mc", difference, difference))


def _exact(
    points: Float64[np.ndarray, "n d"], query: Float64[np.ndarray, " d"], own: int, k: int
) -> tuple[Int64[np.ndarray, " k"], Float64[np.ndarray, " k"]]:
    """Search one query in float64, ties by index."""
    squared = cdist(query[None], points, "sqeuclidean")[0]
    if own >= 0:
        squared[own] = np.inf
    near = np.flatnonzero(squared <= np.partition(squared, k - 1)[k - 1])
    near = near[np.argsort(squared[near], kind="stable")][:k]
    return near, squared[near]


def _in_tiles(tile: Callable[[int, int, _Scratch], None], n_queries: int, cloud: _Cloud) -> None:
    """Run `tile(start, stop, scratch)` over all queries, one thread a BLAS thread, BLAS itself held to one."""
    rows = int(np.clip(_TILE_SCORES // cloud.plane.shape[1], 1, 256))
    starts = range(0, n_queries, rows)
    workers = n_threads()

    def work(worker: int) -> None:
        scratch = _Scratch(rows, cloud)
        for start in starts[worker::workers]:
            tile(start, min(start + rows, n_queries), scratch)

    for _ in side_by_side(work, range(workers)):
        pass


def _finite(points: Float[np.ndarray, "n d"], name: str) -> Float64[np.ndarray, "n d"]:
    points = np.ascontiguousarray(points, dtype=np.float64)
    unusable = int((~(np.abs(points) < _LARGEST)).sum())
    if unusable:
        raise InputError(f"{name} hold {unusable} coordinates non-finite or beyond {_LARGEST:g}: leave those rows out")
    return points


def _check_k(k: int, available: int) -> None:
    if not 1 <= k <= available:
        raise InputError(f"k is {k}: it must lie between 1 and the {available} points on offer; choose a smaller k")
