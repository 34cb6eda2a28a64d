"""LFM2: short convolutions, and attention in some layers."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    check_heads,
    refuse_head_dim,
    refuse_rope_scaling,
    transformer_config,
    with_channel,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

_HEADS = "lfm2.attention.head_count_kv"


def _config(header: GgufHeader) -> dict[str, object]:
    counts = [int(count) for count in header.numbers(_HEADS)]
    of_attention = set(counts) - {0}
    if len(counts) != header.integer("lfm2.block_count") or len(of_attention) != 1:
        raise ModelFormatError(
            f"{header.path.name}: {_HEADS} is no list of one count and of 0 for layers without attention"
        )
    if header.integer("lfm2.attention.sliding_window", 0):
        raise ModelFormatError(
            f"{header.path.name}: lfm2.attention.sliding_window is not supported"
        )
    refuse_head_dim(header)
    refuse_rope_scaling(header)
    same = {**header.metadata, _HEADS: of_attention.pop()}
    config = transformer_config(GgufHeader(header.path, same, header.tensors))
    check_heads(header, config)
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": header.integer("lfm2.shortconv.l_cache"),
        "conv_bias": False,
        "block_dim": config["hidden_size"],
        # The file's length is the one that a checkpoint's is adjusted to.
        "block_ff_dim": config["intermediate_size"],
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 1,
    }


LFM2 = Family(
    "lfm2",
    "lfm2",
    {
        **NAMES,
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",
        "blk.*.attn_norm": "model.layers.*.operator_norm",
        "blk.*.attn_output": "model.layers.*.self_attn.out_proj",
        "blk.*.attn_q_norm": "model.layers.*.self_attn.q_layernorm",
        "blk.*.attn_k_norm": "model.layers.*.self_attn.k_layernorm",
        "blk.*.shortconv.conv": "model.layers.*.conv.conv",
        "blk.*.shortconv.in_proj": "model.layers.*.conv.in_proj",
        "blk.*.shortconv.out_proj": "model.layers.*.conv.out_proj",
        "blk.*.ffn_norm": "model.layers.*.ffn_norm",
        "blk.*.ffn_gate": "model.layers.*.feed_forward.w1",
        "blk.*.ffn_up": "model.layers.*.feed_forward.w3",
        "blk.*.ffn_down": "model.layers.*.feed_forward.w2",
    },
    _config,
    {".conv.conv": with_channel},
)
