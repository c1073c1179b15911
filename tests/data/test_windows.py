"""Rows and targets against plain loops over documents and positions."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import tiny

from layerflow.data.corpus import Corpus, open_corpus
from layerflow.data.windows import WindowOptions, Windows, count_targets, target_mask, tokenize
from layerflow.errors import InputError

SPECIAL = frozenset({0, 1})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make_tokenizer()


def corpus_of(documents: list[str]) -> Corpus:
    return Corpus("test", {}, lambda: iter(documents))


def plain_rows(documents: list[str], tokenizer: Any, options: WindowOptions) -> list[tuple[int, list[int]]]:
    rows = []
    for number, document in enumerate(document.strip() for document in documents):
        if len(document) > options.min_chars:
            ids = tokenizer(document, add_special_tokens=False)["input_ids"]
            pieces = [ids[start : start + options.max_tokens] for start in range(0, len(ids), options.max_tokens)]
            rows += [(number, piece) for piece in pieces[: None if options.long_documents == "split" else 1]]
    return [(number, row) for number, row in rows if len(row) > 1]


@pytest.mark.parametrize("long_documents", ["truncate", "split"])
@pytest.mark.parametrize("max_tokens", [2, 16, 128])
def test_rows_are_those_of_a_plain_loop(tokenizer: Any, long_documents: Any, max_tokens: int) -> None:
    rng = np.random.default_rng(0)
    documents = [tiny.make_documents(1, seed=i, n_words=int(n))[0] for i, n in enumerate(rng.integers(1, 200, 40))]
    # Long ones, whose end is not tokenised when they are truncated: with spaces, without, and with few.
    documents += [tiny.SENTENCE * 300, "x" * 20_000, ("y" * 9000 + " ") * 3, "é" * 401, "z" * 400]
    options = WindowOptions(max_tokens=max_tokens, long_documents=long_documents)
    windows = tokenize(corpus_of(documents), tokenizer, options)
    expected = plain_rows(documents, tokenizer, options)
    assert [(int(n), windows.row(i).tolist()) for i, n in enumerate(windows.documents)] == expected
    assert windows.lengths.tolist() == [len(row) for _, row in expected]
    assert len(windows) == len(expected)
    assert windows.n_documents_read == len(documents)
    assert windows.n_documents_used == len({number for number, _ in expected})
    assert windows.n_documents_short == sum(len(document) <= 400 for document in documents)
    assert windows.first_ids == [row[:8] for _, row in expected[:3]]


def test_no_special_token_is_added(tokenizer: Any) -> None:
    windows = tokenize(corpus_of([tiny.SENTENCE * 10]), tokenizer)
    assert SPECIAL.isdisjoint(windows.ids.tolist())


def test_length_is_strictly_longer_and_stripped(tokenizer: Any, tmp_path: Path) -> None:
    path = tiny.write_lines(tmp_path / "a.txt", ["a" * 400 + "   ", "b" * 401])
    windows = tokenize(open_corpus(str(path)), tokenizer)
    assert (windows.n_documents_read, windows.n_documents_used, windows.documents.tolist()) == (2, 1, [1])


def test_max_documents_counts_used_ones(tokenizer: Any) -> None:
    documents = ["short", *tiny.make_documents(5), "short", *tiny.make_documents(5, seed=1)]
    windows = tokenize(corpus_of(documents), tokenizer, WindowOptions(max_documents=6))
    assert windows.n_documents_used == 6
    assert windows.n_documents_read == 8


def test_truncated_and_replaced_documents_are_counted(tokenizer: Any) -> None:
    documents = [tiny.SENTENCE * 30, "a \ufffd " * 200, "ab" * 201]
    windows = tokenize(corpus_of(documents), tokenizer, WindowOptions(max_tokens=1000))
    assert windows.n_documents_truncated == 0 + (len(tokenizer(documents[0])["input_ids"]) > 1000) + 1
    assert windows.n_documents_replaced == 1


def test_checksum_depends_on_the_rows_alone(tokenizer: Any) -> None:
    documents = tiny.make_documents(4)
    first = tokenize(corpus_of(documents), tokenizer)
    assert first.sha256 == tokenize(corpus_of(documents), tokenizer).sha256
    assert first.sha256 != tokenize(corpus_of(documents[::-1]), tokenizer).sha256


def plain_targets(rows: list[list[int]], skip_positions: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for row in rows:
        for i in range(1, len(row)):
            if row[i] not in SPECIAL and row[i - 1] not in SPECIAL and i - 1 >= skip_positions:
                counts[row[i]] += 1
    return counts


@pytest.mark.parametrize("skip_positions", [0, 1, 3, 50])
def test_targets_are_those_of_a_plain_loop(skip_positions: int) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 12, length).tolist() for length in rng.integers(2, 20, 200)]
    windows = windows_of(rows)
    counts = count_targets(windows, SPECIAL, 15, skip_positions=skip_positions)
    expected = plain_targets(rows, skip_positions)
    assert counts.tolist() == [expected[token] for token in range(15)]
    mask = target_mask(windows, SPECIAL, 15, skip_positions=skip_positions)
    assert mask.sum() == counts.sum()


def windows_of(rows: list[list[int]]) -> Windows:
    lengths = [len(row) for row in rows]
    return Windows(
        ids=np.concatenate(rows).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        documents=np.arange(len(rows)),
        n_documents_read=len(rows),
        n_documents_short=0,
        n_documents_used=len(rows),
        n_documents_truncated=0,
        n_documents_replaced=0,
    )


def test_a_special_id_in_the_text_parts_its_neighbours(tokenizer: Any) -> None:
    text = "The river<|end|> runs past the town. " * 20
    windows = tokenize(corpus_of([text]), tokenizer)
    assert 0 in windows.row(0)
    counts = count_targets(windows, SPECIAL, tiny.VOCABULARY_SIZE)
    assert counts[0] == 0
    after = windows.ids[1:][windows.ids[:-1] == 0][0]
    assert counts[after] == (windows.ids == after).sum() - (windows.ids[:-1] == 0).sum()


def test_id_beyond_the_vocabulary_is_loud() -> None:
    with pytest.raises(InputError, match="yields id 9, but the model's vocabulary has 9"):
        count_targets(windows_of([[1, 9]]), SPECIAL, 9)


def test_special_ids_beyond_the_vocabulary_do_no_harm() -> None:
    assert count_targets(windows_of([[1, 2, 3]]), frozenset({50}), 9).sum() == 2


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "is empty"),
        (
            ["short", "a bit longer"],
            {},
            r"none of its 2 documents is longer than 400 characters \(the longest has 12\)",
        ),
        (["a", "b"], {"min_chars": 0}, "no document has 2 tokens"),
    ],
)
def test_nothing_to_use(tokenizer: Any, documents: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tokenize(corpus_of(documents), tokenizer, WindowOptions(**options))


def test_short_lines_are_told_how_to_be_documents(tokenizer: Any, tmp_path: Path) -> None:
    path = tiny.write_lines(tmp_path / "book.txt", ["A line of a book."] * 5)
    with pytest.raises(InputError, match=r"none of its 5 lines.*put each document on one line, or lower --min-chars"):
        tokenize(open_corpus(str(path)), tokenizer)


@pytest.mark.parametrize(
    "options", [{"min_chars": -1}, {"max_tokens": 1}, {"long_documents": "drop"}, {"max_documents": 0}]
)
def test_options_out_of_range(options: dict[str, Any], untyped: None) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} .?{value}"):
        WindowOptions(**options)
