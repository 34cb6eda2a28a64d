"""Gemma 3: norms with their 1; every sixth layer sees the whole context, whose positions large sizes scale."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, plus_one, with_key


def _metadata(config: Config) -> Metadata:
    return {"attention.sliding_window": config["sliding_window"]}


_LAYERS = {"num_hidden_layers": 7, "sliding_window_pattern": 6}

RULES = [
    GgufRules(
        "gemma3",
        "gemma3_text",
        config=_LAYERS,
        metadata=_metadata,
        changes={"norm.weight": plus_one},
        dropped=("lm_head.weight",),
        faults={
            "another window": with_key("gemma3.attention.sliding_window", 5),
            "norms exchanged": exchanged("ffn_norm", "post_ffw_norm"),
        },
    ),
    GgufRules(
        "gemma3",
        "gemma3_text",
        case="scaled",
        config={**_LAYERS, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        metadata=_metadata,
        changes={"norm.weight": plus_one},
        dropped=("lm_head.weight",),
        faults={
            "another factor": with_key("gemma3.rope.scaling.factor", 4.0),
            "a bound of logits": with_key("gemma3.final_logit_softcapping", 30.0, is_new=True),
        },
    ),
    GgufRules(
        "gemma3",
        "gemma3_text",
        case="untied-pattern",
        config={
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 500.0,
        },
        metadata=lambda config: (
            _metadata(config) | {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0}
        ),
        changes={"norm.weight": plus_one},
        faults={
            "another base within windows": with_key("gemma3.rope.freq_base_swa", None),
            "another pattern": with_key("gemma3.attention.sliding_window_pattern", 3),
            "no window": with_key("gemma3.attention.sliding_window", None),
        },
    ),
]
