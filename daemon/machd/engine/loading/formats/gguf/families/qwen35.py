"""Qwen3-Next, Qwen3.5 and its mixture of experts: gated delta nets, and attention in every few layers.

A Qwen3-Next file becomes mlx-lm's qwen3_5_moe, not its qwen3_next: the same layers, whose projections are apart as in the file,
so that tensors of several types stay packed. Norms are stored with their 1, as mlx-lm has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Change, Family
from machd.engine.loading.formats.gguf.families.transformer import (
    EXPERTS,
    FUSED_EXPERTS,
    HEAD_NORMS,
    NAMES,
    UNFUSED,
    partial_rotary_factor,
    transformer_config,
    with_channel,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx


def _of(header: GgufHeader, key: str) -> int:
    return header.integer(f"{header.text('general.architecture')}.{key}")


def _key_heads(header: GgufHeader) -> int:
    return _of(header, "ssm.group_count")


def _value_heads(header: GgufHeader) -> int:
    """Read the number of a delta net's heads of values.

    Raises:
        ModelFormatError: It is no multiple of the heads of keys.
    """
    keys, values = _key_heads(header), _of(header, "ssm.time_step_rank")
    if keys == 0 or values == 0 or values % keys:
        raise ModelFormatError(
            f"{header.path.name}: {keys} heads of keys do not divide {values} of values"
        )
    return values


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    of = header.text("general.architecture")
    head_dim, values = config["head_dim"], _value_heads(header)
    assert isinstance(head_dim, int)
    scaling = config["rope_scaling"] or {"type": "default"}
    assert isinstance(scaling, dict)
    return config | {
        "linear_num_key_heads": _key_heads(header),
        "linear_num_value_heads": values,
        "linear_key_head_dim": _of(header, "ssm.state_size"),
        "linear_value_head_dim": _of(header, "ssm.inner_size") // values,
        "linear_conv_kernel_dim": _of(header, "ssm.conv_kernel"),
        "full_attention_interval": header.integer(f"{of}.full_attention_interval", 4),
        "rope_parameters": scaling
        | {
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": partial_rotary_factor(header, head_dim),
        },
    }


def _config_of_experts(header: GgufHeader) -> dict[str, object]:
    return _config(header) | {
        "num_experts": _of(header, "expert_count"),
        "num_experts_per_tok": _of(header, "expert_used_count"),
        "moe_intermediate_size": _of(header, "expert_feed_forward_length"),
        "shared_expert_intermediate_size": _of(header, "expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _grouped(header: GgufHeader, array: mx.array, axis: int = 0) -> mx.array:
    """Put heads of values that are stored turn by turn of the heads of keys behind the head of keys that they belong to."""
    keys, values = _key_heads(header), _value_heads(header)
    shape = array.shape
    if shape[axis] % values:
        raise ModelFormatError(f"an array of shape {shape} has no {values} heads of whole blocks")
    parts = array.reshape(*shape[:axis], values // keys, keys, -1, *shape[axis + 1 :])
    return parts.swapaxes(axis, axis + 1).reshape(shape)


def _grouped_behind_keys(header: GgufHeader, rows: mx.array) -> mx.array:
    """Put the heads of values in order, which come behind the rows of queries and keys."""
    from mlx.core import concatenate  # noqa: PLC0415 - headers are read without mlx

    others = 2 * _key_heads(header) * _of(header, "ssm.state_size")
    return concatenate([rows[:others], _grouped(header, rows[others:])])


def _grouped_columns(header: GgufHeader, rows: mx.array) -> mx.array:
    return _grouped(header, rows, axis=1)


def _logarithm(_header: GgufHeader, decay: mx.array) -> mx.array:
    """Return the logarithm, where llama.cpp's converter stores minus its exponential."""
    return (-decay).log()


def _one_row(_header: GgufHeader, weight: mx.array) -> mx.array:
    return weight.reshape(1, -1)


def _part_of_each_key_head(*, first: bool) -> Change:
    """Take half of the rows of each head of keys."""

    def change(header: GgufHeader, rows: mx.array) -> mx.array:
        halves = rows.reshape(_key_heads(header), 2, -1, *rows.shape[1:])
        return halves[:, 0 if first else 1].reshape(-1, *rows.shape[1:])

    return change


