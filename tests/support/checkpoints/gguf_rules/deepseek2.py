"""DeepSeek-V2 and V3: keys and values of the latent apart in newer files, in one projection in older ones."""

from __future__ import annotations

import numpy as np

from support.checkpoints.gguf_checkpoint import Config, GgufRules, Metadata, Tensors
from support.checkpoints.gguf_rules.common import exchanged, with_key

_SIZES = {
    "attention_bias": False,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
"""The three sizes of the latent differ, so that none can stand for another."""

_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def _metadata(config: Config) -> Metadata:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    scaling = config["rope_scaling"] or {}
    found = {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "rope.dimension_count": rope,
    }
    if config["q_lora_rank"] is not None:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("norm_topk_prob"):
        found["expert_weights_norm"] = True
    if config.get("scoring_func") == "sigmoid":
        found["expert_gating_func"] = 2
    if "mscale_all_dim" in scaling:
        found["rope.scaling.yarn_beta_fast"] = float(scaling["beta_fast"])
        found["rope.scaling.yarn_beta_slow"] = float(scaling["beta_slow"])
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return found


def _older_metadata(config: Config) -> Metadata:
    keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return _metadata(config) | {
        "attention.head_count_kv": config["num_attention_heads"],
        "attention.key_length": keys,
        "attention.value_length": config["v_head_dim"],
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


def _apart(config: Config, tensors: Tensors) -> Tensors:
    """Split the projection of older files, and transpose the keys' part."""
    found: Tensors = {}
    for name, values in tensors.items():
        if "kv_b_proj" not in name:
            found[name] = values
            continue
        heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
        nope = config["qk_nope_head_dim"]
        found[name.replace("kv_b_proj", "k_b_proj")] = heads[:, :nope].transpose(0, 2, 1)
        found[name.replace("kv_b_proj", "v_b_proj")] = heads[:, nope:]
    return found


def _together(_config: Config, tensors: Tensors) -> Tensors:
    """Join the pair of newer files, as older converters kept it."""
    found = {name: values for name, values in tensors.items() if ".v_b_proj" not in name}
    for name in [name for name in found if ".k_b_proj" in name]:
        keys = found.pop(name).transpose(0, 2, 1)
        values = tensors[name.replace(".k_b_proj", ".v_b_proj")]
        rows = np.concatenate([keys, values], axis=1)
        found[name.replace(".k_b_proj", ".kv_b_proj")] = rows.reshape(-1, rows.shape[-1])
    return found


_NAMES = {
    "mlp.switch_mlp": "mlp.experts",
    "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction.bias",
    "self_attn.embed_q": "self_attn.k_b_proj",
    "self_attn.unembed_out": "self_attn.v_b_proj",
}
_V2 = _SIZES | {"rope_scaling": _YARN, "topk_method": "greedy"}
_GROUPS = {"n_group": 4, "topk_group": 2}

RULES = [
    GgufRules(
        "deepseek2",
        "deepseek_v2",
        config=_V2,
        metadata=_metadata,
        names=_NAMES,
        rearranged=_apart,
        floats=("attn_k_b",),
        faults={
            "gate for up": exchanged("ffn_gate_shexp", "ffn_up_shexp"),
            "another scale of experts": with_key("deepseek2.expert_weights_scale", 1.0),
            "another scale of attention": with_key(
                "deepseek2.rope.scaling.yarn_log_multiplier", 0.1
            ),
            "a larger part with positions": with_key("deepseek2.rope.dimension_count", 16),
        },
    ),
    GgufRules(
        "deepseek2",
        "deepseek_v2",
        case="older and lite",
        config=_V2 | {"q_lora_rank": None, "rope_scaling": {"type": "none", "factor": 1.0}},
        metadata=_older_metadata,
        names=_NAMES,
    ),
    GgufRules(
        "deepseek2",
        "deepseek_v2",
        case="groups",
        config=_V2 | _GROUPS | {"topk_method": "group_limited_greedy"},
        metadata=_metadata,
        names=_NAMES,
        rearranged=_apart,
        floats=("attn_k_b",),
        faults={"groups not used": with_key("deepseek2.expert_group_used_count", 4)},
    ),
    GgufRules(
        "deepseek2",
        "deepseek_v3",
        case="sigmoid",
        config=_SIZES | _GROUPS | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        metadata=_metadata,
        names=_NAMES,
        faults={
            "softmax": with_key("deepseek2.expert_gating_func", 1),
            "weights of experts as they are": with_key(
                "deepseek2.expert_weights_norm", value=False
            ),
            "groups not used": with_key("deepseek2.expert_group_used_count", 4),
        },
    ),
    GgufRules(
        "deepseek2",
        "deepseek_v3",
        case="sigmoid and older",
        config=_SIZES | {"rope_scaling": None},
        metadata=_older_metadata,
        names=_NAMES,
        rearranged=_together,
        floats=("attn_kv_b",),
    ),
]
