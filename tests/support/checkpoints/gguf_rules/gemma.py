"""Gemma, the first: norms with their 1, and no weights of the output."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, plus_one, with_key


def _metadata(_config: Config) -> Metadata:
    return {"context_length": 8192, "rope.freq_base": None}


RULES = [
    GgufRules(
        "gemma",
        "gemma",
        metadata=_metadata,
        changes={"norm.weight": plus_one},
        faults={
            "norms exchanged": exchanged("attn_norm", "ffn_norm"),
            "gate for up": exchanged("ffn_gate", "ffn_up"),
            "scaled positions": with_key("gemma.rope.scaling.factor", 2.0, is_new=True),
            "a part of each head": with_key("gemma.rope.dimension_count", 16, is_new=True),
        },
    ),
]
