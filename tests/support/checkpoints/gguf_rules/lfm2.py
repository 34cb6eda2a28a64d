"""LFM2: heads of keys as a list, with 0 for convolutions; the last norm is called that of the embeddings."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata, Tensors
from support.checkpoints.gguf_rules.common import exchanged, with_key

_LAYERS = ["conv", "full_attention", "conv", "full_attention"]


def _metadata(config: Config) -> Metadata:
    heads = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [
            heads if one == "full_attention" else 0 for one in config["layer_types"]
        ],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": config["vocab_size"],
    }


def _squeezed(_config: Config, tensors: Tensors) -> Tensors:
    return {name: values.squeeze() for name, values in tensors.items()}


RULES = [
    GgufRules(
        "lfm2",
        "lfm2",
        config={"num_hidden_layers": 4, "layer_types": _LAYERS, "conv_bias": False},
        metadata=_metadata,
        rearranged=_squeezed,
        floats=("shortconv.conv",),
        faults={
            "gate for up": exchanged("ffn_gate", "ffn_up"),
            "layers of the other kind": with_key("lfm2.attention.head_count_kv", [2, 0, 2, 0]),
            "another base of the rotary positions": with_key("lfm2.rope.freq_base", 500.0),
        },
    ),
]
