"""A causal language model's backbone, the states it gives, and a check that they are what they should be."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int

from layerflow.data.model_files import LoadedFiles, ModelFiles, find_model
from layerflow.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ROLES = ("bos", "eos", "pad")
# A probe row is long enough for every kind of layer to mix positions, and short enough to cost nothing.
_PROBE_LENGTH, _PROBE_SHORT = 9, 5
# Differences are relative to a state's largest entry; padding changes the order of sums, so equality is not exact.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model without its vocabulary head, and the tokenizer that belongs to it.

    Attributes:
        name: as the user gave it.
        backbone: the model up to the final norm; on a corpus nothing else is run.
        head: the output embeddings, if the architecture has them; their weights are usually tied.
        causal: backbone and head together; only `probe` runs it.
        tokenizer: the Hugging Face tokenizer.
        device: where the model is.
        dtype: the floating type it computes in.
        n_states: number of states, one more than blocks.
        width: the hidden size.
        vocabulary_size: rows of the input embedding; every id is below it.
        special_ids: ids that never count, neither as target nor as predecessor.
        pad_id: any valid id; it stands only where the mask is 0.
        context_length: the longest row the model takes, or None when it states no limit.
        source: what goes into the manifest.
    """

    name: str
    backbone: torch.nn.Module = field(repr=False)
    head: torch.nn.Module | None = field(repr=False)
    causal: torch.nn.Module = field(repr=False)
    tokenizer: Any = field(repr=False)
    device: torch.device
    dtype: torch.dtype
    n_states: int
    width: int
    vocabulary_size: int
    special_ids: frozenset[int] = field(repr=False)
    pad_id: int
    context_length: int | None
    source: Mapping[str, Any] = field(repr=False)

    def states(
        self, input_ids: Int[torch.Tensor, "b t"], attention_mask: Int[torch.Tensor, "b t"] | None = None
    ) -> tuple[Float[torch.Tensor, "b t D"], ...]:
        """Return all states of a batch: L + 1 tensors, the last one after the final norm.

        Args:
            input_ids: rows of ids, padded on the right.
            attention_mask: 1 at real positions, 0 at padding; None when every row is full.
        """
        states: tuple[torch.Tensor, ...] = self.run(input_ids, attention_mask).hidden_states
        return states

    @torch.inference_mode()
    def run(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        """Run the backbone as `states` does, and return all of its Hugging Face output."""
        return self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
            output_hidden_states=True,
            return_dict=True,
        )


@dataclass(frozen=True)
class Probe:
    """What a probe measured: largest differences, each relative to the largest entry of the state concerned.

    Attributes:
        n_states: states returned.
        last_state: last of the hidden states against the backbone's own last state.
        head_input: last of the hidden states against what the vocabulary head reads; None when the architecture does
            not call its head as a module.
        padding: real positions of a padded row against the row alone, over all states.
        causality: positions before a changed token, over all states.
    """

    n_states: int
    last_state: float
    head_input: float | None
    padding: float
    causality: float


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a causal language model by name; `probe` then checks it.

    A name is, in this order: the built-in ``smollm2-135m``, the paper's ``pythia-160m`` or ``pythia-410m``, a local
    folder or ``.gguf`` file (neither ever calls the Hub), or a name on the Hub. Weights are used as they are: nothing
    is folded, centred or scaled.

    Args:
        name: the model.
        revision: the branch, tag or commit of a Hub model.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA, else MPS, else CPU) or a device PyTorch knows.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        InputError: There is no such model, it is gated or out of reach, or it is not a causal language model.

    Reference: SPEC sections 1 and 2.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}")
    target = _device(device)
    files = find_model(name, revision=revision, trust_remote_code=trust_remote_code)
    return _assemble(files, files.load(DTYPES[dtype]), target, dtype)


def probe(model: LanguageModel) -> Probe:
    """Check on a tiny batch that the model's states are what layerflow takes them for.

    There are L + 1 states of the right shape, all finite; the last is the backbone's own last state and what the
    vocabulary head reads, so it lies after the final norm; padding on the right and later tokens change no position.

    Raises:
        InputError: One of these does not hold; the message names what differs and by how much.

    Reference: SPEC section 1.
    """
    ids = _probe_ids(model)
    length, short = ids.shape[1], max(1, ids.shape[1] * _PROBE_SHORT // _PROBE_LENGTH)
    output = model.run(ids)
    states = _check_shapes(model, output, ids.shape)
    read_by_head = _read_by_head(model, ids)

    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, short:], mask[1, short:] = model.pad_id, 0
    changed = ids.clone()
    changed[:, -1] = ids.roll(1, dims=0)[:, -1]
    alone = model.states(ids[1:, :short])
    measured = Probe(
        n_states=len(states),
        last_state=_difference([states[-1]], [output.last_hidden_state]),
        head_input=None if read_by_head is None else _difference([states[-1]], [read_by_head]),
        padding=_difference(alone, [state[1:, :short] for state in model.states(padded, mask)]),
        causality=_difference(
            [state[:, : length - 1] for state in states],
            [state[:, : length - 1] for state in model.states(changed)],
        ),
    )
    rules = {
        "last_state": "the last hidden state is not the backbone's output after the final norm",
        "head_input": "the last hidden state is not what the vocabulary head reads",
        "causality": "a later token changes the states before it, so this is no causal language model",
        "padding": "padding on the right changes the states of real positions",
    }
    for name, fault in rules.items():
        difference = getattr(measured, name)
        # Not "difference > tolerance": NaN must fail too.
        if difference is not None and not difference <= _TOLERANCES[model.dtype]:
            raise _unfit(model, f"{fault} (relative difference {difference:.1e})")
    return measured


