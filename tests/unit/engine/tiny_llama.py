"""A llama of two layers with random weights and a byte-level tokenizer, in mlx-lm layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.loading.source import ModelSource, SourceKind

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tools are not for me') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokens() -> list[str]:
    """The 256 byte tokens of byte-level BPE, in byte order (GPT-2's table, written anew)."""
    printable = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w"), ("1", "2")]
TOKENS = [*SPECIAL, *byte_tokens(), *("".join(pair) for pair in MERGES)]

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def llama_weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights under mlx-lm's names, large enough that no two tokens look alike."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), 64),
        "model.norm.weight": (64,),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (64,),
            f"{prefix}.post_attention_layernorm.weight": (64,),
            f"{prefix}.self_attn.q_proj.weight": (64, 64),
            f"{prefix}.self_attn.k_proj.weight": (32, 64),
            f"{prefix}.self_attn.v_proj.weight": (32, 64),
            f"{prefix}.self_attn.o_proj.weight": (64, 64),
            f"{prefix}.mlp.gate_proj.weight": (96, 64),
            f"{prefix}.mlp.up_proj.weight": (96, 64),
            f"{prefix}.mlp.down_proj.weight": (64, 96),
        }
    return {
        name: (random.standard_normal(shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def largest(array: mx.array) -> float:
    """The greatest absolute value."""
    value = mx.abs(array).max().item()
    assert isinstance(value, float)
    return value


@dataclass(frozen=True)
class TinyLlama:
    """The saved model."""

    path: Path

    @classmethod
    def save(cls, path: Path, *, dtype: mx.Dtype = mx.float32) -> TinyLlama:
        """Write weights, configuration, tokenizer and chat template."""
        path.mkdir(parents=True)
        arrays = {name: mx.array(value).astype(dtype) for name, value in llama_weights().items()}
        mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
        tiny = cls(path)
        tiny.write_json("config.json", CONFIG)
        tiny.write_tokenizer()
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        return tiny

    @property
    def source(self) -> ModelSource:
        """Return what the loader takes."""
        return ModelSource(SourceKind.DIRECTORY, self.path, self.path.name)

    def write_json(self, name: str, value: object) -> None:
        """Write one of the model's JSON files."""
        (self.path / name).write_text(json.dumps(value), encoding="utf-8")

    def change_config(self, **changes: object) -> None:
        """Write ``config.json`` with some keys changed."""
        self.write_json("config.json", CONFIG | changes)

    def write_tokenizer(self) -> None:
        """Write ``tokenizer.json`` and its configuration."""
        self.write_json("tokenizer.json", _tokenizer_json())
        self.write_json(
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "bos_token": "<|im_start|>",
                "clean_up_tokenization_spaces": False,
            },
        )


def _tokenizer_json() -> dict[str, object]:
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "special": True, **added}
            for index, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": words | {"use_regex": True},
        "post_processor": None,
        "decoder": words | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(TOKENS)},
            "merges": [list(pair) for pair in MERGES],
        },
    }
