"""Command R: rotary positions pair neighbours in llama.cpp and in mlx-lm; the large one has norms for each head."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata, Tensors
from support.checkpoints.gguf_rules.common import LLAMA_ORDER, with_key


def _metadata(config: Config) -> Metadata:
    return {
        "context_length": 131072,
        "logit_scale": config["logit_scale"],
        "rope.scaling.type": "none",
    }


def _reordered(_metadata: Metadata, tensors: Tensors) -> None:
    """Reorder rows as for the families that need it."""
    change = LLAMA_ORDER["q_proj.weight"]
    for name in [one for one in tensors if ".attn_q." in one]:
        tensors[name] = change({"num_attention_heads": 4}, tensors[name])


RULES = [
    GgufRules(
        "command-r",
        "cohere",
        config={"logit_scale": 0.25},
        metadata=_metadata,
        faults={
            "another scale": with_key("command-r.logit_scale", 0.0625),
            "no scale": with_key("command-r.logit_scale", None),
            "rows in llama's order": _reordered,
        },
    ),
    GgufRules(
        "command-r",
        "cohere",
        case="small",
        config={"logit_scale": 0.25, "attention_bias": False, "use_qk_norm": False},
        metadata=_metadata,
    ),
]
