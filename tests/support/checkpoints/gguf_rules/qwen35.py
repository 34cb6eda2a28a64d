"""Qwen3-Next and Qwen3.5: gated delta nets, whose heads of values Qwen3.5's converter stores turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from machd_probes.tiny import tiny_configuration
from support.checkpoints.gguf_checkpoint import Config, Floats, GgufRules, Metadata, Tensors
from support.checkpoints.gguf_rules.common import exchanged, with_key

_SIZES = {
    "attention_bias": False,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
"""Three heads of values for each head of keys, so that the two orders are no inverses of themselves."""


def _text(config: Config) -> Config:
    found: Config = config.get("text_config", config)
    return found


def _nested(name: str) -> dict[str, object]:
    """A tiny configuration's ``text_config``, whole, with these sizes; positions as Qwen3.5 has them."""
    text: Any = tiny_configuration(name).config["text_config"]
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "type": "default"}
    return {"text_config": {**text, **_SIZES, "rope_parameters": rope}}


def _metadata(config: Config) -> Metadata:
    text = _text(config)
    found = {
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_value_head_dim"] * text["linear_num_value_heads"],
        "full_attention_interval": text["full_attention_interval"],
        "rope.dimension_count": int(text["head_dim"] * text["partial_rotary_factor"]),
        "expert_feed_forward_length": text["moe_intermediate_size"],
        "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
    }
    return found | ({"rope.dimension_sections": [11, 11, 10, 0]} if text is not config else {})


def _dense_metadata(config: Config) -> Metadata:
    keys = ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
    return _metadata(config) | {f"expert_{key}": None for key in keys}


def _turns(array: Floats, config: Config, axis: int = 0) -> Floats:
    text = _text(config)
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    shape = array.shape
    heads = array.reshape(*shape[:axis], keys, values // keys, -1, *shape[axis + 1 :])
    return np.ascontiguousarray(heads.swapaxes(axis, axis + 1).reshape(shape))


def _turns_on(axis: int) -> Callable[[Config, Floats], Floats]:
    return lambda config, array: _turns(array, config, axis)


def _turns_behind_keys(config: Config, rows: Floats) -> Floats:
    text = _text(config)
    others = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]
    return np.concatenate([rows[:others], _turns(rows[others:], config)])


def _decay(_config: Config, logarithm: Floats) -> Floats:
    return -np.exp(logarithm)


def _squeezed(_config: Config, tensors: Tensors) -> Tensors:
    """Take axes of one element away."""
    return {name: values.squeeze() for name, values in tensors.items()}


def _apart(config: Config, tensors: Tensors) -> Tensors:
    """Take the rows of each head of keys apart: queries, keys and values, and the gate."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    found: Tensors = {}
    for name, rows in tensors.items():
        if "in_proj_qkvz" not in name:
            found[name] = rows
            continue
        heads = rows.reshape(keys, -1, rows.shape[-1])
        cuts = np.split(heads, [size, 2 * size, 2 * size + values], axis=1)
        flat = [one.reshape(-1, rows.shape[-1]) for one in cuts]
        found[name.replace("in_proj_qkvz", "in_proj_qkv")] = np.concatenate(flat[:3])
        found[name.replace("in_proj_qkvz", "in_proj_z")] = flat[3]
    return _squeezed(config, found)


def _fused(config: Config, tensors: Tensors) -> Tensors:
    """Put each expert's gate before its other rows, in one tensor."""
    found = {name: values for name, values in tensors.items() if ".experts.up_proj" not in name}
    for name in [name for name in found if ".experts.gate_proj" in name]:
        up = tensors[name.replace("gate_proj", "up_proj")]
        fused = np.concatenate([found.pop(name), up], axis=1)
        found[name.replace("gate_proj", "gate_up_proj")] = fused
    return _squeezed(config, found)


def _further_layer(config: Config) -> Tensors:
    """A layer behind the model's own, which predicts a further token; of its many tensors two."""
    text = _text(config)
    layer, size = text["num_hidden_layers"], text["hidden_size"]
    return {
        f"blk.{layer}.nextn.eh_proj.weight": np.ones((size, 2 * size), np.float32),
        f"blk.{layer}.attn_norm.weight": np.ones(size, np.float32),
    }


def _metadata_of_further_layer(config: Config) -> Metadata:
    layers = _text(config)["num_hidden_layers"]
    return _metadata(config) | {"block_count": layers + 1, "nextn_predict_layers": 1}


_NAMES = {
    "language_model.model": "model",
    "language_model.lm_head": "lm_head",
    "mlp.switch_mlp": "mlp.experts",
    ".dt_bias": ".dt_proj.bias",
}
_TURNS = {
    "A_log": _decay,
    "in_proj_qkv.weight": _turns_behind_keys,
    "in_proj_z.weight": _turns_on(0),
    "in_proj_a.weight": _turns_on(0),
    "in_proj_b.weight": _turns_on(0),
    "dt_bias": _turns_on(0),
    "linear_attn.A_log": _turns_on(0),
    "linear_attn.conv1d.weight": _turns_behind_keys,
    "out_proj.weight": _turns_on(1),
}


def _faults(architecture: str) -> dict[str, Callable[[Metadata, Tensors], None]]:
    return {
        "positions in whole heads": with_key(f"{architecture}.rope.dimension_count", 32),
        "attention in other layers": with_key(f"{architecture}.full_attention_interval", 4),
    }


RULES = [
    GgufRules(
        "qwen3next",
        "qwen3_next",
        config=_SIZES,
        metadata=_metadata,
        names=_NAMES,
        changes={"A_log": _decay},
        is_rounded=True,
        rearranged=_apart,
        faults=_faults("qwen3next") | {"gate for up": exchanged("ffn_gate_shexp", "ffn_up_shexp")},
    ),
    GgufRules(
        "qwen3next",
        "qwen3_next",
        case="older",
        config=_SIZES,
        metadata=_metadata,
        names=_NAMES,
        changes={"A_log": _decay},
        rearranged=_squeezed,
        is_rounded=True,
    ),
    GgufRules(
        "qwen35",
        "qwen3_5",
        config=_nested("qwen3_5"),
        metadata=_dense_metadata,
        names=_NAMES,
        changes=_TURNS,
        rearranged=_squeezed,
        is_rounded=True,
        faults=_faults("qwen35") | {"beta for alpha": exchanged("ssm_alpha", "ssm_beta")},
    ),
    GgufRules(
        "qwen35moe",
        "qwen3_5_moe",
        config=_nested("qwen3_5_moe"),
        metadata=_metadata,
        names=_NAMES,
        changes=_TURNS,
        rearranged=_squeezed,
        is_rounded=True,
        faults=_faults("qwen35moe"),
    ),
    GgufRules(
        "qwen35moe",
        "qwen3_5_moe",
        case="with a layer of further tokens",
        config=_nested("qwen3_5_moe"),
        metadata=_metadata_of_further_layer,
        names=_NAMES,
        changes=_TURNS,
        rearranged=_squeezed,
        added=_further_layer,
        is_rounded=True,
        faults={"one layer more": with_key("qwen35moe.nextn_predict_layers", None)},
    ),
    GgufRules(
        "qwen35moe",
        "qwen3_5_moe",
        case="with fused experts",
        config=_nested("qwen3_5_moe"),
        metadata=lambda config: _metadata(config) | {"feed_forward_length": None},
        names=_NAMES,
        changes=_TURNS,
        rearranged=_fused,
        is_rounded=True,
    ),
]
