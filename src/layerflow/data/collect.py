"""Windows × backbone → trajectories: two passes, resumable, in shards. Imports torch."""

import contextlib
import dataclasses
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int64

from layerflow.data.accumulator import Accumulator
from layerflow.data.documents import Corpus
from layerflow.data.finish import finish
from layerflow.data.interrupt import deferred_signals
from layerflow.data.memory import estimate_memory
from layerflow.data.models import LanguageModel
from layerflow.data.options import CollectOptions, Shard
from layerflow.data.partial import Partial, is_finished, refuse_other
from layerflow.data.positions import Positions, calibration_rows, find_positions, in_batches
from layerflow.data.reduce import median_norms, reduce_batch
from layerflow.data.samples import SampleFile
from layerflow.data.sinks import SINK_FACTOR
from layerflow.data.storage import write_manifest
from layerflow.data.trajectories import SHARD
from layerflow.data.windows import tokenize
from layerflow.errors import InputError
from layerflow.progress import counting, say

# The median of some 2,000 norms is within 1 % of the corpus's. On SmolLM2 the threshold that much higher or lower
# labels 3 positions in 10,000 differently: 90 lie above 50 × the median, and a thin tail reaches from 3 to 15 ×.
_CALIBRATION_TOKENS = 2048
# A save may take this share of the time between two saves.
_SAVE_SHARE = 0.01


def collect(
    model: LanguageModel,
    corpus: Corpus,
    options: CollectOptions | None = None,
    *,
    out: Path,
    shard: Shard | None = None,
    save_every: float = 60.0,
) -> Path:
    """Collect mean trajectories into a run directory, or go on with a collection that was interrupted there.

    ``h[l, v]`` is the mean of state l over every position from which the model is about to produce token v. The first
    pass tokenises and counts, the second runs the model. Killed at any moment, the same call goes on from the last
    save and ends, on a CPU, with the same bits.

    Args:
        model: the language model.
        corpus: the documents.
        options: what decides the numbers.
        out: the run directory; empty, absent, or holding the same collection begun or finished.
        shard: collect this part of the rows only; `merge` makes a run of all parts.
        save_every: seconds between saves, more where a save takes over 1 % of that.

    Returns:
        ``out``. Its manifest is the last file to appear.

    Raises:
        InputError: The options do not fit the model or the corpus, or ``out`` holds something else.
        KeyboardInterrupt, SystemExit: On SIGINT and SIGTERM, after a save.

    Reference: SPEC sections 1, 2 and 7. Cost: that of the bare forward pass and 2 % on a CPU.
    """
    options = options or CollectOptions()
    if model.context_length is not None and options.max_tokens > model.context_length:
        raise InputError(
            f"--max-tokens {options.max_tokens} is beyond the context of {model.name}; "
            f"give at most {model.context_length}"
        )
    description = {
        "model": dict(model.source),
        "corpus": dict(corpus.source),
        "options": dataclasses.asdict(options),
        "shard": None if shard is None else str(shard),
    }
    if is_finished(out, description):
        say(f"{out} holds this collection already; delete it to collect again")
        return out
    job = _plan(model, corpus, options, shard or Shard(1, 1), description)
    say(str(estimate_memory(model, job.positions, options.batch_tokens)))
    partial = Partial.of(out)
    with _nothing_lost(partial):
        accumulator = _read(job, partial, save_every)
        # Even if all of it took less than `save_every`: writing the run can fail, or be stopped half-way.
        partial.save(accumulator)
        manifest = _manifest(job, accumulator)
        if shard is None:
            try:
                finish(out, accumulator, job.samples(partial), partial.tokens(), manifest, min_count=options.min_count)
            except InputError:
                partial.remove()  # no run comes of these sums, however often they are gone on from
                raise
            partial.remove()
        else:
            write_manifest(out, {**manifest, "status": SHARD})
    return out


@dataclass(frozen=True, eq=False)
class _Job:
    """All that the second pass needs."""

    model: LanguageModel
    options: CollectOptions
    positions: Positions
    rows: Int64[np.ndarray, " rows"]
    description: Mapping[str, Any]

    def samples(self, partial: Partial) -> SampleFile:
        return partial.samples(self.model.n_states, len(self.positions.sampled), self.model.width)


def _plan(
    model: LanguageModel, corpus: Corpus, options: CollectOptions, shard: Shard, description: Mapping[str, Any]
) -> _Job:
    """Make the first pass: tokenise and count."""
    windows = tokenize(corpus, model.tokenizer, options)
    positions = find_positions(
        windows,
        model.special_ids,
        model.vocabulary_size,
        min_count=options.min_count,
        skip_positions=options.skip_positions,
        n_samples=options.n_samples,
        seed=options.seed,
    )
    say(
        f"{len(windows):,} rows, {len(windows.ids):,} tokens, {len(positions.token_ids):,} of them different "
        f"and occurring at least {options.min_count} times"
    )
    rows = shard.rows(len(windows))
    return _Job(model, options, positions, rows, {**description, "rows_sha256": windows.sha256})


