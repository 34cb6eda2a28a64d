"""Checkpoints whose weights are holes: headers are right, files have their size, nothing is stored."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase

LLAMA_70B: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": [128_001, 128_009],
}
"""The configuration of Llama 3.1 70B."""

_TENSORS_IN_A_FILE = 25

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def llama_tensors(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama's weights."""
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, tokens = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    head_dim = hidden // sizes["num_attention_heads"]
    keys = head_dim * sizes["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokens, hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (tokens, hidden)}


def write_header_checkpoint(
    directory: Path,
    *,
    config: Mapping[str, object] = LLAMA_70B,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    tokenizer_tokens: int = 64,
) -> Path:
    """Write index, headers of bfloat16 tensors, configuration and tokenizer; takes no disk space.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True)
    shapes = llama_tensors(config) if tensors is None else tensors
    weight_map = dict(_write_files(directory, list(shapes.items())))
    _write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    _write_json(directory / "config.json", config)
    write_tokenizer_files(directory, tokens=tokenizer_tokens)
    return directory


def write_tokenizer_files(
    directory: Path, *, tokens: int = 64, template: str | None = CHATML, added: tuple[str, ...] = ()
) -> None:
    """Write a tokenizer of BPE whose tokens are made of letters, and a chat template."""
    words = list(islice(_words(), tokens))
    known = set(words)
    # Every way to make a word of two, as real tokenizers have about two for each token.
    merges = [
        [word[:cut], word[cut:]]
        for word in words
        for cut in range(1, len(word))
        if {word[:cut], word[cut:]} <= known
    ]
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {"id": tokens + index, "content": text, "special": True, **how}
        for index, text in enumerate(added)
    ]
    _write_json(
        directory / "tokenizer.json",
        {
            "added_tokens": special,
            "model": {
                "type": "BPE",
                "vocab": {word: index for index, word in enumerate(words)},
                "merges": merges,
            },
        },
    )
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", config)


def _words() -> Iterator[str]:
    """Of one letter, of two, and so on."""
    for length in count(1):
        yield from map("".join, product(ascii_lowercase, repeat=length))


def _write_files(
    directory: Path, tensors: list[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, str]]:
    files = math.ceil(len(tensors) / _TENSORS_IN_A_FILE)
    for index in range(files):
        some = tensors[index * _TENSORS_IN_A_FILE : (index + 1) * _TENSORS_IN_A_FILE]
        name = f"model-{index + 1:05}-of-{files:05}.safetensors"
        _write_header(directory / name, dict(some))
        yield from ((tensor, name) for tensor, _ in some)


def _write_header(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
