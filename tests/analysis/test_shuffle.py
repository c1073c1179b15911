import numpy as np
import pytest

from layerflow.analysis.shuffle import derangement
from layerflow.errors import InputError


@pytest.mark.parametrize("n", [2, 3, 50])
def test_derangement_is_a_permutation_that_moves_every_token(n: int) -> None:
    partner = derangement(n, np.random.default_rng(n))
    assert sorted(partner) == list(range(n))
    assert (partner != np.arange(n)).all()


def test_every_pair_of_different_tokens_is_equally_likely() -> None:
    rng = np.random.default_rng(0)
    draws = 6_000
    counts = np.zeros((4, 4))
    for _ in range(draws):
        counts[np.arange(4), derangement(4, rng)] += 1
    expected = draws / 3
    off_diagonal = counts[~np.eye(4, dtype=bool)]
    assert (np.abs(off_diagonal - expected) < 5 * np.sqrt(expected * 2 / 3)).all()


def test_one_token_cannot_be_shuffled() -> None:
    with pytest.raises(InputError, match="at least 2"):
        derangement(1, np.random.default_rng(0))
