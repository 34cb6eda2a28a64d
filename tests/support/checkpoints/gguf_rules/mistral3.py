"""Mistral Small 3, a llama, and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata
from support.checkpoints.gguf_rules.common import (
    WITHOUT_BIASES,
    rotary_dimensions,
    with_key,
)


def _metadata(config: Config) -> Metadata:
    rotary = config["rope_parameters"]
    return rotary_dimensions(config) | {
        "rope.freq_base": rotary["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rotary["factor"],
        "rope.scaling.original_context_length": rotary["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rotary["beta_fast"],
        "rope.scaling.yarn_beta_slow": rotary["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rotary["mscale_all_dim"],
        "attention.temperature_scale": rotary["llama_4_scaling_beta"],
    }


RULES = [
    GgufRules(
        "mistral3",
        "llama",
        config={"attention_bias": False, "mlp_bias": False},
        metadata=rotary_dimensions,
        changes=WITHOUT_BIASES,
    ),
    GgufRules(
        "mistral3",
        "llama",
        case="yarn",
        config={
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale_all_dim": 1.0,
            },
        },
        metadata=lambda config: (
            rotary_dimensions(config)
            | {"rope.scaling.yarn_log_multiplier": config["rope_scaling"]["mscale_all_dim"]}
        ),
        changes=WITHOUT_BIASES,
        faults={"another scale": with_key("mistral3.rope.scaling.yarn_log_multiplier", 0.5)},
    ),
    GgufRules(
        "mistral3",
        "ministral3",
        case="ministral3",
        config={
            "layer_types": ["full_attention"] * 4,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 1.0,
                "beta_slow": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.25,
            },
        },
        metadata=_metadata,
        changes=WITHOUT_BIASES,
        faults={
            "another growth": with_key("mistral3.attention.temperature_scale", 0.5),
            "another scale": with_key("mistral3.rope.scaling.yarn_log_multiplier", 0.5),
            "another beta": with_key("mistral3.rope.scaling.yarn_beta_fast", 32.0),
            "another factor": with_key("mistral3.rope.scaling.factor", 2.0),
        },
    ),
]
