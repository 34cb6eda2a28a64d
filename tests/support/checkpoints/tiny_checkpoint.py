"""A llama too small to cost anything, as ``machd serve`` takes it.

What a server spends on such a model is nearly all its own: scheduling, sampling, text, HTTP. Weights are random and nobody
keeps them; the tokenizer is the beginning of the embedded model's, since each process that reads all of it takes 0.15 s. To measure
with a vocabulary of the usual size::

    .venv/bin/python tests/support/checkpoints/tiny_checkpoint.py /tmp/tiny-llama
    .venv/bin/machd bench /tmp/tiny-llama --compare single,static,continuous
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.loading.embedded_tokenizer import (
    EMBEDDED_VOCABULARY_TOKENS,
    write_embedded_tokenizer,
)
from machd.user_directories import user_cache_directory

TINY_VOCABULARY_TOKENS = 2048
"""All bytes, and the first of what they are merged to."""

_CONTEXT_TOKENS = 8192


def write_tiny_llama(
    directory: Path,
    *,
    vocabulary: int = TINY_VOCABULARY_TOKENS,
    hidden: int = 64,
    layers: int = 2,
    head_dim: int = 16,
    kv_heads: int = 2,
    seed: int = 0,
    added_tokens: Sequence[str] = (),
) -> Path:
    """Write weights, configuration and tokenizer in mlx-lm layout.

    Args:
        directory: Made if it is not there.
        vocabulary: Tokens, the embedded model's first ones.
        hidden: Width; a multiple of 32.
        layers: How many.
        head_dim: Width of a head; a position takes 8 bytes of KV for each of it, KV head and layer.
        kv_heads: Heads of keys and values; there are as many of queries where these are more than
            ``hidden`` has room for.
        seed: Of the random weights.
        added_tokens: Tokens besides those; they get the next ids, and rows of their own.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sizes = _Sizes(vocabulary + len(added_tokens), hidden, layers, head_dim, kv_heads)
    arrays = {name: mx.array(value) for name, value in _weights(sizes, seed).items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "mlx"})
    eos_token_ids, files = _tokenizer(vocabulary, tuple(added_tokens))
    for name, content in files.items():
        (directory / name).write_bytes(content)
    config = _config(sizes, eos_token_ids)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory


@lru_cache(maxsize=4)
def _tokenizer(
    vocabulary: int, added_tokens: tuple[str, ...]
) -> tuple[frozenset[int], dict[str, bytes]]:
    """Return the tokens that end texts, and the tokenizer's files: making them takes as long as all else."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        eos_token_ids = write_embedded_tokenizer(
            directory, user_cache_directory(os.environ), added_tokens
        )
        files = {one.name: one.read_bytes() for one in directory.iterdir()}
    files["tokenizer.json"] = _shortened(files["tokenizer.json"], vocabulary)
    return eos_token_ids, files


def _shortened(tokenizer: bytes, vocabulary: int) -> bytes:
    """Return a tokenizer with its first tokens and those that were added to all, which get the next ids."""
    content = json.loads(tokenizer)
    model = content["model"]
    left_out = len(model["vocab"]) - vocabulary
    for one in content["added_tokens"]:
        if one["id"] >= len(model["vocab"]):
            one["id"] -= left_out
    model["vocab"] = {
        token: number for token, number in model["vocab"].items() if number < vocabulary
    }
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    return json.dumps(content, ensure_ascii=False).encode()


@dataclass(frozen=True)
class _Sizes:
    vocabulary: int
    hidden: int
    layers: int
    head_dim: int
    kv_heads: int

    @property
    def heads(self) -> int:
        return max(self.hidden // self.head_dim, self.kv_heads)

    @property
    def inner(self) -> int:
        return 4 * self.hidden


def _config(sizes: _Sizes, eos_token_ids: frozenset[int]) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": _CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": sorted(eos_token_ids),
    }


def _weights(sizes: _Sizes, seed: int) -> dict[str, NDArray[np.float32]]:
    hidden, inner = sizes.hidden, sizes.inner
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(shape) * hidden**-0.5 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


if __name__ == "__main__":
    write_tiny_llama(Path(sys.argv[1]), vocabulary=EMBEDDED_VOCABULARY_TOKENS)
