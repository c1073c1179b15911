"""Files that are whole or absent: streamed safetensors, checksums, the manifest."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from layerflow.errors import InputError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

_DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F64": np.float64,
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
    "U8": np.uint8,
}
_NAMES: dict[np.dtype[Any], str] = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """A tensor still to be written: its shape and type, and a function that yields its rows in order.

    Writing from rows keeps memory flat: a run of 33 states never stands in memory at once.
    """

    shape: tuple[int, ...]
    dtype: type[np.generic]
    chunks: Callable[[], Iterable[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> "Tensor":
        """Wrap an array that is already in memory."""
        return cls(array.shape, array.dtype.type, lambda: (array,))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside ``path`` for writing and move it there only when the block ends well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in the given order, contiguously, without holding more than one chunk in memory.

    The format is that of the safetensors library: an 8-byte little-endian header length, a JSON header padded with
    spaces to a multiple of 8, then the data. The library's own writer needs every tensor in memory at once.
    """
    header: dict[str, Any] = {}
    start = 0
    for name, tensor in tensors.items():
        end = start + int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
        header[name] = {
            "dtype": _NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            for chunk in tensor.chunks():
                file.write(np.ascontiguousarray(chunk, dtype=tensor.dtype).data)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Map a safetensors file into memory, read-only: nothing is read until it is used.

    Raises:
        InputError: The file is missing, truncated or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, 100_000_000):
                raise ValueError("its header does not fit in it")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _map(path, 8 + length, size, entry) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; `layerflow collect` writes it") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}); collect or copy it again") from error


def stacked(tensors: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
    """Join the tensors ``prefix.000``, ``prefix.001``… along a new first axis, without a copy where the file allows.

    Tensors that lie one after the other in one file, as ours do, are one larger memory map.
    """
    names = sorted(name for name in tensors if name.startswith(f"{prefix}."))
    if names != [f"{prefix}.{index:03d}" for index in range(len(names))] or not names:
        raise InputError(f"expected tensors {prefix}.000, {prefix}.001, …; found {names[:3] or 'none'}")
    parts = [tensors[name] for name in names]
    first = parts[0]
    if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        raise InputError(f"the tensors {prefix}.… differ in shape or type; all must be alike")
    if isinstance(first, np.memmap) and first.size:
        offsets = [part.offset for part in parts if isinstance(part, np.memmap)]
        if offsets == [first.offset + index * first.nbytes for index in range(len(parts))]:
            shape = (len(parts), *first.shape)
            return np.memmap(str(first.filename), first.dtype, mode="r", offset=first.offset, shape=shape)
    return np.stack(parts)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write a run's manifest, the last file of a run to appear: a directory without one is no run."""
    text = json.dumps({"format": "layerflow", "format_version": FORMAT_VERSION, **manifest}, indent=2)
    with replacing(directory / MANIFEST) as file:
        file.write(text.encode())


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a run's manifest.

    Raises:
        InputError: The directory is no run, or was written by a later layerflow.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{directory} is not a run: it holds no {MANIFEST}; make one with "
            f"`layerflow collect --out {directory}` or `Trajectories.save`"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"] if manifest.get("format") == "layerflow" else None
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not a layerflow manifest ({error}); collect the run again") from error
    if not isinstance(version, int):
        raise InputError(f"{path} is not a layerflow manifest: it names no format; collect the run again")
    if version > FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {version}, newer than {FORMAT_VERSION}, the latest this layerflow reads; "
            "upgrade with `pip install -U layerflow`"
        )
    return dict(manifest)


def _map(path: Path, base: int, size: int, entry: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    shape = tuple(int(side) for side in entry["shape"])
    start, end = entry["data_offsets"]
    count = int(np.prod(shape, dtype=np.int64))
    if not 0 <= start <= end <= size - base or end - start != count * dtype.itemsize:
        raise ValueError("a tensor lies outside it")
    if count == 0:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, mode="r", offset=base + start, shape=shape)
