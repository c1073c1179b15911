"""The record a corpus travels in, and the choice of the field that holds its text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from layerflow.errors import InputError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_TEXT = "text"
_LISTED = 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """A named source of documents; every pass reads it afresh, in the same order.

    Attributes:
        name: as the user gave it.
        source: what goes into the manifest.
        read: opens a pass.
        unit: what one document is, for messages: line, record, paragraph.
        advice: what to do, besides lowering ``--min-chars``, when no document is long enough; may be empty.
    """

    name: str
    source: Mapping[str, Any]
    read: Callable[[], Iterator[str]] = field(repr=False)
    unit: str = "document"
    advice: str = ""

    def documents(self) -> Iterator[str]:
        """Yield the documents, stripped of white space at both ends; empty ones are passed over.

        Lone surrogates, which JSON can hold and UTF-8 cannot, come out as U+FFFD.

        Raises:
            InputError: The corpus turns out on the way not to be one: a line that is not JSON, a NUL byte, …
        """
        for text in self.read():
            stripped = text.strip()
            if stripped:
                yield _encodable(stripped)


def choose_field(name: str, wanted: str | None, fields: Mapping[str, bool]) -> str:
    """Choose the field that holds the text: the one asked for, ``text``, or the only one with text.

    Args:
        name: the corpus, for messages.
        wanted: the field asked for, if any.
        fields: the fields there are, and whether each holds text.

    Raises:
        InputError: There is no such field, or the choice is not clear; the message names the fields.
    """
    texts = [field for field, is_text in fields.items() if is_text]
    if wanted is not None:
        if wanted not in fields:
            raise InputError(f"corpus {name} has no field {wanted!r}; its fields are {listed(fields)}")
        if wanted not in texts:
            raise InputError(f"corpus {name}: field {wanted!r} is not text; those with text: {listed(texts)}")
        return wanted
    if _TEXT in texts:
        return _TEXT
    if len(texts) == 1:
        return texts[0]
    if not texts:
        raise InputError(f"corpus {name} has no field with text; its fields are {listed(fields)}")
    raise InputError(
        f"corpus {name} has no field called 'text' and several with text; choose one with --text-field: {listed(texts)}"
    )


def listed(names: Iterable[str]) -> str:
    """Write names for a message, the first 20 of them."""
    names = list(names)
    more = ", …" if len(names) > _LISTED else ""
    return (", ".join(repr(name) for name in names[:_LISTED]) or "none") + more


def one_line(error: BaseException) -> str:
    """Write an error for a message, on one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        # Pairs of surrogates are joined to the character they stand for; only lone ones are replaced.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
