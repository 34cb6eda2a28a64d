"""Granite 3, dense and with experts: a llama with four factors."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import (
    LLAMA_ORDER,
    exchanged,
    rotary_dimensions,
    with_key,
)

_FACTORS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}


def _metadata(config: Config) -> Metadata:
    return rotary_dimensions(config) | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


RULES = [
    GgufRules(
        "granite",
        "granite",
        config={**_FACTORS, "tie_word_embeddings": True},
        metadata=_metadata,
        changes=LLAMA_ORDER,
        faults={
            f"another {name}": with_key(f"granite.{name}", 0.75)
            for name in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
        },
    ),
    GgufRules(
        "granitemoe",
        "granitemoe",
        config=_FACTORS,
        metadata=_metadata,
        names={"block_sparse_moe.switch_mlp.": "mlp.experts."},
        changes=LLAMA_ORDER,
        faults={"gate for up": exchanged("ffn_gate_exps", "ffn_up_exps")},
    ),
]
