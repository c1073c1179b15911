import threading

import numpy as np
import pytest

from layerflow.numerics.threads import n_threads, one_blas_thread, side_by_side


def test_results_come_in_order():
    assert list(side_by_side(lambda x: x * x, range(20))) == [x * x for x in range(20)]


def test_blas_has_one_thread_in_each_piece_of_work_and_as_many_as_before_afterwards():
    before = n_threads()
    assert set(side_by_side(lambda _: n_threads(), range(4))) == {1}
    assert n_threads() == before


def test_pieces_of_work_overlap():
    if n_threads() < 2:
        pytest.skip("one processor has nothing to overlap")
    both = threading.Barrier(2, timeout=30)
    list(side_by_side(lambda _: both.wait(), range(2)))


def test_work_nests():
    with one_blas_thread():
        assert list(side_by_side(lambda x: sum(side_by_side(lambda y: y, range(x))), range(5))) == [0, 0, 1, 3, 6]


def test_an_error_reaches_the_caller_and_gives_the_threads_back():
    before = n_threads()
    with pytest.raises(np.linalg.LinAlgError):
        list(side_by_side(np.linalg.inv, [np.eye(2), np.zeros((2, 2))]))
    assert n_threads() == before
