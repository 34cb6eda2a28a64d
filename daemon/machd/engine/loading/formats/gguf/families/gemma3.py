"""Gemma 3, text only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    FEEDFORWARD_NORMS,
    HEAD_NORMS,
    NAMES,
    less_one,
    refuse_partial_rope,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

_LAYERS_IN_PATTERN = 6
"""Every sixth layer sees the whole context, where no key says another number, as in llama.cpp."""

_LAYERS_OF_27B = 62
"""Their number tells the one size whose queries are scaled by the width of a head of the hidden state, as in llama.cpp."""


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    head_dim, layers = config["head_dim"], config["num_hidden_layers"]
    assert isinstance(head_dim, int)
    refuse_partial_rope(header, head_dim)
    if header.number("gemma3.final_logit_softcapping", 0.0):
        raise ModelFormatError(
            f"{header.path.name}: gemma3.final_logit_softcapping is set, which mlx-lm's Gemma 3 has not"
        )
    of_hidden = header.integer("gemma3.embedding_length") // header.integer(
        "gemma3.attention.head_count"
    )
    window = header.integer("gemma3.attention.sliding_window", 0)
    pattern = header.integer("gemma3.attention.sliding_window_pattern", _LAYERS_IN_PATTERN)
    return config | {
        # Files without it say the base in keys of their own, such as Ollama's, and the usual default would be wrong.
        "rope_theta": header.number("gemma3.rope.freq_base"),
        "query_pre_attn_scalar": of_hidden if layers == _LAYERS_OF_27B else head_dim,
        "sliding_window": window,
        # Without a window, each layer is one of those that see the whole context.
        "sliding_window_pattern": pattern if window else 1,
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
        **FEEDFORWARD_NORMS,
    },
    _config,
    {"norm": less_one},
    leaves_out=frozenset(),
    finish=_finish,
)
