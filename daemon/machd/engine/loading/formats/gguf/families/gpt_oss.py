"""gpt-oss: experts with biases, attention sinks, and a sliding window in every second layer."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    NAMES,
    refuse_partial_rope,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

_LAYERS_IN_PATTERN = 2
"""The last layer of each pattern sees the whole context; llama.cpp's default, which the converter writes no key for."""


def _config(header: GgufHeader) -> dict[str, object]:
    # The only feed-forward layers are the experts'.
    experts_size = header.integer("gpt-oss.expert_feed_forward_length")
    config = transformer_config(header)
    head_dim, layers = config["head_dim"], config["num_hidden_layers"]
    assert isinstance(head_dim, int)
    assert isinstance(layers, int)
    refuse_partial_rope(header, head_dim)
    base = header.number("gpt-oss.rope.freq_base", 10000.0)
    if header.number("gpt-oss.rope.freq_base_swa", base) != base:
        raise ModelFormatError(
            f"{header.path.name}: gpt-oss.rope.freq_base_swa is not supported; mlx-lm's gpt_oss has one base"
        )
    pattern = header.integer("gpt-oss.attention.sliding_window_pattern", _LAYERS_IN_PATTERN)
    if pattern < 2:
        raise ModelFormatError(
            f"{header.path.name}: gpt-oss.attention.sliding_window_pattern is {pattern}; mlx-lm's gpt_oss needs "
            "layers of both kinds"
        )
    return config | {
        "intermediate_size": experts_size,
        "num_local_experts": header.integer("gpt-oss.expert_count"),
        "num_experts_per_tok": header.integer("gpt-oss.expert_used_count"),
        "sliding_window": header.integer("gpt-oss.attention.sliding_window"),
        "layer_types": [
            "full_attention" if index % pattern == pattern - 1 else "sliding_attention"
            for index in range(layers)
        ],
    }


GPT_OSS = Family(
    "gpt-oss",
    "gpt_oss",
    {
        **{ggml: path for ggml, path in NAMES.items() if not ggml.startswith("blk.*.ffn_")},
        "blk.*.attn_sinks.weight": "model.layers.*.self_attn.sinks",
        "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
        "blk.*.ffn_gate_inp": "model.layers.*.mlp.router",
        "blk.*.ffn_gate_exps": "model.layers.*.mlp.experts.gate_proj",
        "blk.*.ffn_up_exps": "model.layers.*.mlp.experts.up_proj",
        "blk.*.ffn_down_exps": "model.layers.*.mlp.experts.down_proj",
    },
    _config,
)
