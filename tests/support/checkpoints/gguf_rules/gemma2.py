"""Gemma 2: norms with their 1, no weights of the output, and bounds of logits."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, plus_one, with_key


def _metadata(config: Config) -> Metadata:
    return {
        "context_length": 8192,
        "rope.freq_base": None,
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": 4096,
    }


_CAPS = {
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 32,
}
"""Bounds close to the tiny model's logits, so that they bend them."""

RULES = [
    GgufRules(
        "gemma2",
        "gemma2",
        config=_CAPS,
        metadata=_metadata,
        changes={"norm.weight": plus_one},
        faults={
            "another bound of attention": with_key("gemma2.attn_logit_softcapping", 50.0),
            "another bound of logits": with_key("gemma2.final_logit_softcapping", 30.0),
            "no bound": with_key("gemma2.final_logit_softcapping", 0.0),
            "norms exchanged": exchanged("ffn_norm", "post_attention_norm"),
        },
    ),
]
