"""Gemma 3: norms with their 1; every sixth layer sees the whole context."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, plus_one, with_key


def _metadata(config: Config) -> Metadata:
    return {"attention.sliding_window": config["sliding_window"]}


RULES = [
    GgufRules(
        "gemma3",
        "gemma3_text",
        config={"num_hidden_layers": 7, "sliding_window_pattern": 6},
        metadata=_metadata,
        changes={"norm.weight": plus_one},
        dropped=("lm_head.weight",),
        faults={
            "another window": with_key("gemma3.attention.sliding_window", 5),
            "norms exchanged": exchanged("ffn_norm", "post_ffw_norm"),
        },
    ),
]
