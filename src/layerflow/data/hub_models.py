"""Models on the Hub: downloaded into Hugging Face's own cache, then loaded from there like any local folder."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from layerflow.data import hub
from layerflow.data.documents import one_line
from layerflow.errors import InputError

_WEIGHTS = (r"model.*\.safetensors", r"pytorch_model.*\.bin")
_SIDE_FILES = r".*\.(json|txt|model|jinja|tiktoken)"
_CODE = r".*\.py"


@dataclass(frozen=True)
class Snapshot:
    """A model's files as they are at one commit, in Hugging Face's cache."""

    folder: Path
    commit: str


def download_model(hub_name: str, *, revision: str | None, with_code: bool) -> Snapshot:
    """Download a model's configuration, tokenizer and weights, in one of their forms, unless they are there.

    transformers could be given the name, but would then ask the Hub again for each file; without a network that takes
    minutes even for a model that has been downloaded. When the Hub cannot be reached, the cache is taken as it is.

    Args:
        hub_name: ``owner/name``.
        revision: a branch, tag or commit.
        with_code: whether code that comes with the model is wanted too.

    Raises:
        InputError: There is no such model or revision, it is gated, it has no weights that transformers loads, or the
            Hub cannot be reached and the cache does not have it.
    """
    with _quiet():
        try:
            listed = hub.retried(lambda: HfApi().model_info(hub_name, revision=revision))
            wanted = _wanted(hub_name, [file.rfilename for file in listed.siblings or ()], with_code=with_code)
            folder = hub.retried(lambda: snapshot_download(hub_name, revision=revision, allow_patterns=wanted))
        except InputError:
            raise
        except Exception as error:
            cached = _cached(hub_name, revision) if hub.is_unreachable(error) else None
            if cached is None:
                known = hub.explained(error, kind="model", name=hub_name, revision=revision)
                raise known or InputError(f"model {hub_name} cannot be downloaded: {one_line(error)}") from error
            folder = cached
    return Snapshot(Path(folder), Path(folder).name)


def _wanted(hub_name: str, names: list[str], *, with_code: bool) -> list[str]:
    """Choose the files to download; many models carry their weights in several forms, of which one will do."""
    top = [name for name in names if "/" not in name]
    forms = ([name for name in top if re.fullmatch(form, name)] for form in _WEIGHTS)
    weights = next((form for form in forms if form), None)
    if weights is None:
        raise InputError(
            f"model {hub_name} has no weights that transformers loads (model*.safetensors or pytorch_model*.bin); for "
            "a .gguf, download the file and give its path"
        )
    side_files = _SIDE_FILES + (f"|{_CODE}" if with_code else "")
    return [*weights, *(name for name in top if re.fullmatch(side_files, name))]


def _cached(hub_name: str, revision: str | None) -> str | None:
    """Return the folder of what has been downloaded before, if there is any."""
    folder: str | None
    try:
        folder = snapshot_download(hub_name, revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        # A folder without the files that were never wanted counts as not whole; it is named in the error.
        folder = getattr(error, "snapshot_path", None)
    return folder if folder is not None and (Path(folder) / "config.json").is_file() else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show the download's bar on a terminal only, and none of the Hub client's remarks."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()
    try:
        yield
    finally:
        logger.setLevel(level)
