"""Qwen 2, dense and with experts."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, first_row, with_key


def _moe(config: Config) -> Metadata:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


_EXPERTS = {"mlp.switch_mlp.": "mlp.experts."}
_CONTEXT = {"max_position_embeddings": 1024}

RULES = [
    GgufRules(
        "qwen2",
        "qwen2",
        config=_CONTEXT,
        faults={
            "keys for values": exchanged("attn_k", "attn_v"),
            "another base of the rotary positions": with_key("qwen2.rope.freq_base", 500.0),
        },
    ),
    GgufRules("qwen2", "qwen2", case="tied", config={**_CONTEXT, "tie_word_embeddings": True}),
    GgufRules(
        "qwen2moe",
        "qwen2_moe",
        config=_CONTEXT,
        metadata=_moe,
        names=_EXPERTS,
        faults={
            "the shared expert's gate for up": exchanged("ffn_gate_shexp", "ffn_up_shexp"),
            "another number of experts for a token": with_key("qwen2moe.expert_used_count", 1),
        },
    ),
    GgufRules(
        "qwen2moe",
        "qwen2_moe",
        case="of older converters",
        config=_CONTEXT,
        metadata=_moe,
        names=_EXPERTS,
        rearranged=first_row(".shared_expert_gate.weight"),
    ),
]
