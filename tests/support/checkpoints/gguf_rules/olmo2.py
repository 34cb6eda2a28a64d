"""OLMo 2, and OLMo 3, which has layers with a sliding window besides."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _sliding(config: Config) -> Metadata:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            one == "sliding_attention" for one in config["layer_types"]
        ],
    }


RULES = [
    GgufRules(
        "olmo2",
        "olmo2",
        faults={"norms exchanged": exchanged("post_attention_norm", "post_ffw_norm")},
    ),
    GgufRules(
        "olmo2",
        "olmo3",
        case="olmo3",
        metadata=_sliding,
        faults={
            "another window": with_key("olmo2.attention.sliding_window", 5),
            "other layers": with_key("olmo2.attention.sliding_window_pattern", [False, True]),
        },
    ),
]
