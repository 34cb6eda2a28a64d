"""Command R7B and Command A, which mlx-lm calls cohere2."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    TIED_NAMES,
    plain_rope_config,
    refuse_head_dim,
)
from machd.engine.loading.formats.gguf.header import GgufHeader

_LAYERS_IN_PATTERN = 4
"""Every fourth layer sees the whole context, where no key says another number, as in llama.cpp."""


def _config(header: GgufHeader) -> dict[str, object]:
    refuse_head_dim(header)
    return plain_rope_config(header, "layer_norm_eps") | {
        "logit_scale": header.number("cohere2.logit_scale"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "sliding_window": header.integer("cohere2.attention.sliding_window"),
        "sliding_window_pattern": header.integer(
            "cohere2.attention.sliding_window_pattern", _LAYERS_IN_PATTERN
        ),
    }


COHERE2 = Family("cohere2", "cohere2", TIED_NAMES, _config, leaves_out=frozenset())
