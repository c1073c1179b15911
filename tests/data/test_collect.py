"""The collector against plain loops over documents, on tiny models of ten families."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import plain, tiny

from layerflow import Trajectories
from layerflow.data.accumulator import Accumulator
from layerflow.data.collect import collect
from layerflow.data.corpus import open_corpus
from layerflow.data.documents import Corpus
from layerflow.data.models import LanguageModel, load_model
from layerflow.data.options import CollectOptions
from layerflow.data.partial import Partial
from layerflow.data.reduce import Reduced
from layerflow.errors import InputError

OPTIONS = {"max_tokens": 40, "batch_tokens": 200, "n_samples": 30, "seed": 3}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LanguageModel]:
    folders = {family: tiny.save_model(tmp_path_factory.mktemp(family), family) for family in tiny.FAMILIES}
    return lambda family: load_model(str(folders[family]), device="cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Rows of many lengths, one with the text of a special token in it."""
    documents = [text[: 12 + 9 * index] for index, text in enumerate(tiny.make_documents(30))]
    documents[4] = documents[4][:20] + "<|end|>" + documents[4][20:]
    return open_corpus(str(tiny.write_lines(tmp_path_factory.mktemp("corpus") / "corpus.txt", documents)))


def run(model: LanguageModel, corpus: Corpus, out: Path, **options: Any) -> Trajectories:
    collect(model, corpus, CollectOptions(**{"min_chars": 10, **OPTIONS, **options}), out=out)
    return Trajectories.load(out)


def found_in(model: LanguageModel, corpus: Corpus, medians: list[float], **options: Any) -> list[plain.Occurrence]:
    return plain.occurrences(
        model.causal,
        model.tokenizer,
        list(corpus.documents()),
        special_ids=set(model.special_ids),
        max_tokens=OPTIONS["max_tokens"],
        medians=medians,
        seed=OPTIONS["seed"],
        **options,
    )


