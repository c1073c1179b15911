"""Models of ten families, loaded from a folder as a user would: their states are what the specification says."""

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import tiny

from layerflow.data.models import LanguageModel, load_model, probe
from layerflow.errors import InputError

FINAL_NORMS = {
    "gpt_neox": "final_layer_norm",
    "gpt2": "ln_f",
    "opt": "decoder.final_layer_norm",
    "phi": "final_layernorm",
    "mamba": "norm_f",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.save_model(root / family, family) for family in tiny.FAMILIES}


@pytest.fixture(scope="module", params=sorted(tiny.FAMILIES))
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[str, LanguageModel]:
    return request.param, load_model(str(folders[request.param]), device="cpu")


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> LanguageModel:
    return load_model(str(folders["llama"]), device="cpu")


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A model's folder that a test may damage."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every attempt to reach anything fails, and is recorded: a caller could swallow the failure."""
    attempts: list[Any] = []

    def refuse(*arguments: Any) -> None:
        attempts.append(arguments)
        raise OSError("the test allows no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


def random_rows(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(2, tiny.VOCABULARY_SIZE, length)) for length in lengths]


# --- states, in ten families


def test_probe_passes(loaded: tuple[str, LanguageModel]) -> None:
    _, model = loaded
    report = probe(model)
    assert report.n_states == tiny.N_BLOCKS + 1
    assert report.last_state == 0
    assert report.head_input == 0
    assert report.padding < 1e-5
    assert report.causality < 1e-5


