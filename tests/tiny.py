"""Tiny random models of many families and a tokenizer that belongs to them: everything but size is as in real ones.

Width 32, three blocks, a vocabulary of 320; making one takes milliseconds. Weights are spread wide, so that blocks,
norms and positions all matter and a state that is not what it should be shows.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 320
WIDTH = 32
N_BLOCKS = 3
CONTEXT_LENGTH = 64

SENTENCE = "The old river runs past the town, and the people of the town go down to the river when it rains. "

_COMMON = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": N_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "pad_token_id": 1,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**_LLAMA_LIKE, "num_key_value_heads": 4}),
    "gpt2": lambda: transformers.GPT2Config(
        **_COMMON, n_embd=WIDTH, n_layer=N_BLOCKS, n_head=4, n_positions=CONTEXT_LENGTH
    ),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA_LIKE),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA_LIKE),
    "gemma": lambda: transformers.GemmaConfig(**_LLAMA_LIKE, head_dim=8),
    "opt": lambda: transformers.OPTConfig(
        **_COMMON,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=N_BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        pad_token_id=1,
    ),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA_LIKE, sliding_window=16),
    "phi": lambda: transformers.PhiConfig(**_LLAMA_LIKE),
    "olmo": lambda: transformers.OlmoConfig(**_LLAMA_LIKE),
    "mamba": lambda: transformers.MambaConfig(
        **_COMMON, hidden_size=WIDTH, num_hidden_layers=N_BLOCKS, state_size=4, pad_token_id=1
    ),
}


def make_tokenizer() -> Any:
    """Make a byte-level BPE tokenizer: any text is tokenised, id 0 ends a text, id 1 pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def make_model(family: str, *, seed: int = 0) -> Any:
    """Make a random causal language model of a family, in evaluation mode; the same for the same seed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def save_model(folder: Path, family: str = "llama", *, seed: int = 0) -> Path:
    """Save a random model and its tokenizer as a folder that `from_pretrained` reads, and return it."""
    make_model(family, seed=seed).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_documents(n: int, *, seed: int = 0, n_words: int = 120) -> list[str]:
    """Make documents of words in random order, each some 600 characters long."""
    rng = np.random.default_rng(seed)
    words = SENTENCE.split()
    return [" ".join(rng.choice(words, n_words)) for _ in range(n)]


def write_lines(path: Path, documents: Sequence[str]) -> Path:
    """Write documents as a .txt corpus, one a line, and return its path."""
    path.write_text("".join(f"{document}\n" for document in documents), encoding="utf-8")
    return path


def save_gguf(path: Path, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a random Llama as a GGUF file with its tokenizer in it, and return the tensors under GGUF's names."""
    import gguf

    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (VOCABULARY_SIZE, WIDTH), "output_norm": (WIDTH,), "output": (VOCABULARY_SIZE, WIDTH)}
    for block in range(N_BLOCKS):
        shapes |= {
            f"blk.{block}.{name}": shape
            for name, shape in {
                "attn_norm": (WIDTH,),
                "attn_q": (WIDTH, WIDTH),
                "attn_k": (WIDTH // 2, WIDTH),
                "attn_v": (WIDTH // 2, WIDTH),
                "attn_output": (WIDTH, WIDTH),
                "ffn_norm": (WIDTH,),
                "ffn_gate": (2 * WIDTH, WIDTH),
                "ffn_up": (2 * WIDTH, WIDTH),
                "ffn_down": (WIDTH, 2 * WIDTH),
            }.items()
        }
    tensors = {f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(N_BLOCKS)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY_SIZE)
    tokenizer = make_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary + [f"<unused {i}>" for i in range(len(vocabulary), VOCABULARY_SIZE)])
    writer.add_token_types([3, 3] + [1] * (VOCABULARY_SIZE - 2))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
