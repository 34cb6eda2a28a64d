"""DeepSeek-V2 and V3: latent attention, a few dense layers, then experts with shared ones.

mlx-lm has two architectures of them. A router with softmax makes a file deepseek_v2's, one with sigmoid deepseek_v3's. Newer files
hold keys and values of the latent apart (``attn_k_b``, ``attn_v_b``), as deepseek_v3 has them; older ones in one projection
(``attn_kv_b``), as deepseek_v2 has them. The other pairs are taken apart or put together, and keys turn rows into columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    EXPERTS,
    FUSED_EXPERTS,
    NAMES,
    UNFUSED,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx

_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``; the first where the key is absent, as in llama.cpp."""

_LOG_MULTIPLIER = 0.1
"""llama.cpp's converter stores ``mscale_all_dim`` times this number."""


def _gating(header: GgufHeader) -> int:
    return header.integer("deepseek2.expert_gating_func", 0) or _SOFTMAX


def _head_sizes(header: GgufHeader) -> tuple[int, int, int]:
    """Read the sizes of a head: of keys without and with positions, and of values.

    Raises:
        ModelFormatError: A key is missing, or a head's keys have positions only.
    """
    mla = "_mla" if "deepseek2.attention.key_length_mla" in header.metadata else ""
    keys = header.integer(f"deepseek2.attention.key_length{mla}")
    rope = header.integer("deepseek2.rope.dimension_count")
    if rope >= keys:
        raise ModelFormatError(
            f"{header.path.name}: deepseek2.rope.dimension_count is {rope}, and a head's keys have {keys}"
        )
    return keys - rope, rope, header.integer(f"deepseek2.attention.value_length{mla}")


def _rope_scaling(header: GgufHeader, scaling: object) -> dict[str, object] | None:
    """Make the scaling of positions.

    Raises:
        ModelFormatError: A kind that the architectures do not have, or no multiplier.
    """
    if not isinstance(scaling, dict):
        return None
    if scaling["type"] != "yarn":
        raise ModelFormatError(
            f"{header.path.name}: deepseek2.rope.scaling.type {scaling['type']} is not supported"
        )
    stored = header.number("deepseek2.rope.scaling.yarn_log_multiplier")
    # float32 in the file; a checkpoint's is a number of a few digits. llama.cpp takes both for the same.
    scale = round(stored / _LOG_MULTIPLIER, 6)
    return scaling | {"mscale": scale, "mscale_all_dim": scale}


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    nope, rope, values = _head_sizes(header)
    experts = header.integer("deepseek2.expert_count", 0)
    has_query_rank = "deepseek2.attention.q_lora_rank" in header.metadata
    if header.number("deepseek2.attention.temperature_scale", 0.0):
        raise ModelFormatError(
            f"{header.path.name}: deepseek2.attention.temperature_scale is not supported"
        )
    if not header.has("output.weight"):
        raise ModelFormatError(
            f"{header.path.name} has no output.weight, which mlx-lm's architectures need"
        )
    return config | {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": header.integer("deepseek2.attention.kv_lora_rank"),
        "q_lora_rank": header.integer("deepseek2.attention.q_lora_rank")
        if has_query_rank
        else None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": values,
        "n_routed_experts": experts or None,
        "num_experts_per_tok": header.integer("deepseek2.expert_used_count") if experts else None,
        "n_shared_experts": header.integer("deepseek2.expert_shared_count", 0) or None,
        "moe_intermediate_size": header.integer("deepseek2.expert_feed_forward_length"),
        "first_k_dense_replace": header.integer("deepseek2.leading_dense_block_count", 0),
        "routed_scaling_factor": header.number("deepseek2.expert_weights_scale", 0.0) or 1.0,
        "n_group": header.integer("deepseek2.expert_group_count", 0) or 1,
        "topk_group": header.integer("deepseek2.expert_group_used_count", 0) or 1,
        "rope_scaling": _rope_scaling(header, config["rope_scaling"]),
    }


