"""Llama: rows of heads in another order; biases where a checkpoint has them."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import LLAMA_ORDER, exchanged, with_key


def _metadata(config: Config) -> Metadata:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"]}


RULES = [
    GgufRules(
        "llama",
        "llama",
        metadata=_metadata,
        changes=LLAMA_ORDER,
        faults={
            "gate for up": exchanged("ffn_gate", "ffn_up"),
            "another base of the rotary positions": with_key("llama.rope.freq_base", 500.0),
        },
    ),
    GgufRules(
        "llama",
        "llama",
        case="tied",
        config={"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
        metadata=_metadata,
        changes={end: LLAMA_ORDER[end] for end in ("q_proj.weight", "k_proj.weight")},
    ),
]