def _without_gate(header: GgufHeader, rows: mx.array) -> mx.array:
    """Take queries, keys and values out of the rows of older files, which have a gate's behind those of each head of keys."""
    queries = _of(header, "ssm.state_size")
    values = _of(header, "ssm.inner_size")
    if rows.shape[0] == 2 * _key_heads(header) * queries + values:
        return rows
    from mlx.core import concatenate  # noqa: PLC0415 - headers are read without mlx

    heads = rows.reshape(_key_heads(header), -1, *rows.shape[1:])
    cuts = (0, queries, 2 * queries, 2 * queries + values // _key_heads(header))
    parts = [heads[:, begin:end] for begin, end in pairwise(cuts)]
    return concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def _gate(header: GgufHeader, rows: mx.array) -> mx.array:
    """Take the gate's rows, which older files have behind the others of each head of keys."""
    values = _of(header, "ssm.inner_size")
    if rows.shape[0] == values:
        return rows
    heads = rows.reshape(_key_heads(header), -1, *rows.shape[1:])
    return heads[:, -values // _key_heads(header) :].reshape(-1, *rows.shape[1:])


def _then(first: Change, second: Change) -> Change:
    return lambda header, *arrays: second(header, first(header, *arrays))


_LANGUAGE_MODEL = "language_model."
_LAYER = "model.layers.*."
_NET = f"{_LANGUAGE_MODEL}{_LAYER}linear_attn."

_ATTENTION_AND_NET = {
    **{ggml: path for ggml, path in NAMES.items() if not ggml.startswith("blk.*.ffn_")},
    **HEAD_NORMS,
    "blk.*.post_attention_norm": f"{_LAYER}post_attention_layernorm",
    "blk.*.attn_qkv": f"{_LAYER}linear_attn.in_proj_qkv",
    "blk.*.attn_gate": f"{_LAYER}linear_attn.in_proj_z",
    "blk.*.ssm_conv1d": f"{_LAYER}linear_attn.conv1d",
    "blk.*.ssm_dt.bias": f"{_LAYER}linear_attn.dt_bias",
    "blk.*.ssm_a": f"{_LAYER}linear_attn.A_log",
    "blk.*.ssm_norm": f"{_LAYER}linear_attn.norm",
    "blk.*.ssm_out": f"{_LAYER}linear_attn.out_proj",
}
_DENSE = {ggml: NAMES[ggml] for ggml in ("blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down")}
_EXPERTS: Mapping[str, str | tuple[str, ...]] = {
    **EXPERTS,
    **FUSED_EXPERTS,
    "blk.*.ffn_gate_inp_shexp": f"{_LAYER}mlp.shared_expert_gate",
    "blk.*.ffn_gate_shexp": f"{_LAYER}mlp.shared_expert.gate_proj",
    "blk.*.ffn_up_shexp": f"{_LAYER}mlp.shared_expert.up_proj",
    "blk.*.ffn_down_shexp": f"{_LAYER}mlp.shared_expert.down_proj",
}
_TWO_GATES = {
    "blk.*.ssm_beta": f"{_LAYER}linear_attn.in_proj_b",
    "blk.*.ssm_alpha": f"{_LAYER}linear_attn.in_proj_a",
}

_STORED_OTHERWISE: dict[str, Change] = {
    ".A_log": _logarithm,
    ".conv1d": with_channel,
    ".shared_expert_gate": _one_row,
    **UNFUSED,
}
_TURN_BY_TURN: dict[str, Change] = {
    ".in_proj_qkv": _grouped_behind_keys,
    ".in_proj_z": _grouped,
    ".in_proj_b": _grouped,
    ".in_proj_a": _grouped,
    ".dt_bias": _grouped,
    ".out_proj": _grouped_columns,
    ".A_log": _then(_logarithm, _grouped),
    ".conv1d": _then(_grouped_behind_keys, with_channel),
    ".shared_expert_gate": _one_row,
    **UNFUSED,
}
"""What llama.cpp's converter of Qwen3.5 does, where a head of keys has several of values."""


def _in_language_model(
    *names: Mapping[str, str | tuple[str, ...]],
) -> dict[str, str | tuple[str, ...]]:
    return {
        ggml: _LANGUAGE_MODEL + path
        if isinstance(path, str)
        else tuple(_LANGUAGE_MODEL + one for one in path)
        for table in names
        for ggml, path in table.items()
    }


QWEN35 = Family(
    "qwen35",
    "qwen3_5",
    _in_language_model(_ATTENTION_AND_NET, _DENSE, _TWO_GATES),
    _config,
    _TURN_BY_TURN,
)

QWEN35MOE = Family(
    "qwen35moe",
    "qwen3_5_moe",
    _in_language_model(_ATTENTION_AND_NET, _EXPERTS, _TWO_GATES),
    _config_of_experts,
    _TURN_BY_TURN,
)

QWEN3NEXT = Family(
    "qwen3next",
    "qwen3_5_moe",
    _in_language_model(_ATTENTION_AND_NET, _EXPERTS)
    | {
        "blk.*.ssm_in": (f"{_NET}in_proj_qkv", f"{_NET}in_proj_z"),
        "blk.*.ssm_ba": (f"{_NET}in_proj_b", f"{_NET}in_proj_a"),
    },
    _config_of_experts,
    _STORED_OTHERWISE
    | {
        ".in_proj_qkv": _without_gate,
        ".in_proj_z": _gate,
        ".in_proj_b": _part_of_each_key_head(first=True),
        ".in_proj_a": _part_of_each_key_head(first=False),
    },
)
