"""Shards of one collection, added up to a run. Imports torch, through the accumulator."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerflow.data.accumulator import Accumulator
from layerflow.data.finish import finish
from layerflow.data.options import Shard
from layerflow.data.partial import Partial, refuse_other
from layerflow.data.samples import SampleFile
from layerflow.data.storage import read_manifest
from layerflow.data.trajectories import SHARD
from layerflow.errors import InputError

_BLOCK = 1024  # sampled positions in memory at once
# Medians are calibrated by each shard on the same rows; only rounding on another machine may set them apart.
_MEDIAN_TOLERANCE = 0.01


def merge(folders: Sequence[Path], out: Path) -> Path:
    """Add up all shards of a collection, in any order given, into the run that one process would have made.

    Counts are the same exactly, means to rounding. Memory: the sums once, and a state of one more shard.

    Args:
        folders: the run directories of shards 1/n … n/n.
        out: the run directory to write; empty or absent.

    Raises:
        InputError: A folder is no shard, shards are of different collections, overlap or are missing, or ``out`` is
            not empty.

    Reference: SPEC section 7.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is not an empty directory; give a new one")
    manifests = _in_order(folders)
    try:
        _add_up(manifests, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was empty or absent
        raise
    return out


def _add_up(manifests: Mapping[Path, Mapping[str, Any]], out: Path) -> None:
    paths = list(manifests)
    first = Partial.of(paths[0])
    accumulator = first.loaded()
    target = _samples(Partial.of(out), accumulator)
    target.path.parent.mkdir(parents=True)
    target.create()
    _copy(_samples(first, accumulator), target, accumulator.sample_rows >= 0)
    for path in paths[1:]:
        part = Partial.of(path)
        other = part.mapped()
        if not np.allclose(other.medians, accumulator.medians, rtol=_MEDIAN_TOLERANCE):
            raise InputError(f"{path} and {paths[0]} tell sinks by different median norms; collect one of them again")
        accumulator.merge(other)
        _copy(_samples(part, other), target, other.sample_rows >= 0)
    manifest = manifests[paths[0]]
    left_out = [entry for each in manifests.values() for entry in each["left_out"]]
    finish(
        out,
        accumulator,
        target,
        first.tokens(),
        {**manifest, "shard": None, "left_out": sorted(left_out, key=lambda entry: int(entry["row"]))},
        min_count=manifest["options"]["min_count"],
    )
    Partial.of(out).remove()


def _in_order(folders: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Return the shards' manifests by number, having checked that they are one collection's and complete."""
    manifests: dict[Path, dict[str, Any]] = {}
    by_shard: dict[Shard, Path] = {}
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest.get("status") != SHARD:
            raise InputError(f"{folder} is not a finished shard; make it with `layerflow collect --shard i/n`")
        refuse_other(folder, {**manifest, "shard": None}, {**manifests.get(folders[0], manifest), "shard": None})
        shard = Shard.parse(manifest["shard"])
        if shard in by_shard:
            raise InputError(f"{folder} and {by_shard[shard]} are both shard {shard}; give each once")
        manifests[folder], by_shard[shard] = manifest, folder
    counts = {shard.count for shard in by_shard}
    if len(counts) != 1:
        raise InputError(f"shards of {sorted(counts)} parts do not belong together; give all of one number")
    (count,) = counts
    missing = [str(shard) for index in range(count) if (shard := Shard(index + 1, count)) not in by_shard]
    if missing:
        raise InputError(f"shards {', '.join(missing)} are missing; collect them, then merge all {count}")
    return {by_shard[shard]: manifests[by_shard[shard]] for shard in sorted(by_shard, key=lambda shard: shard.index)}


def _samples(partial: Partial, accumulator: Accumulator) -> SampleFile:
    return partial.samples(len(accumulator.medians), len(accumulator.sample_rows), accumulator.ordinary.half_a.shape[1])


def _copy(source: SampleFile, target: SampleFile, read: np.ndarray) -> None:
    places = np.flatnonzero(read)
    states = [source.read(state) for state in range(source.n_states)]
    for start in range(0, len(places), _BLOCK):
        block = places[start : start + _BLOCK]
        target.write(block, np.stack([state[block] for state in states]))
