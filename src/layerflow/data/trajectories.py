"""The frozen record everything travels in: one mean trajectory per token, and what was kept beside it."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from jaxtyping import Bool, Float, Int

from layerflow.data.storage import (
    Tensor,
    checksum,
    read_manifest,
    read_safetensors,
    replacing,
    stacked,
    write_manifest,
    write_safetensors,
)
from layerflow.errors import InputError
from layerflow.tables import WITH_SINKS, WITHOUT_SINKS

MIN_COUNT = 5
COMPLETE = "complete"
SHARD = "shard"

_FOLDER = "trajectories"
_TENSOR_FILES = ("states", "halves", "samples", "sinks")
_TOKENS_FILE = "tokens.parquet"

# What analysis and report leave in a run directory and in its manifest.
_ANALYSIS_PATHS = (WITH_SINKS, WITHOUT_SINKS, "figures", "report.html")
_ANALYSIS_KEYS = ("analysis", "quick")


@dataclass(frozen=True, eq=False)
class Halves:
    """The final state averaged over two random halves of a token's occurrences.

    ``count_a · a + count_b · b = count · mean``. A half that got no occurrence is zero and its count says so.
    """

    a: Float[np.ndarray, "_ _"]
    b: Float[np.ndarray, "_ _"]
    count_a: Int[np.ndarray, " _"]
    count_b: Int[np.ndarray, " _"]


@dataclass(frozen=True, eq=False)
class Samples:
    """Single positions, drawn uniformly: all states, the row of the target token, and whether it is a sink."""

    states: Float[np.ndarray, "_ _ _"]
    rows: Int[np.ndarray, " _"]
    sinks: Bool[np.ndarray, " _"]


@dataclass(frozen=True, eq=False)
class SinkSums:
    """Sums of the states over sink positions, for the r rows they touch; what `without_sinks` takes away.

    ``half_a`` and ``count_a`` are the share of half A, at the final state.
    """

    rows: Int[np.ndarray, " r"]
    counts: Int[np.ndarray, " r"]
    states: Float[np.ndarray, "states r D"]
    count_a: Int[np.ndarray, " r"]
    half_a: Float[np.ndarray, "r D"]


@dataclass(frozen=True)
class StateNorms:
    """How long one state's vectors are over all counted positions.

    ``n_sinks`` counts the positions whose norm here exceeds ten times the calibrated median; it is zero at the final
    state, which is normalised and calls no sink.
    """

    state: int
    median: float
    p99: float
    maximum: float
    n_sinks: int


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Mean trajectories of n tokens through L+1 states of width D.

    ``states[l, v]`` is the mean of state l over every position from which the model is about to produce token v
    (SPEC §1–2). Everything after ``tokens`` is optional: a table that needs it is left out where it is absent.

    Args:
        states: Mean states, float32; a memory map when loaded, so that a run larger than memory opens at once.
        counts: Occurrences behind each mean.
        tokens: Text of each token, as the tokenizer decodes it.
        token_ids: Vocabulary ids, where there is a vocabulary.
        halves: Half means of the final state, for the noise floor.
        samples: Individual states.
        sinks: Sums over attention-sink positions, for `without_sinks`.
        norms: One record a state with sinks kept, then one with them apart, as collected.
        manifest: Where the run came from: model, corpus, options, counts, versions.

    Raises:
        InputError: Shapes or counts that do not belong together. Whether the values are finite is not looked at here,
            which would read a whole run on opening it; `from_arrays` does.
    """

    states: Float[np.ndarray, "states n D"]
    counts: Int[np.ndarray, " _"]
    tokens: np.ndarray
    token_ids: Int[np.ndarray, " _"] | None = None
    halves: Halves | None = None
    samples: Samples | None = None
    sinks: SinkSums | None = None
    norms: tuple[StateNorms, ...] | None = None
    norms_without_sinks: tuple[StateNorms, ...] | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_axes(self.states.shape)
        n_tokens, width = self.n_tokens, self.width
        needed: dict[str, tuple[np.ndarray, tuple[int, ...]]] = {
            "counts": (self.counts, (n_tokens,)),
            "tokens": (self.tokens, (n_tokens,)),
        }
        if self.halves is not None:
            needed |= {
                "halves.a": (self.halves.a, (n_tokens, width)),
                "halves.b": (self.halves.b, (n_tokens, width)),
                "halves.count_a": (self.halves.count_a, (n_tokens,)),
                "halves.count_b": (self.halves.count_b, (n_tokens,)),
            }
        for name, (array, shape) in needed.items():
            if np.shape(array) != shape:
                raise InputError(
                    f"{name} has shape {np.shape(array)}; with states of shape (L+1, n, D) = {self.states.shape} "
                    f"it needs {shape}, one entry a token"
                )
        _check_counts(self.counts, self.halves)
        if self.samples is not None:
            _check_samples(self.samples, self.states.shape)

    @property
    def n_states(self) -> int:
        """Number of states, L + 1."""
        return int(self.states.shape[0])

    @property
    def n_transitions(self) -> int:
        """Number of transitions, L."""
        return self.n_states - 1

    @property
    def n_tokens(self) -> int:
        """Number of trajectories."""
        return int(self.states.shape[1])

    @property
    def width(self) -> int:
        """Hidden size D."""
        return int(self.states.shape[2])

    @classmethod
    def from_arrays(
        cls,
        states: np.ndarray,
        counts: np.ndarray | Sequence[int] | None = None,
        tokens: Sequence[str] | None = None,
        halves: Halves | Sequence[np.ndarray] | np.ndarray | None = None,
        samples: Samples | Mapping[str, np.ndarray] | None = None,
    ) -> "Trajectories":
        """Make trajectories from anything that moves through layers.

        Args:
            states: Array (L+1, n, D).
            counts: Occurrences behind each trajectory; one each when absent.
            tokens: Labels; the row numbers when absent.
            halves: `Halves`, or the two half means (n, D) of the final state; the first is then taken to have the odd
                occurrence, so that the second has none where a token occurs once.
            samples: `Samples`, or a mapping with ``states`` (L+1, m, D), ``row`` (m,) and optionally ``sink`` (m,).

        Raises:
            InputError: Shapes that do not belong together, or values that are not finite.
        """
        states = _numbers("states", states)
        _check_axes(states.shape)
        n_tokens = states.shape[1]
        counts = np.ones(n_tokens, np.int64) if counts is None else _whole_numbers("counts", counts)
        labels = [str(row) for row in range(n_tokens)] if tokens is None else list(tokens)
        if halves is not None and not isinstance(halves, Halves):
            halves = _halves_from_pair(halves, counts)
        if samples is not None and not isinstance(samples, Samples):
            samples = _samples_from_mapping(samples)
        trajectories = cls(states, counts, _texts(labels), halves=halves, samples=samples)
        trajectories._check_finite()
        return trajectories

    def _check_finite(self) -> None:
        parts = {"states": self.states}
        if self.halves is not None:
            parts |= {"halves.a": self.halves.a, "halves.b": self.halves.b}
        if self.samples is not None:
            parts["samples.states"] = self.samples.states
        for name, part in parts.items():
            # Rows are the last axis but one of them all: (L+1, n, D), (n, D), (L+1, m, D).
            bad = np.unique(np.nonzero(~np.isfinite(part))[-2])
            if len(bad):
                raise InputError(
                    f"row {bad[0]} of {name} is not finite in float32 ({len(bad)} such rows); leave them out"
                )

    def save(self, directory: str | Path) -> Path:
        """Write a run directory that `load` opens and ``layerflow analyse`` accepts; returns its path.

        Over an earlier run, the tables, figures and page made from that run's data are removed.
        """
        files = {"states": _numbered("state", self.states)}
        if self.halves is not None:
            files["halves"] = {"a": Tensor.of(self.halves.a), "b": Tensor.of(self.halves.b)}
        if self.samples is not None:
            files["samples"] = {
                **_numbered("state", self.samples.states),
                "row": Tensor.of(self.samples.rows),
                "sink": Tensor.of(self.samples.sinks),
            }
        if self.sinks is not None:
            files["sinks"] = {
                **_numbered("state", self.sinks.states),
                "half_a": Tensor.of(self.sinks.half_a),
                "row": Tensor.of(self.sinks.rows),
                "count": Tensor.of(self.sinks.counts),
                "count_a": Tensor.of(self.sinks.count_a),
            }
        tokens = token_table(
            self.tokens,
            self.counts,
            token_ids=self.token_ids,
            count_a=None if self.halves is None else self.halves.count_a,
        )
        manifest = {
            "model": None,
            "corpus": None,
            "options": {},
            "counts": {"tokens_kept": self.n_tokens},
            "versions": {"layerflow": version("layerflow"), "numpy": np.__version__},
            **{key: value for key, value in self.manifest.items() if key not in _ANALYSIS_KEYS},
            "status": COMPLETE,
        }
        for key, norms in (("norms", self.norms), ("norms_without_sinks", self.norms_without_sinks)):
            manifest[key] = None if norms is None else [dataclasses.asdict(record) for record in norms]
        directory = Path(directory)
        _remove_analysis(directory)
        return write_run(directory, files, tokens, manifest)

    @classmethod
    def load(cls, directory: str | Path, *, verify: bool = True) -> "Trajectories":
        """Open a run directory: no model, corpus or network is needed, and states are read only when used.

        Args:
            directory: The run directory.
            verify: Compare every file with its checksum in the manifest, reading each once.

        Raises:
            InputError: The directory is no complete run, or a file is missing, damaged or foreign.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        if manifest.get("status") == SHARD:
            raise InputError(
                f"{directory} is shard {manifest.get('shard')} of a collection; "
                "add all its shards up with `layerflow merge`"
            )
        if manifest.get("status") != COMPLETE:
            raise InputError(
                f"{directory} holds an unfinished collection (status {manifest.get('status')!r}); "
                f"finish it with `layerflow collect --out {directory}` and the same options"
            )
        if verify:
            _verify(directory, manifest)
        folder = directory / _FOLDER
        columns = _read_tokens(folder / _TOKENS_FILE)
        arrays = {
            name: read_safetensors(folder / f"{name}.safetensors")
            for name in _TENSOR_FILES
            if name == "states" or (folder / f"{name}.safetensors").exists()
        }
        try:
            return cls(
                states=stacked(arrays["states"], "state"),
                counts=columns["count"],
                tokens=columns["text"],
                token_ids=columns["token_id"],
                halves=_halves(arrays.get("halves"), columns),
                samples=_samples(arrays.get("samples")),
                sinks=_sinks(arrays.get("sinks")),
                norms=_norms(manifest.get("norms")),
                norms_without_sinks=_norms(manifest.get("norms_without_sinks")),
                manifest=manifest,
            )
        except KeyError as error:
            raise InputError(f"{folder} lacks {error}; collect or save the run again") from error

    def without_sinks(self, min_count: int = MIN_COUNT) -> "Trajectories":
        """Return the same run with the sums over attention-sink positions taken away.

        ``h' = (count · h − Σ_sinks h) / (count − n_sinks)``. Tokens left with fewer than ``min_count`` occurrences
        are dropped, sink samples too. Cost: one copy of the states.

        Raises:
            InputError: The run did not record its sinks, or no token keeps ``min_count`` occurrences.
        """
        if self.sinks is None:
            raise InputError(
                "this run recorded no sinks, so they cannot be taken away; `layerflow collect` records them"
            )
        rows = self.sinks.rows
        counts = self.counts.copy()
        counts[rows] -= self.sinks.counts
        kept = np.flatnonzero(counts >= min_count)
        if len(kept) == 0:
            raise InputError(f"no token keeps {min_count} occurrences without sinks; lower min_count")
        touched = np.isin(rows, kept)
        rows, position = rows[touched], np.searchsorted(kept, rows[touched])
        states = np.empty((self.n_states, len(kept), self.width), np.float32)
        for state in range(self.n_states):
            states[state] = self.states[state][kept]
            total = self.states[state][rows].astype(np.float64) * self.counts[rows, None]
            states[state][position] = (total - self.sinks.states[state][touched]) / counts[rows, None]
        return dataclasses.replace(
            self,
            states=states,
            counts=counts[kept],
            tokens=self.tokens[kept],
            token_ids=None if self.token_ids is None else self.token_ids[kept],
            halves=self._halves_without_sinks(kept),
            samples=self._samples_without_sinks(kept),
            sinks=None,
            norms=self.norms_without_sinks,
            norms_without_sinks=None,
        )

    def _halves_without_sinks(self, kept: np.ndarray) -> Halves | None:
        if self.halves is None or self.sinks is None:
            return None
        rows = self.sinks.rows
        taken = {"a": self.sinks.count_a, "b": self.sinks.counts - self.sinks.count_a}
        sums = {"a": self.sinks.half_a, "b": self.sinks.states[-1] - self.sinks.half_a}
        means, counts = {}, {}
        for half, before in (("a", self.halves.count_a), ("b", self.halves.count_b)):
            mean = np.array(getattr(self.halves, half))
            after = before.copy()
            after[rows] -= taken[half]
            total = mean[rows].astype(np.float64) * before[rows, None] - sums[half]
            mean[rows] = np.where(after[rows, None] > 0, total / np.maximum(after[rows, None], 1), 0.0)
            means[half], counts[half] = mean[kept], after[kept]
        return Halves(means["a"], means["b"], counts["a"], counts["b"])

    def _samples_without_sinks(self, kept: np.ndarray) -> Samples | None:
        if self.samples is None:
            return None
        stays = ~self.samples.sinks & np.isin(self.samples.rows, kept)
        return Samples(
            self.samples.states[:, stays],
            np.searchsorted(kept, self.samples.rows[stays]),
            self.samples.sinks[stays],
        )


def write_run(
    directory: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    tokens: pa.Table,
    manifest: Mapping[str, Any],
) -> Path:
    """Write a run directory: tensor files, the token table, and last the manifest with every file's checksum.

    Args:
        directory: The run directory, made when absent.
        files: Tensors by file (``states``, ``halves``, ``samples``, ``sinks``) and name, as SPEC §7 lists them.
        tokens: The table of `token_table`.
        manifest: What the manifest says beside the checksums.
    """
    folder = directory / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TENSOR_FILES:
        path = folder / f"{name}.safetensors"
        if name in files:
            write_safetensors(path, files[name])
        else:
            path.unlink(missing_ok=True)
    with replacing(folder / _TOKENS_FILE) as file:
        pa.parquet.write_table(tokens, file)
    written = [*(f"{name}.safetensors" for name in _TENSOR_FILES if name in files), _TOKENS_FILE]
    checksums = {f"{_FOLDER}/{name}": checksum(folder / name) for name in written}
    write_manifest(directory, {**manifest, "checksums": checksums})
    return directory


def token_table(
    texts: np.ndarray,
    counts: Int[np.ndarray, " n"],
    *,
    token_ids: Int[np.ndarray, " n"] | None,
    count_a: Int[np.ndarray, " n"] | None,
) -> pa.Table:
    """Lay out ``trajectories/tokens.parquet``: row, token_id, text, count, count_a, count_b."""
    return pa.table(
        {
            "row": pa.array(np.arange(len(counts)), pa.int64()),
            "token_id": pa.nulls(len(counts), pa.int64()) if token_ids is None else pa.array(token_ids, pa.int64()),
            "text": pa.array(list(_texts(texts)), pa.string()),
            "count": pa.array(counts, pa.int64()),
            "count_a": pa.nulls(len(counts), pa.int64()) if count_a is None else pa.array(count_a, pa.int64()),
            "count_b": pa.nulls(len(counts), pa.int64()) if count_a is None else pa.array(counts - count_a, pa.int64()),
        }
    )


def _texts(tokens: Sequence[str] | np.ndarray) -> np.ndarray:
    """Token texts as an object array of valid Unicode; NumPy's own string type would drop trailing NULs."""
    texts = np.empty(len(tokens), dtype=object)
    texts[:] = [str(token).encode("utf-16", "surrogatepass").decode("utf-16", "replace") for token in tokens]
    return texts