def assert_equal(trajectories: Trajectories, means: plain.Means, tolerance: float = 1e-5) -> None:
    """Check everything but samples; the tolerance is relative to the largest entry of each state."""
    assert trajectories.token_ids is not None
    assert trajectories.halves is not None
    assert trajectories.token_ids.tolist() == means.token_ids
    assert trajectories.counts.tolist() == means.counts.tolist()
    assert trajectories.halves.count_a.tolist() == means.count_a.tolist()
    assert trajectories.halves.count_b.tolist() == (means.counts - means.count_a).tolist()
    pairs = [
        *zip(trajectories.states, means.states, strict=True),
        (trajectories.halves.a, means.half_a),
        (trajectories.halves.b, means.half_b),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@pytest.mark.parametrize("batch_tokens", [1, 200])
def test_collection_is_a_plain_loop(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path, family: str, batch_tokens: int
) -> None:
    model = load(family)
    collected = run(model, corpus, tmp_path / "run", batch_tokens=batch_tokens)
    found = found_in(model, corpus, collected.manifest["sinks"]["medians"])
    assert_equal(collected, plain.means(found, 5))
    assert_equal(collected.without_sinks(5), without_sinks(found))


def without_sinks(found: list[plain.Occurrence]) -> plain.Means:
    # A token is there when it occurs 5 times with sinks, and stays when it does without.
    return plain.means([occurrence for occurrence in found if not occurrence.is_sink], 5)


def test_any_batching_gives_the_same(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = load("gpt_neox")
    runs = [
        run(model, corpus, tmp_path / str(batch_tokens), batch_tokens=batch_tokens)
        for batch_tokens in (1, 64, 333, 10_000)
    ]
    for other in runs[1:]:
        assert np.array_equal(other.counts, runs[0].counts)
        assert np.array_equal(other.halves.count_a, runs[0].halves.count_a)
        assert np.array_equal(other.samples.rows, runs[0].samples.rows)
        for ours, theirs in ((other.states, runs[0].states), (other.samples.states, runs[0].samples.states)):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def with_loud_token(model: LanguageModel, corpus: Corpus, factor: float) -> LanguageModel:
    """Scale the embedding of a token that occurs in the middle of rows; returns the model, changed."""
    ids = model.tokenizer(next(corpus.documents()), add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.causal.get_input_embeddings().weight[ids[3]] *= factor
    return model


def test_sinks_are_apart(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = with_loud_token(load("llama"), corpus, 100.0)
    collected = run(model, corpus, tmp_path / "run")
    found = found_in(model, corpus, collected.manifest["sinks"]["medians"])
    assert_equal(collected, plain.means(found, 5))
    assert_equal(collected.without_sinks(5), without_sinks(found), 1e-4)
    kept = set(collected.token_ids)
    sinks = [occurrence for occurrence in found if occurrence.is_sink and occurrence.target in kept]
    assert any(occurrence.position > 0 for occurrence in sinks)
    assert any(occurrence.position == 0 for occurrence in sinks)
    assert collected.sinks.counts.sum() == len(sinks)
    medians = np.array(collected.manifest["sinks"]["medians"])
    norms = np.array([np.linalg.norm(o.states, axis=1) for o in found if o.target in kept]).T
    for record, of_state, median in zip(collected.norms, norms, medians, strict=True):
        over = (of_state > 10 * median).sum() if record.state < len(norms) - 1 else 0
        assert record.n_sinks == over
        assert record.maximum == pytest.approx(of_state.max(), rel=1e-5)
    ordinary = np.array([np.linalg.norm(o.states, axis=1) for o in found if o.target in kept and not o.is_sink])
    for record, of_state in zip(collected.norms_without_sinks, ordinary.T, strict=True):
        assert record.maximum == pytest.approx(of_state.max(), rel=1e-5)
        assert record.n_sinks == 0


def test_medians_are_those_of_the_calibration_rows(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path
) -> None:
    model = load("llama")
    sinks = run(model, corpus, tmp_path / "run").manifest["sinks"]
    ids = [model.tokenizer(text, add_special_tokens=False)["input_ids"][:40] for text in corpus.documents()]
    with torch.no_grad():
        states = [
            torch.stack(model.causal(torch.tensor([ids[row]]), output_hidden_states=True).hidden_states)[:, 0]
            for row in sinks["calibration_rows"]
        ]
    norms = torch.cat(states, dim=1).norm(dim=-1).numpy()
    np.testing.assert_allclose(sinks["medians"], np.median(norms, axis=1), rtol=1e-5)


def test_samples_are_single_positions(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = with_loud_token(load("qwen2"), corpus, 100.0)
    collected = run(model, corpus, tmp_path / "run", n_samples=100)
    found = found_in(model, corpus, collected.manifest["sinks"]["medians"])
    at = {
        (target, is_sink): np.array([o.states for o in found if o.target == target and o.is_sink is is_sink])
        for target in collected.token_ids
        for is_sink in (True, False)
    }
    samples = collected.samples
    assert samples.states.shape == (model.n_states, 100, model.width)
    assert len(np.unique(samples.states[-1], axis=0)) > 90
    assert samples.sinks.any()
    for index in range(100):
        candidates = at[int(collected.token_ids[samples.rows[index]]), bool(samples.sinks[index])]
        scale = np.abs(samples.states[:, index]).max(axis=1)
        gaps = np.abs(candidates - samples.states[:, index]).max(axis=2) / scale
        assert gaps.max(axis=1).min() < 1e-5


def test_skipped_positions_are_not_there(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = load("gpt2")
    collected = run(model, corpus, tmp_path / "run", skip_positions=3)
    found = found_in(model, corpus, collected.manifest["sinks"]["medians"], skip_positions=3)
    assert_equal(collected, plain.means(found, 5))


def test_split_documents(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = load("mistral")
    collected = run(model, corpus, tmp_path / "run", long_documents="split")
    found = found_in(model, corpus, collected.manifest["sinks"]["medians"], split=True)
    assert_equal(collected, plain.means(found, 5))
    assert collected.manifest["counts"]["rows"] > collected.manifest["counts"]["documents_used"]


def test_rows_that_are_not_finite_are_left_out_and_named(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load("llama")
    documents = list(corpus.documents())
    bad = [index for index, text in enumerate(documents) if "<|end|>" in text]
    with torch.no_grad():
        model.causal.get_input_embeddings().weight[model.tokenizer.eos_token_id, 5] = float("nan")
    collected = run(model, corpus, tmp_path / "run")
    medians = collected.manifest["sinks"]["medians"]
    found = [o for o in found_in(model, corpus, medians) if o.row not in bad]
    assert_equal(collected, plain.means(found, 5))
    assert collected.manifest["left_out"] == [{"row": row, "document": row} for row in bad]
    counts = collected.manifest["counts"]
    assert counts["rows_left_out"] == len(bad) == 1
    assert counts["tokens_kept"] + counts["tokens_dropped"] == counts["tokens_counted"]
    assert "1 rows with states that are not finite were left out" in capsys.readouterr().err


def test_nothing_finite_leaves_nothing_behind(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path
) -> None:
    model = load("llama")
    with torch.no_grad():
        model.causal.get_input_embeddings().weight.fill_(float("inf"))
    with pytest.raises(InputError, match="30 rows gave states that are not finite"):
        run(model, corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_manifest_says_what_was_collected(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = load("gpt2")
    collected = run(model, corpus, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["model"] == dict(model.source)
    assert manifest["corpus"] == dict(corpus.source)
    assert manifest["options"] == {"min_chars": 10, **OPTIONS} | {
        "long_documents": "truncate",
        "max_documents": None,
        "min_count": 5,
        "skip_positions": 0,
    }
    assert manifest["dtype"] == "float32"
    assert manifest["revision"] is None
    counts = manifest["counts"]
    assert counts["documents_read"] == 30
    assert counts["rows"] == 30
    assert counts["special_tokens"] == 1
    assert counts["positions"] == collected.counts.sum()
    assert counts["tokens_kept"] == collected.n_tokens
    assert manifest["left_out"] == []
    assert len(manifest["first_ids"]) == 3
    assert {"layerflow", "torch", "transformers", "numpy", "python"} <= manifest["versions"].keys()
    assert collected.tokens.tolist() == [model.tokenizer.decode([index]) for index in collected.token_ids]
    assert not Partial.of(tmp_path / "run").folder.exists()


def test_bfloat16_is_reduced_in_float32(load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path) -> None:
    model = load("llama")
    exact = run(model, corpus, tmp_path / "float32")
    half = load_model(model.source["path"], device="cpu", dtype="bfloat16")
    collected = run(half, corpus, tmp_path / "bfloat16", batch_tokens=1)
    # The same states, upcast, averaged in float64: only then is it this near.
    medians = collected.manifest["sinks"]["medians"]
    assert_equal(collected, plain.means(found_in(half, corpus, medians), 5), 1e-6)
    assert 1e-4 < np.abs(collected.states - exact.states).max() / np.abs(exact.states).max() < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 65}, r"--max-tokens 65 is beyond the context of .*; give at most 64"),
        ({"min_count": 100_000}, r"--min-count 100000: no token occurs that often .* lower --min-count"),
        ({"min_chars": 10_000}, r"lower --min-chars"),
        ({"n_samples": -1}, r"--samples -1 is too small; give 0 or more"),
        ({"batch_tokens": 0}, r"--batch-tokens 0 is too small; give 1 or more"),
        ({"skip_positions": 39}, r"--skip-positions 39 leaves nothing .* give at most 38"),
    ],
)
def test_bad_options_are_refused(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(load("llama"), corpus, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_directory_with_something_else_is_refused(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty and holds no collection"):
        run(load("llama"), corpus, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match=r"notes.txt is a file"):
        run(load("llama"), corpus, tmp_path / "notes.txt")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory from /proc")
def test_memory_stays_flat(
    load: Callable[[str], LanguageModel], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 2,000 rows of 40 tokens, whose states are 41 MB, memory grows by no more than the noise."""
    model = load("llama")
    many = open_corpus(str(tiny.write_lines(tmp_path / "many.txt", tiny.make_documents(2000, n_words=40))))
    run(model, corpus, tmp_path / "warm-up")
    resident: list[int] = []
    original = Accumulator.add

    def add(self: Accumulator, batch: Reduced) -> None:
        original(self, batch)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())

    monkeypatch.setattr(Accumulator, "add", add)
    run(model, many, tmp_path / "run")
    assert len(resident) == 400
    assert max(resident) - resident[20] < 4 << 20