def _config_2(header: GgufHeader) -> dict[str, object]:
    config = _config(header)
    if header.flag("deepseek2.expert_weights_norm", default=False):
        raise ModelFormatError(
            f"{header.path.name}: deepseek2.expert_weights_norm is not supported; mlx-lm's deepseek_v2 does not "
            "normalise the weights of experts"
        )
    # DeepSeek-V2 ranks a group by its best expert, as mlx-lm does; llama.cpp by its best two, as V3 does.
    is_grouped = config["n_group"] != config["topk_group"]
    return config | {
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
        # The architecture cannot be without; this changes nothing.
        "rope_scaling": config["rope_scaling"] or {"factor": 1.0},
    }


def _config_3(header: GgufHeader) -> dict[str, object]:
    norm = header.flag("deepseek2.expert_weights_norm", default=False)
    return _config(header) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": norm,
    }


def _joined(_header: GgufHeader, *stored: mx.array) -> mx.array:
    """Join keys [heads, rank, size] and values [heads, size, rank] to the rows of one projection, head by head."""
    if len(stored) == 1:
        return stored[0]
    from mlx.core import concatenate  # noqa: PLC0415 - headers are read without mlx

    keys, values = stored
    rows = concatenate([keys.swapaxes(1, 2), values], axis=1)  # [heads, sizes, rank]
    return rows.reshape(-1, rows.shape[-1])


def _heads(header: GgufHeader, rows: mx.array) -> mx.array:
    return rows.reshape(header.integer("deepseek2.attention.head_count"), -1, rows.shape[-1])


def _keys(header: GgufHeader, stored: mx.array) -> mx.array:
    """Take the keys [heads, rank, size] of one projection's rows; those that are apart stay."""
    if stored.ndim > 2:
        return stored
    return _heads(header, stored)[:, : _head_sizes(header)[0]].swapaxes(1, 2)


def _values(header: GgufHeader, stored: mx.array) -> mx.array:
    """Take the values [heads, size, rank] of one projection's rows; those that are apart stay."""
    return stored if stored.ndim > 2 else _heads(header, stored)[:, _head_sizes(header)[0] :]


_NAMES: Mapping[str, str | tuple[str, ...]] = {
    **NAMES,
    **EXPERTS,
    **FUSED_EXPERTS,
    "blk.*.attn_q_a": "model.layers.*.self_attn.q_a_proj",
    "blk.*.attn_q_a_norm": "model.layers.*.self_attn.q_a_layernorm",
    "blk.*.attn_q_b": "model.layers.*.self_attn.q_b_proj",
    "blk.*.attn_kv_a_mqa": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "blk.*.attn_kv_a_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "blk.*.exp_probs_b.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "blk.*.ffn_gate_shexp": "model.layers.*.mlp.shared_experts.gate_proj",
    "blk.*.ffn_up_shexp": "model.layers.*.mlp.shared_experts.up_proj",
    "blk.*.ffn_down_shexp": "model.layers.*.mlp.shared_experts.down_proj",
}

_PROJECTION = "model.layers.*.self_attn.kv_b_proj"
_PAIR = ("model.layers.*.self_attn.embed_q", "model.layers.*.self_attn.unembed_out")

_DEEPSEEK_3 = Family(
    "deepseek2",
    "deepseek_v3",
    {**_NAMES, "blk.*.attn_k_b": _PAIR[0], "blk.*.attn_v_b": _PAIR[1], "blk.*.attn_kv_b": _PAIR},
    _config_3,
    {**UNFUSED, ".embed_q": _keys, ".unembed_out": _values},
    expands=frozenset({"blk.*.attn_kv_b"}),
)

_DEEPSEEK_2 = Family(
    "deepseek2",
    "deepseek_v2",
    {
        **_NAMES,
        "blk.*.attn_k_b": _PROJECTION,
        "blk.*.attn_v_b": _PROJECTION,
        "blk.*.attn_kv_b": _PROJECTION,
    },
    _config_2,
    {**UNFUSED, ".kv_b_proj": _joined},
    expands=frozenset({"blk.*.attn_k_b"}),
)


def _variant(header: GgufHeader) -> Family:
    gating = _gating(header)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelFormatError(
            f"{header.path.name}: deepseek2.expert_gating_func is {gating}, which is not supported"
        )
    return _DEEPSEEK_3 if gating == _SIGMOID else _DEEPSEEK_2


DEEPSEEK2 = replace(_DEEPSEEK_2, variant=_variant)
