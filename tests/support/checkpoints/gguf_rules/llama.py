"""Llama: rows of heads in another order; biases where a checkpoint has them; llama 3's frequencies as divisors."""

from __future__ import annotations

import math

import numpy as np

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Tensors
from support.checkpoints.gguf_rules.common import (
    LLAMA_ORDER,
    WITHOUT_BIASES,
    exchanged,
    rotary_dimensions,
    with_key,
)


def _rotary_factors(config: Config) -> Tensors:
    """Compute llama 3's divisors as ``LlamaModel.generate_extra_tensors`` does."""
    scaling, dimensions = config["rope_scaling"], config["head_dim"]
    frequencies = config["rope_theta"] ** -(np.arange(0, dimensions, 2) / dimensions)
    factor, low, high = (scaling[f"{of}factor"] for of in ("", "low_freq_", "high_freq_"))
    context_tokens = scaling["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        share = (context_tokens / length - low) / (high - low)
        between = 1 / ((1 - share) / factor + share)
        is_short, is_long = length < context_tokens / high, length > context_tokens / low
        factors.append(1.0 if is_short else factor if is_long else between)
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _without_factors(_metadata: object, tensors: Tensors) -> None:
    del tensors["rope_freqs.weight"]


RULES = [
    GgufRules(
        "llama",
        "llama",
        metadata=rotary_dimensions,
        changes=LLAMA_ORDER,
        faults={
            "gate for up": exchanged("ffn_gate", "ffn_up"),
            "another base of the rotary positions": with_key("llama.rope.freq_base", 500.0),
        },
    ),
    GgufRules(
        "llama",
        "llama",
        case="tied",
        config={
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        metadata=rotary_dimensions,
        changes=WITHOUT_BIASES,
        faults={"another factor": with_key("llama.rope.scaling.factor", 2.0)},
    ),
    GgufRules(
        "llama",
        "llama+llama3_rope",
        case="3.1",
        metadata=rotary_dimensions,
        changes=LLAMA_ORDER,
        added=_rotary_factors,
        is_rounded=True,
        faults={"no divisors": _without_factors},
    ),
]
