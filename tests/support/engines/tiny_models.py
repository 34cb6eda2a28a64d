"""Tiny models of mlx-lm in memory, one for each kind of cache, whose errors show.

mlx-lm's own initialisation is too weak for a comparison: a model that repeats one token whatever it
reads hides every fault of its cache. Here weights keep the size of what flows through them, norms
and biases are not neutral, and the seeds were chosen so that greedy answers are varied and depend
on the first tokens of the prompt; ``tests/unit/engine/test_tiny_models.py`` holds them to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.tokenizer.tokenizer import MlxTokenizer

VOCABULARY_TOKENS = 128
CONTEXT_TOKENS = 1024

_END_OF_TEXT = 0
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


class TinyKind(StrEnum):
    """A model's kind of cache."""

    STANDARD = "standard"
    """llama: ``KVCache`` alone."""

    ROTATING = "rotating"
    """gemma3_text: ``RotatingKVCache`` of eight positions and no sink tokens, and ``KVCache``."""

    HYBRID_GDN = "hybrid_gdn"
    """qwen3_next: the gated delta net's state in an ``ArraysCache``, and ``KVCache``."""

    HYBRID = "hybrid"
    """lfm2: the short convolution's state in an ``ArraysCache``, and ``KVCache``."""

    NESTED = "nested"
    """falcon_h1: a ``CacheList`` of a state-space ``ArraysCache`` and a ``KVCache``."""

    NESTED_ROTATING = "nested_rotating"
    """baichuan_m1: ``CacheList`` of a convolution's state and a rotating or a plain cache."""


EVERY_RUN = (TinyKind.STANDARD, TinyKind.HYBRID_GDN, TinyKind.NESTED_ROTATING)
"""Kinds that `make test` runs: plain keys and values, the gated delta net, and all else in one model."""

_LOOKING_AHEAD = (TinyKind.STANDARD, TinyKind.NESTED_ROTATING)
"""Kinds that `make test` runs with look-ahead."""


def each_kind() -> pytest.MarkDecorator:
    """Parametrise ``kind`` over all kinds; those that are not of :data:`EVERY_RUN` have the marker ``long``."""
    return pytest.mark.parametrize(
        "kind",
        [pytest.param(one, marks=() if one in EVERY_RUN else pytest.mark.long) for one in TinyKind],
    )


def each_kind_and_look_ahead() -> pytest.MarkDecorator:
    """Parametrise ``kind`` and ``looks_ahead`` over all pairs.

    `make test` runs :data:`EVERY_RUN` in step and :data:`_LOOKING_AHEAD` looking ahead; the other pairs
    have the marker ``long``.
    """
    return pytest.mark.parametrize(
        ("kind", "looks_ahead"),
        [
            pytest.param(
                kind,
                looks_ahead,
                id=f"{kind}-{'looking ahead' if looks_ahead else 'in step'}",
                marks=()
                if kind in (_LOOKING_AHEAD if looks_ahead else EVERY_RUN)
                else pytest.mark.long,
            )
            for looks_ahead in (False, True)
            for kind in TinyKind
        ],
    )


@dataclass(frozen=True)
class _Recipe:
    architecture: str
    seed: int
    config: Mapping[str, object]
    embedding_scale: float = 1.0
    """Small where the head is the embedding, which would only repeat what it just read."""


_COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
}

