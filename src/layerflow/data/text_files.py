"""Corpora on this machine: lines of text, lines of JSON, Parquet."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet

from layerflow.data.documents import Corpus, choose_field, listed, one_line
from layerflow.data.storage import checksum
from layerflow.errors import InputError

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

_CHECKSUM_LIMIT = 256 << 20  # bytes; a checksum of more would delay the start
_PARQUET_ROWS = 1024


def kind_of(path: Path) -> str | None:
    """Tell from a file's name what it holds: ``txt``, ``jsonl``, ``parquet``, or None; ``.gz`` may follow a text."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    zipped = suffixes[-1:] == [".gz"]
    kind = KINDS.get(suffixes[-2 if zipped else -1]) if len(suffixes) > zipped else None
    return None if zipped and kind == "parquet" else kind


def open_file(path: Path, text_field: str | None) -> Corpus:
    """Open a file as a corpus; its first record is read at once, so that a wrong file is refused at once.

    Raises:
        InputError: The file is of no known kind, empty, unreadable, or has no text field.
    """
    kind = kind_of(path)
    if path.is_dir() or kind is None:
        fault = "is a folder" if path.is_dir() else "is of no kind that layerflow reads"
        raise InputError(f"corpus {path} {fault}; give a .txt, .jsonl or .parquet file (.txt.gz, .jsonl.gz)")
    with _readable(path):
        size = path.stat().st_size
        if size == 0:
            raise InputError(f"corpus {path} is empty: the file has no bytes in it")
        source: dict[str, Any] = {"name": str(path), "kind": "local", "format": kind, "bytes": size}
        if size <= _CHECKSUM_LIMIT:
            source["sha256"] = checksum(path)
    if kind == "txt":
        return _open_lines(path, text_field, source)
    if kind == "jsonl":
        text_field, read = _jsonl_field(path, text_field), _read_jsonl
    else:
        text_field, read = _parquet_field(path, text_field), _read_parquet
    return Corpus(str(path), {**source, "field": text_field}, partial(read, path, text_field), unit="record")


def _open_lines(path: Path, text_field: str | None, source: Mapping[str, Any]) -> Corpus:
    if text_field is not None:
        raise InputError(f"--text-field {text_field} is of no use with {path}: a .txt file has no fields")
    next(_lines(path), None)
    advice = "each line is taken as one document, so put each document on one line, or "
    return Corpus(str(path), source, lambda: (line for _, line in _lines(path)), unit="line", advice=advice)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1.

    UTF-8, a byte-order mark dropped, any line ending; bytes that are not UTF-8 come out as U+FFFD.
    """
    with _readable(path), _text(path) as file:
        for number, line in enumerate(file, start=1):
            if "\0" in line:
                raise InputError(
                    f"corpus {path} is not UTF-8 text: line {number} holds a NUL byte; a binary file cannot be "
                    "read, UTF-16 can be converted with `iconv -f UTF-16 -t UTF-8`"
                )
            yield number, line


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    with path.open("rb") as file:
        binary: Any = gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
        yield io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"corpus {path} cannot be read ({one_line(error)}); is the file whole?") from error


def _json_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise InputError(
                f"corpus {path}, line {number} is not JSON ({reason}); each line must be one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise InputError(
                f"corpus {path}, line {number} is no JSON object but {line.strip():.40}; each line must be one"
            )
        yield number, record


def _jsonl_field(path: Path, text_field: str | None) -> str:
    for _, first in _json_records(path):
        return choose_field(str(path), text_field, {name: isinstance(value, str) for name, value in first.items()})
    raise InputError(f"corpus {path} is empty: it holds no record")


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    for number, record in _json_records(path):
        if text_field not in record:
            raise InputError(
                f"corpus {path}, line {number} has no field {text_field!r}; its fields are {listed(record)}"
            )
        text = record[text_field]
        if text is not None and not isinstance(text, str):
            raise InputError(f"corpus {path}, line {number}: field {text_field!r} is not text but {text!r:.40}")
        yield text or ""


def _parquet_field(path: Path, text_field: str | None) -> str:
    with _readable(path), pa.parquet.ParquetFile(path) as file:
        fields = {column.name: _is_text(column.type) for column in file.schema_arrow}
    return choose_field(str(path), text_field, fields)


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    with _readable(path), pa.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_field]):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
