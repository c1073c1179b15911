"""Names to documents: built-in corpora, local files, Hub data sets."""

from functools import partial
from pathlib import Path

from layerflow.data import builtin
from layerflow.data.documents import Corpus
from layerflow.data.hub_datasets import DEFAULT_SPLIT, DataSet, open_dataset
from layerflow.data.names import existing_path, is_hub_name
from layerflow.data.storage import checksum
from layerflow.data.text_files import kind_of, open_file
from layerflow.errors import InputError

__all__ = ["Corpus", "open_corpus"]

_PAPER = {"wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1")}


def open_corpus(
    name: str,
    *,
    text_field: str | None = None,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> Corpus:
    """Find a corpus by name.

    A name is, in this order: a built-in corpus (``wikipedia-sample``, ``news-sample``), the paper's ``wikitext-103``,
    a file (``.txt`` with one document a line, ``.jsonl``, ``.parquet``; ``.txt.gz``, ``.jsonl.gz``), or a data set
    ``owner/name`` on the Hub, which is streamed.

    Args:
        name: the corpus.
        text_field: the field that holds the text; found when it is called ``text`` or is the only one with text.
        config: the configuration of a Hub data set that has several.
        split: the split of a Hub data set; ``train`` unless given.
        revision: the branch, tag or commit of a Hub data set.

    Raises:
        InputError: There is no such corpus, it cannot be read, it has no text field, or an option is of no use to it.

    Reference: SPEC section 2.
    """
    hub_options = {"--corpus-config": config, "--corpus-split": split, "--corpus-revision": revision}
    path = existing_path(name)
    if name in builtin.CORPORA:
        _refuse(name, {"--text-field": text_field, **hub_options}, "a built-in corpus")
        return _open_builtin(name)
    if name in _PAPER:
        hub_name, paper_config = _PAPER[name]
        config = config or paper_config
    elif path is not None:
        _refuse(name, hub_options, "a file")
        return open_file(path, text_field)
    elif "/" in name and is_hub_name(name) and kind_of(Path(name)) is None:
        hub_name = name
    else:
        raise InputError(
            f"there is no corpus {name}: give a built-in one ({', '.join([*builtin.CORPORA, *_PAPER])}), a file "
            "that exists (.txt, .jsonl, .parquet), or a data set on the Hub (owner/name)"
        )
    return open_dataset(name, DataSet(hub_name, config, split or DEFAULT_SPLIT, revision), text_field)


def _open_builtin(name: str) -> Corpus:
    sample = builtin.CORPORA[name]
    path = sample.path()
    source = {"name": name, "kind": "builtin", "package": "gensim", "file": path.name, "sha256": checksum(path)}
    return Corpus(name, source, partial(sample.read, path), unit="paragraph")


def _refuse(name: str, options: dict[str, str | None], what: str) -> None:
    """Refuse an option that would have no effect: it would look as if it had one."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {value} is of no use with {name}, which is {what}; leave it out")
