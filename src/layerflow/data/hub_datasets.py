"""Corpora on the Hub: streamed record by record, nothing kept on disk. Imports datasets when one is opened."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from layerflow.data import hub
from layerflow.data.documents import Corpus, choose_field, listed, one_line
from layerflow.errors import InputError

DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class DataSet:
    """A data set on the Hub: which one, and which part of it. The revision is a commit once it has been opened."""

    hub_name: str
    config: str | None
    split: str
    revision: str | None

    def stream(self) -> Any:
        """Open the split as a stream of records."""
        import datasets

        try:
            splits = datasets.load_dataset(self.hub_name, self.config, revision=self.revision, streaming=True)
        except ValueError as error:
            if "config" not in str(error).lower():
                raise
            raise InputError(f"data set {self.hub_name}: {one_line(error)}: choose with --corpus-config") from error
        if self.split not in splits:
            raise InputError(
                f"data set {self.hub_name} has no split {self.split!r}; choose with --corpus-split: {listed(splits)}"
            )
        return splits[self.split]

    def commit(self) -> str | None:
        """Ask the Hub which commit the revision is now, so that every pass reads the same data."""
        from huggingface_hub import HfApi

        return HfApi().dataset_info(self.hub_name, revision=self.revision).sha


def open_dataset(name: str, wanted: DataSet, text_field: str | None) -> Corpus:
    """Open a data set on the Hub as a corpus.

    When the connection fails on the way, the stream is opened again after growing waits and continues at the record
    where it broke off.

    Raises:
        InputError: There is no such data set, configuration, split or text field, or the Hub cannot be reached.
    """
    try:
        commit = hub.retried(wanted.commit)
        pinned = DataSet(wanted.hub_name, wanted.config, wanted.split, commit)
        fields = hub.retried(lambda: _fields(pinned.stream()))
    except Exception as error:
        raise _explained(error, wanted) from error
    text_field = choose_field(name, text_field, fields)
    source = {"name": name, "kind": "hub", **asdict(wanted), "commit": commit, "field": text_field}
    return Corpus(name, source, partial(_read, pinned, text_field), unit="record")


def _read(data_set: DataSet, text_field: str) -> Iterator[str]:
    def open_at(n_done: int) -> Iterator[Mapping[str, Any]]:
        stream = data_set.stream()
        return iter(stream.skip(n_done) if n_done else stream)

    try:
        for record in hub.resumed(open_at, what=f"data set {data_set.hub_name}"):
            yield record[text_field] or ""
    except Exception as error:
        raise _explained(error, data_set) from error


def _fields(stream: Any) -> dict[str, bool]:
    """Say of each field of a stream whether it holds text, reading the first record where nothing is declared."""
    if stream.features is not None:
        kinds = {name: getattr(kind, "dtype", None) for name, kind in stream.features.items()}
        return {name: kind in ("string", "large_string") for name, kind in kinds.items()}
    return {name: isinstance(value, str) for name, value in next(iter(stream), {}).items()}


def _explained(error: Exception, data_set: DataSet) -> InputError:
    if isinstance(error, InputError):
        return error
    if isinstance(error, ImportError):
        return InputError(f"data set {data_set.hub_name} needs {error.name}; install `layerflow[collect]`")
    known = hub.explained(error, kind="data set", name=data_set.hub_name, revision=data_set.revision)
    return known or InputError(f"data set {data_set.hub_name} cannot be read: {one_line(error)}")
