"""Documents to token rows: what is read, how it is cut, and which positions are targets."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Int32, Int64

from layerflow.data.documents import REPLACEMENT, Corpus
from layerflow.errors import InputError
from layerflow.progress import track

LongDocuments = Literal["truncate", "split"]

# A call to the tokenizer takes this many documents or characters at most, whichever is reached first.
_BATCH_DOCUMENTS = 512
_BATCH_CHARACTERS = 1 << 20
# Only so much of a document is tokenised when it will be truncated: a token of running text has about 4 characters.
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Which documents are used and how they are cut (SPEC section 2).

    Attributes:
        min_chars: a document is used when it is strictly longer than this, in characters, stripped.
        max_tokens: the longest row, in tokens; at least 2, since a target needs a predecessor.
        long_documents: ``truncate`` keeps a document's first row, ``split`` cuts all of it into rows.
        max_documents: stop once this many documents have been used; None reads the whole corpus.

    Raises:
        InputError: An option is outside its range.
    """

    min_chars: int = 400
    max_tokens: int = 128
    long_documents: LongDocuments = "truncate"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise InputError(f"--min-chars {self.min_chars} is negative; give 0 or more characters")
        if self.max_tokens < 2:
            raise InputError(f"--max-tokens {self.max_tokens} leaves no target; a row needs at least 2 tokens")
        if self.long_documents not in get_args(LongDocuments):
            raise InputError(f"--long-documents {self.long_documents!r} is neither 'truncate' nor 'split'")
        if self.max_documents is not None and self.max_documents < 1:
            raise InputError(f"--max-documents {self.max_documents} reads nothing; give at least 1")


