"""Command R, which mlx-lm calls cohere."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    HEAD_NORMS,
    TIED_NAMES,
    plain_rope_config,
    refuse_head_dim,
)
from machd.engine.loading.formats.gguf.header import GgufHeader


def _config(header: GgufHeader) -> dict[str, object]:
    refuse_head_dim(header)
    return plain_rope_config(header, "layer_norm_eps") | {
        "logit_scale": header.number("command-r.logit_scale"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }


COMMAND_R = Family(
    "command-r", "cohere", {**TIED_NAMES, **HEAD_NORMS}, _config, leaves_out=frozenset()
)
