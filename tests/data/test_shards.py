"""Shards, in any number and order, add up to the run of one process."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny

from layerflow import Trajectories
from layerflow.data.collect import collect
from layerflow.data.corpus import open_corpus
from layerflow.data.documents import Corpus
from layerflow.data.models import LanguageModel, load_model
from layerflow.data.options import CollectOptions, Shard
from layerflow.data.shards import merge
from layerflow.errors import InputError

OPTIONS = CollectOptions(max_tokens=40, batch_tokens=200, n_samples=40, min_chars=10)
N_ROWS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A model for which some positions are sinks and one row is not finite."""
    model = load_model(str(tiny.save_model(tmp_path_factory.mktemp("model"), "llama")), device="cpu")
    with torch.no_grad():
        weight = model.causal.get_input_embeddings().weight
        weight[model.tokenizer(tiny.SENTENCE)["input_ids"][3]] *= 100.0
        weight[model.tokenizer.eos_token_id, 0] = float("nan")
    return model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    documents = [text[: 20 + 9 * index] for index, text in enumerate(tiny.make_documents(N_ROWS))]
    documents[11] += "<|end|>"
    return open_corpus(str(tiny.write_lines(tmp_path_factory.mktemp("corpus") / "corpus.txt", documents)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: LanguageModel, corpus: Corpus) -> Trajectories:
    return Trajectories.load(collect(model, corpus, OPTIONS, out=tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def shards(
    tmp_path_factory: pytest.TempPathFactory, model: LanguageModel, corpus: Corpus
) -> Callable[[int], list[Path]]:
    root = tmp_path_factory.mktemp("shards")

    def collected(count: int) -> list[Path]:
        return [
            root / f"{index}-of-{count}"
            if (root / f"{index}-of-{count}").exists()
            else collect(model, corpus, OPTIONS, out=root / f"{index}-of-{count}", shard=Shard(index, count))
            for index in range(1, count + 1)
        ]

    return collected


@pytest.mark.parametrize("count", [1, 2, 3, N_ROWS + 1])
def test_merged_shards_are_one_run(
    shards: Callable[[int], list[Path]], whole: Trajectories, tmp_path: Path, count: int
) -> None:
    folders = shards(count)
    np.random.default_rng(count).shuffle(folders)  # type: ignore[arg-type]
    merged = Trajectories.load(merge(folders, tmp_path / "run"))
    for name in ("token_ids", "counts", "tokens"):
        assert np.array_equal(getattr(merged, name), getattr(whole, name))
    assert np.array_equal(merged.halves.count_a, whole.halves.count_a)
    assert np.array_equal(merged.samples.rows, whole.samples.rows)
    assert np.array_equal(merged.samples.sinks, whole.samples.sinks)
    assert np.array_equal(merged.sinks.rows, whole.sinks.rows)
    assert np.array_equal(merged.sinks.counts, whole.sinks.counts)
    assert np.array_equal(merged.sinks.count_a, whole.sinks.count_a)
    pairs = [
        (merged.states, whole.states),
        (merged.halves.a, whole.halves.a),
        (merged.halves.b, whole.halves.b),
        (merged.samples.states, whole.samples.states),
        (merged.sinks.states, whole.sinks.states),
        (merged.sinks.half_a, whole.sinks.half_a),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
    computed = {"norms", "norms_without_sinks", "checksums"}
    for key in merged.manifest.keys() | whole.manifest.keys():
        assert key in computed or merged.manifest[key] == whole.manifest[key], key
    assert [record.n_sinks for record in merged.norms] == [record.n_sinks for record in whole.norms]
    assert not (tmp_path / "run" / "sums").exists()


def test_merging_order_does_not_change_a_bit(shards: Callable[[int], list[Path]], tmp_path: Path) -> None:
    folders = shards(3)
    one, other = merge(folders, tmp_path / "one"), merge(folders[::-1], tmp_path / "other")
    for path in sorted((one / "trajectories").iterdir()):
        assert path.read_bytes() == (other / "trajectories" / path.name).read_bytes()


def test_what_does_not_belong_together_is_refused(
    shards: Callable[[int], list[Path]],
    whole: Trajectories,
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
) -> None:
    two, three = shards(2), shards(3)
    out = tmp_path / "run"
    twin = Path(shutil.copytree(three[0], tmp_path / "twin"))
    with pytest.raises(InputError, match=r"shards 2/3 are missing"):
        merge([three[0], three[2]], out)
    with pytest.raises(InputError, match=r"twin and .*1-of-3 are both shard 1/3"):
        merge([*three, twin], out)
    with pytest.raises(InputError, match=r"are both shard 1/2"):
        merge([two[0], *two], out)
    with pytest.raises(InputError, match=r"shards of \[2, 3\] parts do not belong together"):
        merge([two[0], three[1], three[2]], out)
    other = CollectOptions(max_tokens=40, batch_tokens=200, n_samples=40, min_chars=10, seed=1)
    stranger = collect(model, corpus, other, out=tmp_path / "stranger", shard=Shard(2, 2))
    with pytest.raises(InputError, match=r"stranger holds a collection with options\.seed 1, not 0"):
        merge([two[0], stranger], out)
    finished = collect(model, corpus, OPTIONS, out=tmp_path / "finished")
    with pytest.raises(InputError, match=r"finished is not a finished shard"):
        merge([finished, two[1]], out)
    with pytest.raises(InputError, match="is not a run"):
        merge([tmp_path / "nowhere"], out)
    assert not out.exists()
    with pytest.raises(InputError, match="is not an empty directory"):
        merge(two, finished)


def test_a_damaged_shard_is_named_and_nothing_is_left(shards: Callable[[int], list[Path]], tmp_path: Path) -> None:
    good, damaged = shards(2)[0], Path(shutil.copytree(shards(2)[1], tmp_path / "damaged"))
    sums = damaged / "sums" / "sums.safetensors"
    sums.write_bytes(sums.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"damaged/sums/sums.safetensors is not a whole safetensors file"):
        merge([good, damaged], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_shard_is_no_run(shards: Callable[[int], list[Path]]) -> None:
    with pytest.raises(InputError, match="shard"):
        Trajectories.load(shards(2)[0])


@pytest.mark.parametrize("text", ["2", "0/2", "3/2", "a/b", "1/", "-1/2", "²/3"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shard"):
        Shard.parse(text)


def test_shards_deal_every_row_out_once() -> None:
    rows = np.concatenate([Shard.parse(f"{index}/4").rows(10) for index in range(1, 5)])
    assert sorted(rows.tolist()) == list(range(10))