@dataclass(frozen=True, eq=False)
class Windows:
    """A corpus as rows of token ids, flat, one row a document or a piece of one; never packed, never padded.

    Row r is ``ids[offsets[r]:offsets[r + 1]]``. Documents are numbered from 0 in reading order, those left out too.

    Attributes:
        ids: the token ids of all rows, one after the other.
        offsets: where each row starts, and the total last.
        documents: the document each row comes from.
        n_documents_read: documents read, used or not.
        n_documents_short: of those, how many were left out by ``min_chars``.
        n_documents_used: documents that gave at least one row.
        n_documents_truncated: documents that lost their end to ``max_tokens``.
        n_documents_replaced: used documents that hold U+FFFD, the mark of a byte that was not UTF-8.
    """

    ids: Int32[np.ndarray, " t"]
    offsets: Int64[np.ndarray, " rows_and_1"]
    documents: Int64[np.ndarray, " rows"]
    n_documents_read: int
    n_documents_short: int
    n_documents_used: int
    n_documents_truncated: int
    n_documents_replaced: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " rows"]:
        """The number of tokens of each row."""
        return np.diff(self.offsets)

    def row(self, index: int) -> Int32[np.ndarray, " length"]:
        """Return the token ids of one row, a view."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def first_ids(self) -> list[list[int]]:
        """The first 8 ids of the first 3 rows, for the manifest: shows at a glance whether a BOS was added."""
        return [self.row(index)[:8].tolist() for index in range(min(3, len(self)))]

    @property
    def sha256(self) -> str:
        """A checksum of the rows: the same corpus, tokenizer and options give the same one."""
        digest = hashlib.sha256(self.offsets.astype("<i8").tobytes())
        digest.update(self.ids.astype("<i4", copy=False).data)
        return digest.hexdigest()


def tokenize(corpus: Corpus, tokenizer: Any, options: WindowOptions | None = None) -> Windows:
    """Read a corpus once and tokenise the documents that are long enough, without special tokens.

    A row of fewer than 2 tokens has no target and is left out. Memory: the rows (4 bytes a token), one batch of about
    a million characters, and the longest document.

    Args:
        corpus: the documents.
        tokenizer: a Hugging Face tokenizer; a fast one works on a batch in parallel.
        options: which documents are used and how they are cut.

    Raises:
        InputError: The corpus is empty, or gives no row.

    Reference: SPEC section 2.
    """
    options = options or WindowOptions()
    reader = _Reader(corpus, options)
    ids, lengths, documents = array("i"), array("q"), array("q")
    n_truncated = 0
    for numbers, texts in _batches(reader.long_enough()):
        for number, tokens in zip(numbers, _encode(tokenizer, texts, options), strict=True):
            rows = _cut(tokens, options)
            n_truncated += options.long_documents == "truncate" and len(tokens) > options.max_tokens
            for row in rows:
                ids.extend(row)
                lengths.append(len(row))
                documents.append(number)
    if not lengths:
        raise InputError(reader.why_nothing())
    document_of_row = np.frombuffer(documents, np.int64)
    return Windows(
        ids=np.frombuffer(ids, np.int32),
        offsets=np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))]),
        documents=document_of_row,
        n_documents_read=reader.n_read,
        n_documents_short=reader.n_short,
        n_documents_used=len(np.unique(document_of_row)),
        n_documents_truncated=n_truncated,
        n_documents_replaced=reader.n_replaced,
    )


def target_mask(
    windows: Windows, special_ids: Iterable[int], vocabulary_size: int, *, skip_positions: int = 0
) -> Bool[np.ndarray, " t"]:
    """Say of each id in ``windows.ids`` whether it is a target.

    Id i of a row is one when i >= 1, neither it nor its predecessor i - 1 is special, and the predecessor's position
    i - 1 is at least ``skip_positions``.

    Raises:
        InputError: An id is outside the vocabulary, so tokenizer and model do not belong together.

    Reference: SPEC sections 1 and 2.
    """
    ids = windows.ids
    if len(ids) and int(ids.max()) >= vocabulary_size:
        raise InputError(
            f"the tokenizer yields id {int(ids.max())}, but the model's vocabulary has {vocabulary_size} entries; "
            "tokenizer and model do not belong together"
        )
    special = np.zeros(vocabulary_size, dtype=bool)
    special[[i for i in special_ids if 0 <= i < vocabulary_size]] = True
    ordinary = ~special[ids]
    mask = np.zeros(len(ids), dtype=bool)
    mask[1:] = ordinary[1:] & ordinary[:-1]
    # Position 0 has no predecessor, nor do the next ones when predecessors are skipped.
    starts, ends = windows.offsets[:-1], windows.offsets[1:]
    for position in range(min(skip_positions, int(windows.lengths.max(initial=0))) + 1):
        mask[(starts + position)[starts + position < ends]] = False
    return mask


def count_targets(
    windows: Windows, special_ids: Iterable[int], vocabulary_size: int, *, skip_positions: int = 0
) -> Int64[np.ndarray, " V"]:
    """Count how often each vocabulary entry is a target: the first of the two passes.

    Raises:
        InputError: As `target_mask`.

    Reference: SPEC section 2.
    """
    mask = target_mask(windows, special_ids, vocabulary_size, skip_positions=skip_positions)
    return np.bincount(windows.ids[mask], minlength=vocabulary_size)


class _Reader:
    """One pass over a corpus that keeps count of what it read and left out."""

    def __init__(self, corpus: Corpus, options: WindowOptions) -> None:
        self.corpus, self.options = corpus, options
        self.n_read = self.n_short = self.n_replaced = 0
        self.longest = 0

    def long_enough(self) -> Iterator[tuple[int, str]]:
        """Yield the number and text of each document that will be used."""
        n_used = 0
        for text in track(self.corpus.documents(), label="reading and tokenising"):
            number = self.n_read
            self.n_read += 1
            self.longest = max(self.longest, len(text))
            if len(text) <= self.options.min_chars:
                self.n_short += 1
                continue
            self.n_replaced += REPLACEMENT in text
            yield number, text
            n_used += 1
            if n_used == self.options.max_documents:
                return

    def why_nothing(self) -> str:
        """Explain to the user why no row came out."""
        name, unit, minimum = self.corpus.name, self.corpus.unit, self.options.min_chars
        if self.n_read == 0:
            return f"corpus {name} is empty: it holds no {unit} with text in it"
        if self.n_short < self.n_read:
            return f"corpus {name}: no {unit} has 2 tokens or more, so there is no target in it"
        return (
            f"corpus {name}: none of its {self.n_read:,} {unit}s is longer than {minimum} characters "
            f"(the longest has {self.longest}); {self.corpus.advice}lower --min-chars"
        )


def _batches(documents: Iterable[tuple[int, str]]) -> Iterator[tuple[list[int], list[str]]]:
    numbers: list[int] = []
    texts: list[str] = []
    size = 0
    for number, text in documents:
        numbers.append(number)
        texts.append(text)
        size += len(text)
        if len(texts) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield numbers, texts
            numbers, texts, size = [], [], 0
    if texts:
        yield numbers, texts


def _encode(tokenizer: Any, texts: Sequence[str], options: WindowOptions) -> list[list[int]]:
    def encode(batch: list[str]) -> list[list[int]]:
        # verbose=False: a document longer than the model's context is cut afterwards, so no warning is due.
        encoded = tokenizer(
            batch,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        tokens: list[list[int]] = encoded["input_ids"]
        return tokens

    if options.long_documents == "split":
        return encode(list(texts))
    return _encode_starts(encode, texts, options.max_tokens)


def _encode_starts(
    encode: Callable[[list[str]], list[list[int]]], texts: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Tokenise only so much of each text as `max_tokens` need, then all of it where that was too little.

    A book would otherwise be tokenised whole for its first row. The cut falls before white space, and a spare quarter
    of the tokens keeps what a cut can change away from those that are used.
    """
    needed = max_tokens + max_tokens // 4 + 8
    starts = [_start(text, needed * _CHARACTERS_PER_TOKEN) for text in texts]
    tokens = encode(starts)
    short = [
        index
        for index, (text, start) in enumerate(zip(texts, starts, strict=True))
        if len(start) < len(text) and len(tokens[index]) < needed
    ]
    if short:
        for index, whole in zip(short, encode([texts[index] for index in short]), strict=True):
            tokens[index] = whole
    return tokens


def _start(text: str, length: int) -> str:
    end = text.find(" ", length)
    return text if end < 0 else text[:end]


def _cut(tokens: list[int], options: WindowOptions) -> list[list[int]]:
    size = options.max_tokens
    starts = range(0, len(tokens), size) if options.long_documents == "split" else range(min(1, len(tokens)))
    rows = (tokens[start : start + size] for start in starts)
    return [row for row in rows if len(row) >= 2]
