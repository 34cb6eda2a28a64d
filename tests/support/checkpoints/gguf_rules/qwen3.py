"""Qwen 3, dense and with experts."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _moe(config: Config) -> Metadata:
    return {"expert_feed_forward_length": config["moe_intermediate_size"]}


RULES = [
    GgufRules(
        "qwen3",
        "qwen3",
        config={"head_dim": 64, "tie_word_embeddings": True},
        faults={"norms exchanged": exchanged("attn_q_norm", "attn_k_norm")},
    ),
    GgufRules(
        "qwen3",
        "qwen3+yarn",
        case="yarn",
        faults={
            "another factor": with_key("qwen3.rope.scaling.factor", 4.0),
            "another context": with_key("qwen3.rope.scaling.original_context_length", 512),
        },
    ),
    GgufRules(
        "qwen3moe",
        "qwen3_moe",
        metadata=_moe,
        names={"mlp.switch_mlp.": "mlp.experts."},
        faults={
            "gate for up": exchanged("ffn_gate_exps", "ffn_up_exps"),
            "another number of experts for a token": with_key("qwen3moe.expert_used_count", 1),
        },
    ),
]
