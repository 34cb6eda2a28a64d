"""A mixture-of-experts checkpoint of any size whose routing is skewed, as that of trained models is.

A random router chooses every expert equally often and knows no yesterday, so nothing could be said with it
about a cache of experts. Here a router's scores have three parts, all of the model's own arithmetic:

- how popular an expert is: its rank r counts r^-s (Zipf), with ranks of its own for each layer;
- the token itself;
- the tokens before it, the nearer the more (the first layer's attention weighs a distance d about 1/d).

The last two are noise of the size that makes the k best scores a draw by popularity (a Gumbel
distribution's), shared out by ``locality``: with more of it, successive tokens choose more of the same
experts. Every expert's output changes the hidden states a little, so that a layer's choice can be guessed
from the layer before, but not always.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd_bench.embedded_tokenizer import EMBEDDED_VOCABULARY_TOKENS, write_embedded_tokenizer

Floats = NDArray[np.float32]

_GUMBEL_STD = 1.28
"""Standard deviation of a Gumbel distribution: pi / sqrt(6)."""

_POOL_NUMBERS = 1 << 24
_MOE_SHARE = 0.3
"""Size of a layer's experts' output, the hidden states being 1."""

_CONTEXT_SCALE = 4.0
"""About the square root of the tokens that the first layer averages over."""


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes of a checkpoint.

    Attributes:
        hidden: Width; a multiple of 128.
        inner: Width of an expert; a multiple of 64.
        chosen: Experts of a token in each layer.
        zipf: Exponent of popularity; 0 for experts that are all alike.
        locality: Share of the tokens before in what chooses besides popularity, between 0 and 1.
    """

    hidden: int = 1024
    inner: int = 704
    layers: int = 12
    experts: int = 64
    chosen: int = 4
    zipf: float = 1.0
    locality: float = 0.7
    seed: int = 0

    @property
    def experts_parameters(self) -> int:
        """Weights of all experts."""
        return 3 * self.hidden * self.inner * self.experts * self.layers

    def with_stored_gb(self, stored_gb: float) -> MoeShape:
        """Return the shape whose experts take so many GB (10^9 bytes) in bfloat16, by its layers' number."""
        per_layer = self.experts_parameters // self.layers * 2
        return MoeShape(
            self.hidden,
            self.inner,
            max(round(stored_gb * 1e9 / per_layer), 2),
            self.experts,
            self.chosen,
            self.zipf,
            self.locality,
            self.seed,
        )


def write_moe_checkpoint(
    directory: Path,
    shape: MoeShape,
    cache_directory: Path,
    on_written: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write weights in bfloat16, configuration, and the embedded model's tokenizer.

    Args:
        directory: Made if it is not there.
        shape: Of the model; an architecture of mlx-lm's, qwen3_moe.
        cache_directory: The user's, where the embedded model is kept.
        on_written: Told the bytes of each file.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    eos_token_ids = write_embedded_tokenizer(directory, cache_directory)
    random = np.random.default_rng(shape.seed)
    pool = mx.array(random.standard_normal(_POOL_NUMBERS, dtype=np.float32)).astype(mx.bfloat16)
    for number, arrays in enumerate(_files(shape, random, pool)):
        path = directory / f"model-{number:05d}.safetensors"
        mx.save_safetensors(str(path), arrays, {"format": "mlx"})
        on_written(path.stat().st_size)
    config = json.dumps(_config(shape, eos_token_ids), indent=2)
    (directory / "config.json").write_text(config, encoding="utf-8")
    return directory


def _config(shape: MoeShape, eos_token_ids: frozenset[int]) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "moe_intermediate_size": shape.inner,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_attention_heads": shape.hidden // 2 // 64,
        "num_key_value_heads": shape.hidden // 2 // 64,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": EMBEDDED_VOCABULARY_TOKENS,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": sorted(eos_token_ids),
    }


def _files(
    shape: MoeShape, random: np.random.Generator, pool: mx.array
) -> Iterator[dict[str, mx.array]]:
    """Weights, a file at a time.

    The hidden states are a constant, half the width for the token, and the rest for those before it.
    """
    hidden, half = shape.hidden, shape.hidden // 2
    embedding = random.standard_normal((EMBEDDED_VOCABULARY_TOKENS, hidden), dtype=np.float32)
    embedding[:, half:] = 0
    embedding[:, 0] = np.sqrt(half)
    head = _drawn(pool, random, (EMBEDDED_VOCABULARY_TOKENS, hidden)) * (2.0 / np.sqrt(hidden))
    yield {
        "model.embed_tokens.weight": mx.array(embedding).astype(mx.bfloat16),
        "model.norm.weight": mx.ones(hidden, dtype=mx.bfloat16),
        "lm_head.weight": head.astype(mx.bfloat16),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        arrays = {
            f"{prefix}.{name}": array.astype(mx.bfloat16)
            for name, array in (
                *_attention(shape, is_first=layer == 0),
                ("mlp.gate.weight", mx.array(_router(shape, random))),
            )
        }
        sizes = {"gate_proj": hidden, "up_proj": hidden, "down_proj": shape.inner}
        for name, width in sizes.items():
            height = hidden + shape.inner - width
            scale = (_MOE_SHARE * 2 if name == "down_proj" else 1.0) / np.sqrt(width)
            drawn = _drawn(pool, random, (shape.experts, height, width))
            arrays[f"{prefix}.mlp.switch_mlp.{name}.weight"] = drawn * mx.array(scale, mx.bfloat16)
        mx.eval(arrays)
        yield arrays


def _attention(shape: MoeShape, *, is_first: bool) -> Iterator[tuple[str, mx.array]]:
    """Attention that averages what tokens are, the nearer the more, into the half for those before."""
    hidden, half = shape.hidden, shape.hidden // 2
    constant = np.zeros((half, hidden), dtype=np.float32)
    constant[:, 0] = 1.0
    value = np.zeros((half, hidden), dtype=np.float32)
    value[np.arange(1, half), np.arange(1, half)] = 1.0
    output = np.zeros((hidden, half), dtype=np.float32)
    if is_first:
        output[half + np.arange(half), np.arange(half)] = _CONTEXT_SCALE
    for name, array in (("q", constant), ("k", constant), ("v", value), ("o", output)):
        yield f"self_attn.{name}_proj.weight", mx.array(array)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        yield f"{name}.weight", mx.ones(64)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", mx.ones(hidden)


def _router(shape: MoeShape, random: np.random.Generator) -> Floats:
    """float32 [experts, hidden]: popularity on the constant, noise of the right size on the rest."""
    half = shape.hidden // 2
    ranks = random.permutation(shape.experts) + 1
    # After its norm a hidden state has numbers of size 1: a constant, token, and those before it.
    size = 1 / np.sqrt(3 / 2)
    weights = random.standard_normal((shape.experts, shape.hidden)).astype(np.float32)
    noise = _GUMBEL_STD / (size * np.sqrt(half))
    weights[:, 1:half] *= noise * np.sqrt(1 - shape.locality)
    weights[:, half:] *= noise * np.sqrt(shape.locality)
    weights[:, 0] = -shape.zipf * np.log(ranks) / (size * np.sqrt(half))
    return weights


def _drawn(pool: mx.array, random: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
    """Random numbers of the pool, in pieces that begin anywhere: fast, and unlike each other."""
    count = int(np.prod(shape))
    pieces: list[mx.array] = []
    while count:
        length = min(count, pool.size // 2)
        begin = int(random.integers(0, pool.size - length))
        pieces.append(pool[begin : begin + length])
        count -= length
    return mx.concatenate(pieces).reshape(shape)
