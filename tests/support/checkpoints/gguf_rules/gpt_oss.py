"""gpt-oss: sinks are tensors with ``.weight``; the experts' length has a key of its own."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import exchanged, with_key


def _metadata(config: Config) -> Metadata:
    scaling = config["rope_scaling"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
        "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
    }


RULES = [
    GgufRules(
        "gpt-oss",
        "gpt_oss",
        config={
            "max_position_embeddings": 32768,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 2.0,
            },
        },
        metadata=_metadata,
        kinds=("F32", "F16", "Q8_0", "MXFP4"),
        names={"self_attn.sinks": "self_attn.sinks.weight"},
        faults={
            "another window": with_key("gpt-oss.attention.sliding_window", 5),
            "layers of the other kind": with_key("gpt-oss.block_count", 3),
            "another scaling": with_key("gpt-oss.rope.scaling.yarn_beta_fast", 8.0),
            "gate for up": exchanged("ffn_gate_exps", "ffn_up_exps"),
        },
    ),
]
