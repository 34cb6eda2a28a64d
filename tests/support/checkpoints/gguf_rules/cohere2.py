"""Command R7B: windows, and positions in the layers with a window alone; the converter leaves biases out, which are all 0."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _metadata(config: Config) -> Metadata:
    return {
        "context_length": 132096,
        "logit_scale": config["logit_scale"],
        "attention.sliding_window": config["sliding_window"],
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.type": "none",
    }


RULES = [
    GgufRules(
        "cohere2",
        "cohere2",
        config={
            "num_hidden_layers": 5,
            "sliding_window_pattern": 4,
            "logit_scale": 0.25,
            "attention_bias": False,
        },
        metadata=_metadata,
        faults={
            "another window": with_key("cohere2.attention.sliding_window", 5),
            "no window": with_key("cohere2.attention.sliding_window", None),
            "another pattern": with_key("cohere2.attention.sliding_window_pattern", 2, is_new=True),
            "another scale": with_key("cohere2.logit_scale", 0.0625),
            "gate for up": exchanged("ffn_gate", "ffn_up"),
        },
    ),
]