def test_states_are_those_of_hugging_face(loaded: tuple[str, LanguageModel]) -> None:
    family, model = loaded
    (row,) = random_rows([12])
    with torch.no_grad():
        reference = tiny.make_model(family)(input_ids=row[None], output_hidden_states=True).hidden_states
    states = model.states(row[None])
    assert len(states) == model.n_states == tiny.N_BLOCKS + 1
    for ours, theirs in zip(states, reference, strict=True):
        assert ours.shape == (1, 12, model.width)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_last_state_is_after_the_final_norm(loaded: tuple[str, LanguageModel]) -> None:
    family, model = loaded
    norm = model.backbone.get_submodule(FINAL_NORMS.get(family, "norm"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = norm.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    last = model.states(random_rows([12])[0][None])[-1]
    hook.remove()
    ((before, after),) = seen
    torch.testing.assert_close(last, after, rtol=0, atol=0)
    assert float((last - before).abs().max()) > 0.1


@pytest.mark.parametrize("mask_given", [True, False])
def test_padded_batch_is_one_by_one(loaded: tuple[str, LanguageModel], mask_given: bool) -> None:
    _, model = loaded
    rows = random_rows([3, 20, 11, 1, 20])
    ids = torch.full((5, 20), model.pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    batch = model.states(ids, mask if mask_given else None)
    for index, row in enumerate(rows):
        for together, alone in zip(batch, model.states(row[None]), strict=True):
            torch.testing.assert_close(together[index, : len(row)], alone[0], rtol=0, atol=1e-5)
    # The rows are not so much alike that a mix-up would go unseen.
    assert float((batch[1][1] - batch[1][4]).abs().max()) > 0.1


def test_facts_come_from_the_configuration(loaded: tuple[str, LanguageModel]) -> None:
    family, model = loaded
    assert (model.width, model.vocabulary_size) == (tiny.WIDTH, tiny.VOCABULARY_SIZE)
    assert model.context_length == (None if family == "mamba" else tiny.CONTEXT_LENGTH)
    # transformers gives Qwen's tokenizer one more special token, beyond those that a text can hold.
    assert {index for index in model.special_ids if index < len(tiny.make_tokenizer())} == {0, 1}
    assert model.pad_id == 1
    assert model.source["model_type"] == family
    assert model.source["kind"] == "local"
    assert not model.backbone.training


# --- loading


def test_local_folder_never_calls_the_hub(folders: dict[str, Path], no_network: list[Any]) -> None:
    probe(load_model(str(folders["gpt_neox"]), device="cpu"))
    assert no_network == []


def test_checksum_of_the_weights_is_recorded(llama: LanguageModel) -> None:
    ((name, digest),) = llama.source["sha256"].items()
    assert name == "model.safetensors"
    assert len(digest) == 64


def test_gguf_file_is_read(tmp_path: Path, no_network: list[Any]) -> None:
    path = tmp_path / "tiny.gguf"
    tensors = tiny.save_gguf(path)
    model = load_model(str(path), device="cpu")
    assert probe(model).n_states == tiny.N_BLOCKS + 1
    weights = {name: parameter.detach().numpy() for name, parameter in model.causal.named_parameters()}
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], tensors["token_embd.weight"])
    np.testing.assert_array_equal(weights["model.layers.2.mlp.up_proj.weight"], tensors["blk.2.ffn_up.weight"])
    np.testing.assert_array_equal(weights["lm_head.weight"], tensors["output.weight"])
    text = tiny.SENTENCE
    assert model.tokenizer(text)["input_ids"] == tiny.make_tokenizer()(text)["input_ids"]
    assert model.source["kind"] == "gguf"
    assert no_network == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(folders: dict[str, Path], dtype: str) -> None:
    model = load_model(str(folders["llama"]), dtype=dtype, device="cpu")
    probe(model)
    assert {state.dtype for state in model.states(random_rows([4])[0][None])} == {model.dtype}
    assert str(model.dtype) == f"torch.{dtype}"


def test_weights_without_a_head_give_a_backbone(copied: Path, llama: LanguageModel) -> None:
    weights = load_file(copied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(copied), device="cpu")
    assert model.head is None
    assert probe(model).head_input is None
    (row,) = random_rows([6])
    for ours, theirs in zip(model.states(row[None]), llama.states(row[None]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def configure(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_weight, "model.layers.1.mlp.up_proj.weight"),
        (cut_weights, "cannot be loaded: .*incomplete"),
        (drop_tokenizer, "no tokenizer.*save_pretrained"),
        (configure(intermediate_size=48), "another shape"),
        (configure(model_type="zorp"), "zorp"),
        (configure(model_type="zorp", auto_map={"AutoConfig": "code.C"}), "--trust-remote-code"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    ],
)
def test_damaged_folder(copied: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copied)
    with pytest.raises(InputError, match=message) as caught:
        load_model(str(copied), device="cpu")
    assert "llama" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder", "there is no model no/such/folder: no such folder or file"),
        ("./nothing", "there is no model ./nothing"),
        ("nothing.gguf", "there is no model nothing.gguf"),
        ("two words", "there is no model two words"),
        ("", "there is no model"),
        ("x" * 5000, "there is no model"),
    ],
)
def test_no_such_model(name: str, message: str, no_network: list[Any]) -> None:
    with pytest.raises(InputError, match=message):
        load_model(name)
    assert no_network == []


def test_options_out_of_range(folders: dict[str, Path]) -> None:
    name = str(folders["llama"])
    with pytest.raises(InputError, match=r"--dtype int8 .*float32"):
        load_model(name, dtype="int8")
    with pytest.raises(InputError, match="--device zorp"):
        load_model(name, device="zorp")
    with pytest.raises(InputError, match="--revision main is of no use"):
        load_model(name, revision="main")
    with pytest.raises(InputError, match=r"not a \.gguf"):
        load_model(str(folders["llama"] / "config.json"))


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=320, d_model=32).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="not a causal language model"):
        load_model(str(tmp_path))


# --- special ids


