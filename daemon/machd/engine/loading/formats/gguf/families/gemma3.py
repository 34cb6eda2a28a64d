"""Gemma 3, text only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    HEAD_NORMS,
    NAMES,
    less_one,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

_LAYERS_IN_PATTERN = 6
"""Every sixth layer sees the whole context; llama.cpp's own constant for this architecture, which no key has."""


_LAYERS_OF_27B = 62
"""Their number tells the one size whose queries are scaled by the width of a head of the hidden state, as in llama.cpp."""


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    assert isinstance(heads, int)
    of_hidden = header.integer("gemma3.embedding_length") // heads
    return config | {
        "query_pre_attn_scalar": of_hidden if layers == _LAYERS_OF_27B else config["head_dim"],
        "sliding_window": header.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": _LAYERS_IN_PATTERN,
        "rope_local_base_freq": header.number("gemma3.rope.freq_base_swa", 10000.0),
    }


def _finish(header: GgufHeader, model: Module) -> None:
    if not header.has("output.weight"):
        model.tie_word_embeddings = True
        model.pop("lm_head")


GEMMA3 = Family(
    "gemma3",
    "gemma3_text",
    {
        **NAMES,
        **HEAD_NORMS,
        "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
        "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
        "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
    },
    _config,
    {"norm": less_one},
    finish=_finish,
)
