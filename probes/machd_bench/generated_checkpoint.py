"""Checkpoints of any size with random weights, dense or mixture-of-experts, for benchmarks and tests.

A random router would choose every expert equally often and independently of the tokens before, so a cache of
experts could not be measured with it. A generated router scores an expert by the sum of

- its popularity: the expert of rank r counts r^-s (Zipf), with ranks of its own for each layer;
- the current token;
- the tokens before it, the nearer the more (the first layer's attention weighs distance d about 1 / d).

The last two are normally distributed, with the variance of a Gumbel distribution, so that the top k of the
scores are about k draws by popularity. ``locality`` is the share of the tokens before in that variance: the higher, the more
experts successive tokens have in common. Experts add a little to the hidden states, so that a layer's choice can be
predicted from the layer before, but not always.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.loading.embedded_tokenizer import (
    EMBEDDED_VOCABULARY_TOKENS,
    write_embedded_tokenizer,
)

Floats = NDArray[np.float32]

_GUMBEL_STD = 1.28
"""Standard deviation of a Gumbel distribution: pi / sqrt(6)."""

_POOL_VALUES = 1 << 24
"""Normally distributed values that all large weights are cut from: drawing each anew takes minutes."""

_MOE_SHARE = 0.3
"""Size of the experts' output, relative to the hidden states."""

_CONTEXT_SCALE = 4.0
"""About the square root of the number of tokens that the first layer averages."""

_HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Sizes of a generated dense model, of mlx-lm's architecture ``qwen3``.

    Attributes:
        hidden: Width; a multiple of 128.
        inner: Width of the feed-forward layer; a multiple of 64.
    """

    hidden: int = 1024
    inner: int = 2816
    layers: int = 12
    seed: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer in bfloat16."""
        return (2 * self.hidden**2 + 3 * self.hidden * self.inner) * 2

    def config(self) -> dict[str, object]:
        """Return the part of ``config.json`` that is this kind's own."""
        return {"model_type": "qwen3", "intermediate_size": self.inner}

    def feed_forward(self, draw: _Draw) -> Iterator[tuple[str, mx.array]]:
        """Yield a layer's feed-forward weights by name."""
        for name, width in _widths(self.hidden, self.inner):
            height = self.hidden + self.inner - width
            yield f"mlp.{name}.weight", draw((height, width)) * (1 / np.sqrt(width))


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes and routing of a generated mixture-of-experts model, of mlx-lm's architecture ``qwen3_moe``.

    Attributes:
        hidden: Width; a multiple of 128.
        inner: Width of an expert; a multiple of 64.
        experts: Experts in each layer.
        chosen: Experts of a token in each layer.
        zipf: Exponent of popularity; 0 for equally popular experts.
        locality: Share of the tokens before in the choice beside popularity, between 0 and 1.
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
    def layer_bytes(self) -> int:
        """Bytes of a layer's experts in bfloat16."""
        return 3 * self.hidden * self.inner * self.experts * 2

    def config(self) -> dict[str, object]:
        """Return the part of ``config.json`` that is this kind's own."""
        return {
            "model_type": "qwen3_moe",
            "intermediate_size": self.inner,
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }

    def feed_forward(self, draw: _Draw) -> Iterator[tuple[str, mx.array]]:
        """Yield a layer's router and experts by name."""
        yield "mlp.gate.weight", mx.array(_router(self, draw.random))
        for name, width in _widths(self.hidden, self.inner):
            height = self.hidden + self.inner - width
            scale = (_MOE_SHARE * 2 if name == "down_proj" else 1.0) / np.sqrt(width)
            values = draw((self.experts, height, width)) * mx.array(scale, mx.bfloat16)
            yield f"mlp.switch_mlp.{name}.weight", values


Shape = DenseShape | MoeShape
SomeShape = TypeVar("SomeShape", DenseShape, MoeShape)


def sized(shape: SomeShape, stored_gb: float) -> SomeShape:
    """Return a shape with as many layers as take about so many GB (10^9 bytes), two at least."""
    return replace(shape, layers=max(round(stored_gb * 1e9 / shape.layer_bytes), 2))


def stored_bytes(shape: Shape) -> int:
    """Return about the bytes that a model's files take, token embeddings included."""
    return shape.layers * shape.layer_bytes + 4 * EMBEDDED_VOCABULARY_TOKENS * shape.hidden