_RECIPES = {
    TinyKind.STANDARD: _Recipe("llama", 0, {"num_hidden_layers": 2, "attention_bias": True}),
    TinyKind.ROTATING: _Recipe(
        "gemma3_text",
        0,
        {
            "num_hidden_layers": 2,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
        },
    ),
    TinyKind.HYBRID_GDN: _Recipe(
        "qwen3_next",
        2,
        {
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "partial_rotary_factor": 0.5,
        },
    ),
    TinyKind.HYBRID: _Recipe(
        "lfm2",
        12,
        {
            "num_hidden_layers": 2,
            "conv_bias": True,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1],
        },
        embedding_scale=0.2,
    ),
    TinyKind.NESTED: _Recipe(
        "falcon_h1",
        0,
        {
            "num_hidden_layers": 2,
            "mamba_d_conv": 4,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_n_heads": 4,
            "mamba_rms_norm": True,
        },
    ),
    TinyKind.NESTED_ROTATING: _Recipe(
        "baichuan_m1",
        0,
        {
            "num_hidden_layers": 2,
            "sliding_window": 8,
            "sliding_window_layers": [0],
            "conv_window": 2,
        },
    ),
}


def tiny_model(kind: TinyKind, *, seed: int | None = None) -> LoadedModel:
    """Build a model of a kind on this thread, the same every time; another ``seed``, another one."""
    import_mlx_lm()
    recipe = _RECIPES[kind]
    module = importlib.import_module(f"mlx_lm.models.{recipe.architecture}")
    config = {"model_type": recipe.architecture, **_COMMON, **recipe.config}
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    _condition(model, recipe.seed if seed is None else seed, recipe.embedding_scale)
    model.eval()
    description = describe_model(
        model,
        model_id=f"tiny-{recipe.architecture}",
        architecture=recipe.architecture,
        context_tokens=CONTEXT_TOKENS,
        eos_token_ids=frozenset({_END_OF_TEXT}),
    )
    return LoadedModel(model, tiny_tokenizer(), replace(description, device_memory_bytes=0))


def tiny_tokenizer() -> MlxTokenizer:
    """One token for each ASCII character but NUL, whose place the end of text has."""
    import_mlx_lm()
    from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: PLC0415 - after import_mlx_lm()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - the same
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - the same

    tokens = ["<|end|>", *(_byte_level_character(byte) for byte in range(1, VOCABULARY_TOKENS))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return MlxTokenizer(TokenizerWrapper(inner, eos_token_ids=[_END_OF_TEXT]))


def _byte_level_character(byte: int) -> str:
    """GPT-2's spelling of an ASCII byte: printable ones as they are, the others from U+0100."""
    if 0x21 <= byte < 0x7F:
        return chr(byte)
    return chr(0x100 + (byte if byte <= 0x20 else byte - 0x7F + 0x21))


def _condition(model: Module, seed: int, embedding_scale: float) -> None:
    """Give every parameter a size that keeps the signal's, and no parameter a neutral value."""
    random = np.random.default_rng(seed)
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    drawn = {name: mx.array(_drawn(name, array, random)) for name, array in flat}
    drawn["model.embed_tokens.weight"] *= embedding_scale
    model.load_weights(list(drawn.items()))
    mx.eval(model.parameters())


def _drawn(name: str, array: mx.array, random: np.random.Generator) -> NDArray[np.float32]:
    """Another value for one parameter, float32."""
    noise = random.standard_normal(array.shape).astype(np.float32)
    if array.ndim == 1 or name.endswith(("conv_k", "conv_v")):
        return (_centre(name, array) + 0.3 * noise).astype(np.float32)
    if "embed_tokens" in name:
        return noise
    # The last axis alone for a depthwise convolution's (channels, kernel, 1) too.
    fan_in = array.size // array.shape[0] if "conv" in name else array.shape[-1]
    scale = np.float32(1.5 / np.sqrt(fan_in))
    return noise * scale


def _centre(name: str, array: mx.array) -> NDArray[np.float32]:
    """Return what a parameter is drawn around: what mlx-lm sets, unless that is random or nothing."""
    if name.endswith(".bias"):
        return np.zeros(array.shape, dtype=np.float32)
    if name.endswith(("conv_k", "conv_v")):
        return np.full(array.shape, 0.5, dtype=np.float32)
    if name.endswith("A_log"):
        return np.log(np.linspace(0.05, 1.0, array.size, dtype=np.float32))
    return np.array(array, dtype=np.float32)
