"""Models of ten families, loaded from a folder as a user would: their states are what the specification says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerflow.data.models import LanguageModel, load_model, probe
from tests import tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.save_model(root / family, family) for family in tiny.FAMILIES}


@pytest.fixture(scope="session", params=sorted(tiny.FAMILIES))
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[str, LanguageModel]:
    return request.param, load_model(str(folders[request.param]), device="cpu")


def random_rows(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(2, tiny.VOCABULARY_SIZE, length)) for length in lengths]


def test_probe_passes(loaded: tuple[str, LanguageModel]) -> None:
    _, model = loaded
    report = probe(model)
    assert report.n_states == tiny.N_BLOCKS + 1
    assert report.last_state == 0
    assert report.head_input == 0
    assert report.padding < 1e-5
    assert report.causality < 1e-5


def test_states_are_those_of_hugging_face(loaded: tuple[str, LanguageModel]) -> None:
    family, model = loaded
    (row,) = random_rows([12])
    reference = tiny.make_model(family)(input_ids=row[None], output_hidden_states=True).hidden_states
    states = model.states(row[None])
    assert len(states) == model.n_states == tiny.N_BLOCKS + 1
    for ours, theirs in zip(states, reference, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask_given", [True, False])
def test_padded_batch_is_one_by_one(loaded: tuple[str, LanguageModel], mask_given: bool) -> None:
    _, model = loaded
    rows = random_rows([3, 20, 11, 1, 20])
    ids = torch.full((5, 20), model.pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    batch = model.states(ids, mask if mask_given else None)
    for index, row in enumerate(rows):
        for together, alone in zip(batch, model.states(row[None]), strict=True):
            torch.testing.assert_close(together[index, : len(row)], alone[0], rtol=0, atol=1e-5)
    # The rows are not so much alike that a mix-up would go unseen.
    assert float((batch[1][1] - batch[1][4]).abs().max()) > 0.1
