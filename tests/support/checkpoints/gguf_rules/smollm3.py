"""SmolLM3: a llama in which every fourth layer has no rotary positions, which no key says."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import GgufRules
from support.checkpoints.gguf_rules.common import LLAMA_ORDER, rotary_dimensions

RULES = [
    GgufRules(
        "smollm3",
        "smollm3",
        config={
            "num_hidden_layers": 5,
            "no_rope_layers": [1, 1, 1, 0, 1],
            "layer_types": ["full_attention"] * 5,
            "sliding_window": None,
        },
        metadata=rotary_dimensions,
        changes=LLAMA_ORDER,
    ),
]