def replace_tokenizer(folder: Path, *, n_added: int = 0, **special_tokens: str) -> Any:
    """Save a tokenizer of other special tokens, after some added ordinary ones, over the one in a folder."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.make_tokenizer().backend_tokenizer)
    tokenizer.add_tokens([f"added{number}" for number in range(n_added)])
    tokenizer.add_special_tokens(special_tokens)
    (folder / "tokenizer_config.json").unlink()
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_tokenizers_own_roles_win_over_defaults_of_the_configuration(copied: Path) -> None:
    # As Phi: the configuration was left at its defaults, which are ordinary tokens here.
    configure(bos_token_id=40, eos_token_id=[41, 42], pad_token_id=43)(copied)
    replace_tokenizer(copied, bos_token="<|end|>", eos_token="<|end|>")
    model = load_model(str(copied), device="cpu")
    # The tokenizer has no padding token, so there the configuration counts; 1 is marked special in the tokenizer.
    assert model.special_ids == {0, 1, 43}
    assert model.pad_id == 43


def test_configurations_roles_count_where_the_tokenizer_has_none(copied: Path) -> None:
    configure(bos_token_id=40, eos_token_id=[41, 42], pad_token_id=None)(copied)
    replace_tokenizer(copied)
    model = load_model(str(copied), device="cpu")
    assert {40, 41, 42} <= model.special_ids
    assert model.pad_id == 0


def test_padding_id_zero_is_an_id(copied: Path) -> None:
    replace_tokenizer(copied, eos_token="<|pad|>", pad_token="<|end|>")
    assert load_model(str(copied), device="cpu").pad_id == 0


def test_padding_token_without_an_embedding_is_not_used(copied: Path) -> None:
    configure(pad_token_id=None)(copied)
    tokenizer = replace_tokenizer(copied, n_added=20, pad_token="<added pad>")
    assert tokenizer.pad_token_id >= tiny.VOCABULARY_SIZE
    assert load_model(str(copied), device="cpu").pad_id == 0


# --- a probe that fails


class Tampered(torch.nn.Module):
    """A backbone whose output has been changed."""

    def __init__(self, backbone: torch.nn.Module, tamper: Callable[..., Any]) -> None:
        super().__init__()
        self.backbone, self.tamper = backbone, tamper

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **options)
        states, last = self.tamper(list(output.hidden_states), output.last_hidden_state, attention_mask)
        return SimpleNamespace(hidden_states=states, last_hidden_state=last)


def pre_norm(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    return (*states[:-1], states[-2]), last


def other_last(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    return (*states[:-1], 2 * last), 2 * last


def one_too_few(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    return tuple(states[1:]), last


def looks_ahead(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    states[1] = states[1] + 0.1 * states[1].roll(-1, dims=1)
    return tuple(states), last


def feels_padding(states: list[torch.Tensor], last: torch.Tensor, mask: torch.Tensor | None) -> Any:
    if mask is not None:
        states[1] = states[1] * (1 + 0.1 * (1 - mask).any(dim=1)[:, None, None])
    return tuple(states), last


def not_finite(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    states[2][0, 0, 0] = torch.nan
    return tuple(states), last


def wrong_shape(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    return (*states[:2], states[2][..., :7], *states[3:]), last


def none_at_all(states: list[torch.Tensor], last: torch.Tensor, _: Any) -> Any:
    return None, last


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (pre_norm, "not the backbone's output after the final norm"),
        (other_last, "not what the vocabulary head reads"),
        (one_too_few, "returns 3 hidden states, not 4"),
        (looks_ahead, "later token changes"),
        (feels_padding, "padding on the right changes"),
        (not_finite, "hidden state 2 is not finite"),
        (wrong_shape, r"hidden state 2 has shape \(2, 9, 7\), not \(2, 9, 32\)"),
        (none_at_all, "no hidden states"),
    ],
)
def test_probe_names_what_differs(llama: LanguageModel, tamper: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        probe(replace(llama, backbone=Tampered(llama.backbone, tamper)))
    assert "LlamaForCausalLM" in str(caught.value)


def test_probe_refuses_a_bidirectional_model(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="cannot be used"):
        probe(load_model(str(tmp_path), device="cpu"))
