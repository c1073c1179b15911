"""A collection on disk before it is a run: what a killed one goes on from, and what shards hand to `merge`."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from layerflow.data.accumulator import Accumulator
from layerflow.data.samples import SampleFile
from layerflow.data.storage import MANIFEST, Tensor, read_manifest, read_safetensors, replacing, write_safetensors
from layerflow.data.trajectories import token_table
from layerflow.errors import InputError

# What decides the numbers; a collection goes on, and shards are merged, only where all of it is the same.
_IDENTITY = ("model", "corpus", "options", "shard", "rows_sha256")
# Where a model runs and what runs it may differ from one shard, or one attempt, to the next.
_INCIDENTAL = ("model.device", "model.path", "model.versions", "corpus.path")


@dataclass(frozen=True)
class Partial:
    """The folder ``sums`` of a run directory.

    ``collection.json`` says what is collected, ``tokens.parquet`` for which tokens, ``sums.safetensors`` is the
    accumulator as last saved and ``samples.f32`` holds the sampled positions. All but the last are replaced whole.
    """

    folder: Path

    @classmethod
    def of(cls, out: Path) -> "Partial":
        """Return the one that belongs to a run directory, there or not."""
        return cls(out / "sums")

    @property
    def is_there(self) -> bool:
        """Whether a collection was begun."""
        return self._description.is_file()

    @property
    def _description(self) -> Path:
        return self.folder / "collection.json"

    @property
    def _tokens(self) -> Path:
        return self.folder / "tokens.parquet"

    @property
    def _sums(self) -> Path:
        return self.folder / "sums.safetensors"

    def begin(self, description: Mapping[str, Any], token_ids: np.ndarray, texts: np.ndarray) -> None:
        """Write down what is collected, once, before anything is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        table = token_table(texts, np.zeros(len(token_ids), np.int64), token_ids=token_ids, count_a=None)
        with replacing(self._tokens) as file:
            pa.parquet.write_table(table.select(["token_id", "text"]), file)
        with replacing(self._description) as file:
            file.write(json.dumps(description, indent=2).encode())

    def description(self) -> dict[str, Any]:
        """Read what is collected."""
        description: dict[str, Any] = json.loads(self._description.read_text(encoding="utf-8"))
        return description

    def tokens(self) -> pa.Table:
        """Read the tokens that are collected: columns token_id and text, a row a token."""
        return pa.parquet.read_table(self._tokens)

    def save(self, accumulator: Accumulator) -> None:
        """Replace the saved accumulator; killed at any moment, either the old one or the new one is there, whole."""
        write_safetensors(self._sums, {name: Tensor.of(value) for name, value in accumulator.arrays().items()})

    @property
    def is_saved(self) -> bool:
        """Whether an accumulator was saved."""
        return self._sums.is_file()

    def mapped(self) -> Accumulator:
        """Open the saved accumulator read-only, as memory maps."""
        return Accumulator.from_arrays(read_safetensors(self._sums))

    def loaded(self) -> Accumulator:
        """Read the saved accumulator into memory."""
        return Accumulator.from_arrays({name: np.array(value) for name, value in read_safetensors(self._sums).items()})

    def samples(self, n_states: int, n_samples: int, width: int) -> SampleFile:
        """Return the file of the sampled positions."""
        return SampleFile(self.folder / "samples.f32", n_states, n_samples, width)

    def remove(self) -> None:
        """Delete the folder, once the run that came of it is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def is_finished(out: Path, description: Mapping[str, Any]) -> bool:
    """Say whether a directory holds the finished collection already, rather than none of it or a part.

    Raises:
        InputError: The directory holds something else, or a collection that differs; the message names the difference.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a directory that is empty or does not exist")
    partial = Partial.of(out)
    finished = (out / MANIFEST).is_file()
    if finished or partial.is_there:
        refuse_other(out, read_manifest(out) if finished else partial.description(), description)
    elif out.exists() and any(entry != partial.folder for entry in out.iterdir()):
        raise InputError(f"--out {out} is not empty and holds no collection; give a new directory")
    return finished


def refuse_other(where: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that two collections are of the same model, corpus, options and rows.

    Only what both say is compared: a collection that has not read its corpus yet says nothing of its rows.

    Raises:
        InputError: They are not; names the first difference.
    """
    there, here = (dict(_flatten({key: value[key] for key in _IDENTITY if key in value})) for value in (there, here))
    shared = {key.partition(".")[0] for key in there} & {key.partition(".")[0] for key in here}
    for key in sorted({**there, **here}):
        if key.partition(".")[0] in shared and key not in _INCIDENTAL and there.get(key) != here.get(key):
            raise InputError(
                f"{where} holds a collection with {key} {there.get(key)!r}, not {here.get(key)!r}; "
                "use the same options, or another directory"
            )


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    # Through JSON, as the other side was: tuples become lists and paths must already be text.
    for key, item in json.loads(json.dumps(value)).items():
        if isinstance(item, dict) and f"{prefix}{key}" not in _INCIDENTAL:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