def _numbered(prefix: str, states: np.ndarray) -> dict[str, Tensor]:
    return {f"{prefix}.{index:03d}": Tensor.of(state) for index, state in enumerate(states)}


def _numbers(name: str, values: Any, dtype: type[np.floating[Any]] = np.float32) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
            return np.asarray(values, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} cannot be read as numbers ({error}); give one array of numbers") from error


def _whole_numbers(name: str, values: Any) -> np.ndarray:
    numbers = _numbers(name, values, np.float64)
    wrong = numbers[~np.isfinite(numbers) | (numbers != np.rint(numbers))]
    if len(wrong):
        raise InputError(f"{name} hold {wrong[0]}; they must be whole numbers")
    return numbers.astype(np.int64)


def _halves_from_pair(pair: Any, counts: np.ndarray) -> Halves:
    try:
        a, b = pair
    except (TypeError, ValueError) as error:
        raise InputError(
            f"halves are {type(pair).__name__} and no pair ({error}); give `Halves` or two arrays (n, D)"
        ) from error
    return Halves(_numbers("halves.a", a), _numbers("halves.b", b), counts - counts // 2, counts // 2)


def _samples_from_mapping(samples: Any) -> Samples:
    lacking = [name for name in ("states", "row") if not isinstance(samples, Mapping) or name not in samples]
    if lacking:
        raise InputError(
            f"samples ({type(samples).__name__}) lack {' and '.join(lacking)}; give `Samples` or a mapping with "
            "states (L+1, m, D), row (m,) and optionally sink (m,)"
        )
    rows = _whole_numbers("samples.row", samples["row"])
    sinks = np.asarray(samples.get("sink", np.zeros(rows.shape)), bool)
    return Samples(_numbers("samples.states", samples["states"]), rows, sinks)


def _check_axes(shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise InputError(f"states have shape {shape}; they need three axes, (L+1, n, D)")
    if shape[0] < 2 or 0 in shape:
        raise InputError(f"states have shape {shape}; a flow needs (L+1 ≥ 2 states, n ≥ 1 tokens, D ≥ 1)")


def _check_counts(counts: np.ndarray, halves: Halves | None) -> None:
    never = np.flatnonzero(counts < 1)
    if len(never):
        raise InputError(
            f"token row {never[0]} has count {counts[never[0]]}; a mean needs at least 1 occurrence: leave out the "
            f"{len(never)} such rows"
        )
    if halves is None:
        return
    a, b = halves.count_a, halves.count_b
    wrong = np.flatnonzero((a < 0) | (b < 0) | (a + b != counts))
    if len(wrong):
        row = wrong[0]
        raise InputError(
            f"the halves of token row {row} count {a[row]} and {b[row]} occurrences of {counts[row]}; "
            "halves.count_a + halves.count_b must be counts, neither below 0"
        )


def _check_samples(samples: Samples, shape: tuple[int, ...]) -> None:
    n_states, n_tokens, width = shape
    n_samples = samples.rows.size
    expected = (n_states, n_samples, width)
    if samples.states.shape != expected or not samples.rows.shape == samples.sinks.shape == (n_samples,):
        raise InputError(
            f"samples have states, rows and sinks of shape {samples.states.shape}, {samples.rows.shape} and "
            f"{samples.sinks.shape}; they need (L+1, m, D) = {expected}, (m,) and (m,)"
        )
    if len(samples.rows) and not 0 <= samples.rows.min() <= samples.rows.max() < n_tokens:
        raise InputError(
            f"samples point at token rows {samples.rows.min()} to {samples.rows.max()}; "
            f"there are rows 0 to {n_tokens - 1}"
        )


def _remove_analysis(directory: Path) -> None:
    """Remove what was made from the run in a directory; without a run there, folders of these names are not ours."""
    try:
        read_manifest(directory)
    except InputError:
        return
    for path in (directory / name for name in _ANALYSIS_PATHS):
        # Of a link only the link goes: what it points at lies elsewhere.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _verify(directory: Path, manifest: Mapping[str, Any]) -> None:
    for name in (*(f"{name}.safetensors" for name in _TENSOR_FILES), _TOKENS_FILE):
        path, expected = directory / _FOLDER / name, manifest.get("checksums", {}).get(f"{_FOLDER}/{name}")
        if path.exists() != (expected is not None):
            state = "missing" if expected else "not listed in the manifest"
            raise InputError(f"{path} is {state}; copy or collect the run again")
        if expected is not None and checksum(path) != expected:
            raise InputError(
                f"{path} differs from its checksum in the manifest: damaged; copy or collect the run again"
            )


def _read_tokens(path: Path) -> dict[str, Any]:
    try:
        table = pa.parquet.read_table(path)
        columns: dict[str, Any] = {"text": _texts(table["text"].to_pylist())}
        for name in ("token_id", "count", "count_a", "count_b"):
            column = table[name]
            columns[name] = None if column.null_count else column.to_numpy().astype(np.int64)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{path} is not a readable token table ({error}); copy or collect the run again") from error
    return columns


def _halves(arrays: Mapping[str, np.ndarray] | None, columns: Mapping[str, Any]) -> Halves | None:
    if arrays is None:
        return None
    return Halves(arrays["a"], arrays["b"], columns["count_a"], columns["count_b"])


def _samples(arrays: Mapping[str, np.ndarray] | None) -> Samples | None:
    if arrays is None:
        return None
    return Samples(stacked(arrays, "state"), np.asarray(arrays["row"]), np.asarray(arrays["sink"]))


def _sinks(arrays: Mapping[str, np.ndarray] | None) -> SinkSums | None:
    if arrays is None:
        return None
    return SinkSums(
        rows=np.asarray(arrays["row"]),
        counts=np.asarray(arrays["count"]),
        states=stacked(arrays, "state"),
        count_a=np.asarray(arrays["count_a"]),
        half_a=np.asarray(arrays["half_a"]),
    )


def _norms(records: Sequence[Mapping[str, Any]] | None) -> tuple[StateNorms, ...] | None:
    return None if records is None else tuple(StateNorms(**record) for record in records)