def _read(job: _Job, partial: Partial, save_every: float) -> Accumulator:
    """Make the second pass, from the last save on."""
    model, positions = job.model, job.positions
    samples = job.samples(partial)
    accumulator = _begin(job, partial)
    batches = list(in_batches(positions.windows, job.rows, job.options.batch_tokens))[accumulator.n_batches :]
    lengths = positions.windows.lengths
    n_tokens = sum(int(lengths[rows].sum()) for rows in batches)
    saves = _Saves(save_every)
    with deferred_signals() as received, counting(label="collecting", total=n_tokens, unit="tok") as advance:
        for rows in batches:
            reduced = reduce_batch(model, positions.batch(rows, model.pad_id), accumulator.medians)
            samples.write(reduced.samples.places, reduced.samples.states)
            accumulator.add(reduced)
            advance(int(lengths[rows].sum()))
            if saves.due() or received():
                saves.save(accumulator, partial)
            if received():
                raise _stopped(received())
    return accumulator


def _begin(job: _Job, partial: Partial) -> Accumulator:
    """Return the accumulator last saved, or an empty one with the medians calibrated."""
    if partial.is_there:
        refuse_other(partial.folder.parent, partial.description(), job.description)
    else:
        token_ids = job.positions.token_ids
        partial.begin(job.description, token_ids, _texts(job.model, token_ids))
    job.samples(partial).create()
    if partial.is_saved:
        accumulator = partial.loaded()
        say(f"going on after {accumulator.n_batches:,} batches")
        return accumulator
    model, positions = job.model, job.positions
    batches = in_batches(positions.windows, _calibration(job), job.options.batch_tokens)
    return Accumulator.zeros(
        n_tokens=len(positions.token_ids),
        width=model.width,
        n_samples=len(positions.sampled),
        n_sink_slots=positions.n_first,
        medians=median_norms(model, [positions.batch(rows, model.pad_id) for rows in batches]),
    )


def _calibration(job: _Job) -> np.ndarray:
    return calibration_rows(job.positions.windows, job.options.seed, _CALIBRATION_TOKENS)


def _texts(model: LanguageModel, token_ids: np.ndarray) -> np.ndarray:
    texts = np.empty(len(token_ids), dtype=object)
    texts[:] = [model.tokenizer.decode([token_id]) for token_id in token_ids.tolist()]
    return texts


def _manifest(job: _Job, accumulator: Accumulator) -> dict[str, Any]:
    windows, source = job.positions.windows, job.model.source
    special = np.isin(windows.ids, sorted(job.model.special_ids))
    return {
        **job.description,
        "revision": source.get("commit", source.get("revision")),
        "dtype": source["dtype"],
        "counts": {
            "documents_read": windows.n_documents_read,
            "documents_short": windows.n_documents_short,
            "documents_used": windows.n_documents_used,
            "documents_truncated": windows.n_documents_truncated,
            "documents_replaced": windows.n_documents_replaced,
            "rows": len(windows),
            "tokens": len(windows.ids),
            "special_tokens": int(special.sum()),
        },
        "first_ids": windows.first_ids,
        "left_out": [
            {"row": int(row), "document": int(windows.documents[row])} for row in np.sort(accumulator.left_out)
        ],
        "sinks": {
            "factor": SINK_FACTOR,
            "medians": accumulator.medians.tolist(),
            "calibration_rows": _calibration(job).tolist(),
        },
        "versions": {
            "layerflow": version("layerflow"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }


class _Saves:
    """When to save: every so often, but seldom enough that saving takes no more than its share of the time."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._last = time.monotonic()
        self._cost = 0.0

    def due(self) -> bool:
        return time.monotonic() - self._last >= max(self._every, self._cost / _SAVE_SHARE)

    def save(self, accumulator: Accumulator, partial: Partial) -> None:
        start = time.monotonic()
        partial.save(accumulator)
        self._last = time.monotonic()
        self._cost = self._last - start


def _stopped(number: int) -> BaseException:
    say("stopped; everything so far is saved, and the same command goes on from here")
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def _nothing_lost(partial: Partial) -> Iterator[None]:
    """Explain what the disk refuses, and leave nothing behind that no other attempt can go on from."""
    out = partial.folder.parent
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--out {out} cannot be written ({error.strerror or error}); mend that and run the same command, "
            "which goes on from the last save"
        ) from error
    finally:
        if not partial.is_saved:
            partial.remove()
            with contextlib.suppress(OSError):
                out.rmdir()
