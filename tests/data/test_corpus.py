"""Corpora from files: every kind read alike, every wrong file refused in one line that says what to do."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from layerflow.data.corpus import open_corpus
from layerflow.errors import InputError

DOCUMENTS = ["The first one.", "Ein zweites: Ü, é, 😀.", "third \u2028 and \x0b last"]


def write_txt(path: Path) -> Path:
    path.write_text("\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(DOCUMENTS)))
    return path


def write_parquet(path: Path) -> Path:
    pa.parquet.write_table(pa.table({"id": [0, 1, 2], "text": DOCUMENTS}), path)
    return path


def write_gzip(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def zipped(path: Path) -> Path:
        data = write(path).read_bytes()
        path.write_bytes(gzip.compress(data))
        return path

    return zipped


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.txt", write_txt),
        ("a.b.TXT", write_txt),
        ("a.txt.gz", write_gzip(write_txt)),
        ("a.jsonl", write_jsonl),
        ("a.ndjson", write_jsonl),
        ("a.jsonl.gz", write_gzip(write_jsonl)),
        ("a.parquet", write_parquet),
    ],
)
def test_every_kind_gives_the_same_documents_each_time(
    tmp_path: Path, name: str, write: Callable[[Path], Path]
) -> None:
    corpus = open_corpus(str(write(tmp_path / name)))
    assert list(corpus.documents()) == DOCUMENTS
    assert list(corpus.documents()) == DOCUMENTS
    assert corpus.source["kind"] == "local"
    assert len(corpus.source["sha256"]) == 64
    json.dumps(dict(corpus.source))


@pytest.mark.parametrize(
    ("data", "documents"),
    [
        (b"\xef\xbb\xbfone\r\ntwo\r\n", ["one", "two"]),
        (b"one\rtwo", ["one", "two"]),
        (b"\n \t\n  one  \n\n", ["one"]),
        ("caf\xe9\n".encode("latin-1"), ["caf\ufffd"]),
        (b"cut \xe2\x82", ["cut \ufffd"]),
    ],
)
def test_bytes_of_a_text_file(tmp_path: Path, data: bytes, documents: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert list(open_corpus(str(path)).documents()) == documents


def test_lone_surrogates_become_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "lone \\ud83d, pair \\ud83d\\ude00"}\n')
    assert list(open_corpus(str(path)).documents()) == ["lone \ufffd, pair 😀"]


def test_missing_text_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": null}\n{"text": "two", "other": 1}\n')
    assert list(open_corpus(str(path)).documents()) == ["one", "two"]
    pa.parquet.write_table(pa.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert list(open_corpus(str(tmp_path / "a.parquet")).documents()) == ["one", "two"]


@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
def test_choice_of_the_field(tmp_path: Path, extension: str) -> None:
    def write(records: list[dict[str, Any]]) -> str:
        path = tmp_path / f"a.{extension}"
        if extension == "parquet":
            pa.parquet.write_table(pa.Table.from_pylist(records), path)
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    def first(name: str, text_field: str | None = None) -> str:
        return next(open_corpus(name, text_field=text_field).documents())

    both = write([{"title": "T", "text": "B"}])
    assert first(both) == "B"
    assert first(both, "title") == "T"
    assert first(write([{"id": 1, "content": "B"}])) == "B"
    two = write([{"title": "T", "body": "B", "n": 1}])
    assert first(two, "body") == "B"
    with pytest.raises(InputError, match="--text-field: 'title', 'body'"):
        open_corpus(two)
    with pytest.raises(InputError, match="no field 'zorp'; its fields are 'title', 'body', 'n'"):
        open_corpus(two, text_field="zorp")
    with pytest.raises(InputError, match="field 'n' is not text; those with text: 'title', 'body'"):
        open_corpus(two, text_field="n")
    with pytest.raises(InputError, match="no field with text; its fields are 'n', 'x'"):
        open_corpus(write([{"n": 1, "x": [1, 2]}]))


def whole_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"text": DOCUMENTS}), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"one\n\x00\x01\x02\n", "line 2 holds a NUL byte"),
        ("a.txt", "text".encode("utf-16"), "iconv"),
        ("a.txt.gz", b"not gzip", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"text " * 1000)[:-20], "cannot be read"),
        ("a.txt.gz", gzip.compress(b"text " * 1000)[:20] + b"x" * 50, "cannot be read"),
        ("a.csv", b"text\none\n", "of no kind that layerflow reads.*.jsonl"),
        ("a", b"text", "of no kind"),
        (".gz", b"text", "of no kind"),
        ("a.parquet.gz", b"text", "of no kind"),
        ("a.jsonl", b"\n \n", "is empty"),
        ("a.jsonl", b"{'text': 1}\n", r"line 1 is not JSON .*column 2"),
        ("a.jsonl", b"[1, 2]\n", "line 1 is no JSON object"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "tw', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "one"}\n{"txt": "two"}', "line 2 has no field 'text'; its fields are 'txt'"),
        ("a.jsonl", b'{"text": "one"}\n{"text": 2}', "line 2: field 'text' is not text but 2"),
        ("a.jsonl", b'{"text": "one"}\n' + b"[" * 100_000, "line 2 is not JSON"),
        ("a.parquet", b"PAR1 not really", "cannot be read"),
        ("a.parquet", whole_parquet()[:-30], "cannot be read"),
    ],
)
def test_wrong_file(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        list(open_corpus(str(path)).documents())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["zorp", "no/such.txt", "./no-such", "~nobody/x", "a/b/c", "x" * 5000, "a\0b", ""])
def test_no_such_corpus(name: str) -> None:
    with pytest.raises(InputError, match=r"there is no corpus.*wikipedia-sample"):
        open_corpus(name)


def test_folder_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        open_corpus(str(tmp_path))


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    path = str(write_txt(tmp_path / "a.txt"))
    with pytest.raises(InputError, match="--corpus-split test is of no use"):
        open_corpus(path, split="test")
    with pytest.raises(InputError, match="--text-field text is of no use"):
        open_corpus(path, text_field="text")
    with pytest.raises(InputError, match="--corpus-revision main is of no use"):
        open_corpus("news-sample", revision="main")