def _assemble(files: ModelFiles, loaded: LoadedFiles, device: torch.device, dtype: str) -> LanguageModel:
    name, causal, tokenizer = files.name, loaded.causal.to(device), loaded.tokenizer
    if causal.base_model is causal:
        raise InputError(f"model {name}: {type(causal).__name__} names no backbone (base_model_prefix)")
    config = causal.config.get_text_config()
    if not (hasattr(config, "num_hidden_layers") and hasattr(config, "hidden_size")):
        raise InputError(f"model {name}: its configuration gives no num_hidden_layers and hidden_size")
    vocabulary_size = causal.get_input_embeddings().weight.shape[0]
    special_ids = _special_ids(tokenizer, config)
    source = {
        "name": name,
        "kind": files.kind,
        **files.origin,
        "architecture": type(causal).__name__,
        "model_type": config.model_type,
        "n_parameters": sum(parameter.numel() for parameter in causal.parameters()),
        "dtype": dtype,
        "device": str(device),
        "special_ids": sorted(special_ids),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    return LanguageModel(
        name=name,
        backbone=causal.base_model,
        head=loaded.head,
        causal=causal,
        tokenizer=tokenizer,
        device=device,
        dtype=DTYPES[dtype],
        n_states=config.num_hidden_layers + 1,
        width=config.hidden_size,
        vocabulary_size=vocabulary_size,
        special_ids=special_ids,
        pad_id=_pad_id(tokenizer, config, vocabulary_size),
        context_length=getattr(config, "max_position_embeddings", None),
        source=source,
    )


def _special_ids(tokenizer: Any, config: Any) -> frozenset[int]:
    """Collect the ids that mark something instead of standing for text.

    A configuration's ids count only for a role the tokenizer leaves open: a default that nobody set would otherwise
    take an ordinary token out (Phi's configuration says 1 and 2, which are ``"`` and ``#`` to its tokenizer).
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}
    for role in _ROLES:
        if getattr(tokenizer, f"{role}_token_id", None) is None:
            special.update(_as_ids(getattr(config, f"{role}_token_id", None)))
    return frozenset(special)


def _pad_id(tokenizer: Any, config: Any, vocabulary_size: int) -> int:
    # A tokenizer may have been given a padding token the model has no embedding for; id 0 is always there.
    candidates = [*_as_ids(tokenizer.pad_token_id), *_as_ids(getattr(config, "pad_token_id", None)), 0]
    return next(index for index in candidates if 0 <= index < vocabulary_size)


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(index) for index in value] if isinstance(value, list | tuple) else [int(value)]


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {name} is not available here; use auto or cpu") from error
    return device


def _probe_ids(model: LanguageModel) -> torch.Tensor:
    length = min(_PROBE_LENGTH, model.context_length or _PROBE_LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocabulary_size, (2, length), generator=generator)
    # The rows must differ at their last position, which the check of causality exchanges.
    ids[1, -1] = (ids[0, -1] + 1) % model.vocabulary_size
    return ids.to(model.device)


@torch.inference_mode()
def _read_by_head(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor | None:
    """Run backbone and head once and return what the head reads, if it is called as a module."""
    if model.head is None:
        return None
    read: list[torch.Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    try:
        model.causal(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    # Where the head is the input embedding itself, what it is called with are ids.
    shape = (*ids.shape, model.width)
    return next((tensor for tensor in read if tensor.shape == shape), None)


def _check_shapes(model: LanguageModel, output: Any, ids_shape: torch.Size) -> tuple[torch.Tensor, ...]:
    states = getattr(output, "hidden_states", None)
    if states is None:
        raise _unfit(model, "the backbone returns no hidden states")
    if len(states) != model.n_states:
        raise _unfit(
            model,
            f"the backbone returns {len(states)} hidden states, not {model.n_states} (the embedding and one a block)",
        )
    shape = (*ids_shape, model.width)
    for index, state in enumerate(states):
        if not isinstance(state, torch.Tensor) or tuple(state.shape) != shape:
            found = tuple(getattr(state, "shape", ())) or type(state).__name__
            raise _unfit(model, f"hidden state {index} has shape {found}, not {shape} (rows, positions, width)")
        if not torch.isfinite(state).all():
            raise _unfit(model, f"hidden state {index} is not finite in {model.source['dtype']}; try --dtype float32")
    return tuple(states)


def _difference(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of two lists of states, each relative to the state's largest entry."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return float("inf")
        gap, scale = (a.float() - b.float()).abs().max(), a.float().abs().max()
        largest = max(largest, float(gap / scale.clamp_min(torch.finfo(torch.float32).tiny)), key=_nan_last)
    return largest


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _unfit(model: LanguageModel, fault: str) -> InputError:
    return InputError(f"model {model.name} ({model.source['architecture']}) cannot be used: {fault}")
