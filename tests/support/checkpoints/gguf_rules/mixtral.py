"""Mixtral: a llama with experts, whose own tensors converters stack."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import GgufRules
from support.checkpoints.gguf_rules.common import (
    WITHOUT_BIASES,
    exchanged,
    rotary_dimensions,
    with_key,
)

RULES = [
    GgufRules(
        "llama",
        "mixtral",
        case="mixtral",
        config={"max_position_embeddings": 1024},
        metadata=rotary_dimensions,
        names={"block_sparse_moe.switch_mlp.": "mlp.experts."},
        changes=WITHOUT_BIASES,
        faults={
            "gate for up": exchanged("ffn_gate_exps", "ffn_up_exps"),
            "another number of experts for a token": with_key("llama.expert_used_count", 1),
        },
    ),
]