def write_generated_checkpoint(
    directory: Path,
    shape: Shape,
    cache_directory: Path,
    on_written: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write weights in bfloat16, a file a layer, with configuration and the embedded model's tokenizer.

    Args:
        directory: Created if it does not exist.
        shape: The model's sizes.
        cache_directory: The user's, which holds the embedded model.
        on_written: Called with the bytes of each file.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    eos_token_ids = write_embedded_tokenizer(directory, cache_directory)
    for number, arrays in enumerate(_files(shape)):
        path = directory / f"model-{number:05d}.safetensors"
        mx.save_safetensors(str(path), arrays, {"format": "mlx"})
        on_written(path.stat().st_size)
    config = json.dumps(_config(shape, eos_token_ids), indent=2)
    (directory / "config.json").write_text(config, encoding="utf-8")
    return directory


def _config(shape: Shape, eos_token_ids: frozenset[int]) -> dict[str, object]:
    heads = shape.hidden // 2 // _HEAD_DIM
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": EMBEDDED_VOCABULARY_TOKENS,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": sorted(eos_token_ids),
        **shape.config(),
    }


def _files(shape: Shape) -> Iterator[dict[str, mx.array]]:
    """Yield the weights, one file at a time.

    A hidden state is a constant (dimension 0), the current token (the rest of the first half) and the tokens before it
    (the second half).
    """
    random = np.random.default_rng(shape.seed)
    draw = _Draw(random)
    hidden, half = shape.hidden, shape.hidden // 2
    embedding = random.standard_normal((EMBEDDED_VOCABULARY_TOKENS, hidden), dtype=np.float32)
    embedding[:, half:] = 0
    embedding[:, 0] = np.sqrt(half)
    head = draw((EMBEDDED_VOCABULARY_TOKENS, hidden)) * (2.0 / np.sqrt(hidden))
    yield {
        "model.embed_tokens.weight": mx.array(embedding).astype(mx.bfloat16),
        "model.norm.weight": mx.ones(hidden, dtype=mx.bfloat16),
        "lm_head.weight": head.astype(mx.bfloat16),
    }
    for layer in range(shape.layers):
        weights = (*_attention(shape, is_first=layer == 0), *shape.feed_forward(draw))
        arrays = {
            f"model.layers.{layer}.{name}": array.astype(mx.bfloat16) for name, array in weights
        }
        mx.eval(arrays)
        yield arrays


def _widths(hidden: int, inner: int) -> tuple[tuple[str, int], ...]:
    """Return the projections of a feed-forward layer with their input widths."""
    return ("gate_proj", hidden), ("up_proj", hidden), ("down_proj", inner)


def _attention(shape: Shape, *, is_first: bool) -> Iterator[tuple[str, mx.array]]:
    """Yield attention that averages the tokens before, the nearer the more, into the second half.

    Only the first layer's does; the others add nothing.
    """
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
    """Return float32 [experts, hidden]: popularity by the constant, noise by the other dimensions."""
    half = shape.hidden // 2
    ranks = random.permutation(shape.experts) + 1
    # The three parts of a hidden state have sizes 1, 1 and 1 in half the width each: after the norm, sqrt(2/3).
    size = 1 / np.sqrt(3 / 2)
    weights = random.standard_normal((shape.experts, shape.hidden)).astype(np.float32)
    noise = _GUMBEL_STD / (size * np.sqrt(half))
    weights[:, 1:half] *= noise * np.sqrt(1 - shape.locality)
    weights[:, half:] *= noise * np.sqrt(shape.locality)
    weights[:, 0] = -shape.zipf * np.log(ranks) / (size * np.sqrt(half))
    return weights


class _Draw:
    """Draws weights as pieces of one pool, each of which begins anywhere in it."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        values = random.standard_normal(_POOL_VALUES, dtype=np.float32)
        self._pool = mx.array(values).astype(mx.bfloat16)

    def __call__(self, shape: tuple[int, ...]) -> mx.array:
        """Return normally distributed bfloat16 values."""
        count = int(np.prod(shape))
        pieces: list[mx.array] = []
        while count:
            length = min(count, self._pool.size // 2)
            begin = int(self.random.integers(0, self._pool.size - length))
            pieces.append(self._pool[begin : begin + length])
            count -= length
        return mx.concatenate(pieces).reshape(shape)
