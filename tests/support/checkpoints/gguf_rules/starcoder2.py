"""StarCoder 2: layer norms, biases everywhere, and a feed-forward without a gate."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _metadata(_config: Config) -> Metadata:
    return {"context_length": 1024, "attention.layer_norm_epsilon": 1e-5}


RULES = [
    GgufRules(
        "starcoder2",
        "starcoder2",
        metadata=_metadata,
        faults={
            "norms exchanged": exchanged("attn_norm", "ffn_norm"),
            "no epsilon": with_key("starcoder2.attention.layer_norm_epsilon", None),
            "another base of the rotary positions": with_key("starcoder2.rope.freq_base", 500.0),
        },
    ),
    GgufRules(
        "starcoder2",
        "starcoder2",
        case="tied",
        config={"tie_word_embeddings": True},
        metadata=_metadata,
    ),
]
