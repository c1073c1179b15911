"""Whole pieces of work side by side, one a thread, with BLAS held to one thread in each.

Matrices of this package are mostly too small for BLAS to share well among threads, and on a busy machine its threads
wait for each other many times longer than they work.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import scipy.linalg  # noqa: F401  # loads SciPy's own BLAS, which the controller must find
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")


def n_threads() -> int:
    """Threads that BLAS would use now; 1 inside `one_blas_thread`, and so inside a piece of work."""
    return max([library["num_threads"] for library in _blas().info()], default=1)


def one_blas_thread() -> AbstractContextManager[Any]:
    """Hold BLAS to one thread for the length of a ``with`` block; for the whole process."""
    return _blas().limit(limits=1)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``work(item)`` for each item, in order, working on as many at a time as BLAS has threads.

    The results are those of a plain loop, bit for bit, as long as pieces of work do not write to the same place.
    """
    workers = n_threads()
    with one_blas_thread(), ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, items)


@cache
def _blas() -> ThreadpoolController:
    # Looking for the libraries takes milliseconds, so they are looked for once.
    return ThreadpoolController().select(user_api="blas")
