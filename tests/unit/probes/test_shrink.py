"""Configurations of real checkpoints, made small: they build, and have every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
from support.every_run import sampled

from machd.capabilities.model_code import ModelCode
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.architecture import import_architecture
from machd_probes.shrink import shrunk_configurations
from machd_probes.stand_in import make_stand_in
from machd_probes.worker_messages import StandInOrder

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "vocab_size": 201088,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN_NEXT_80B = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "vocab_size": 262208,
}


@pytest.mark.parametrize(
    ("config", "caches", "layers"),
    sampled(
        [
            (LLAMA_8B, {"KVCache of Attention"}, {"rope_utils.Llama3RoPE"}),
            (QWEN_HALF_B, {"KVCache of Attention"}, {"qwen2.Attention"}),
            (
                QWEN_30B_A3B,
                {"KVCache of Attention"},
                {"qwen3_moe.Qwen3MoeSparseMoeBlock norm_topk_prob"},
            ),
            (
                GPT_OSS_20B,
                {"KVCache of AttentionBlock", "RotatingKVCache of AttentionBlock window"},
                {"rope_utils.YarnRoPE"},
            ),
            (
                DEEPSEEK_V3,
                {"KVCache of DeepseekV3Attention"},
                {"deepseek_v3.DeepseekV3MLP", "deepseek_v3.DeepseekV3MoE"},
            ),
            (
                QWEN_NEXT_80B,
                {"ArraysCache of Qwen3NextGatedDeltaNet untrimmable"},
                {
                    "qwen3_next.Qwen3NextSparseMoeBlock norm_topk_prob",
                    "qwen3_next.Qwen3NextAttention",
                },
            ),
            (
                GEMMA_3_4B,
                {"RotatingKVCache of Attention window", "KVCache of Attention"},
                {"gemma3_text.Attention is_sliding", "gemma3_text.Attention"},
            ),
            (
                GEMMA_3_4B["text_config"],
                {"RotatingKVCache of Attention window", "KVCache of Attention"},
                {
                    "gemma3_text.Model tie_word_embeddings"
                },  # as mlx-lm ties it when it has no weights of an output
            ),
        ],
        # Plain attention, windows, another attention, states and a configuration within another one.
        ["llama", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma3"],
        ["llama", "qwen2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma3", "tied"],
    ),
)
def test_a_real_configuration_is_measured_small(
    config: dict[str, Any], caches: set[str], layers: set[str]
) -> None:
    """One of the small models has every kind of cache and layer that the large one has."""
    import_mlx_lm()
    import_architecture(config["model_type"])
    wanted = ModelCode(
        "", frozenset(f"mlx_lm.models.{one}" for one in layers), frozenset(caches), ""
    )
    order = StandInOrder(config["model_type"], config, None, "float32", wanted, ())

    subject = make_stand_in(order)

    assert subject is not None
    assert subject.description.parameters < 64_000_000
    window = subject.window_tokens
    assert window is None or window <= 32, "small enough to be filled"
    subject.engine.close()


def test_heads_shrink_with_what_they_add_up_to() -> None:
    """Two keys, two queries to each, and heads as wide as before; layers and words are few."""
    small = next(shrunk_configurations(LLAMA_8B))
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert (small["hidden_size"], small["intermediate_size"]) == (512, 1792)
    assert (small["num_hidden_layers"], small["vocab_size"]) == (2, 512)
    assert small["rope_scaling"] == LLAMA_8B["rope_scaling"]


def test_lists_of_layers_shrink_with_the_layers() -> None:
    """One entry a layer, or numbers of layers; a list of anything else stays."""
    config = {
        "num_hidden_layers": 6,
        "layer_types": list("abcdef"),
        "full_attn_layers": [1, 3, 5],
        "time_step_limit": [0.0, 1.0],
    }
    small = next(shrunk_configurations(config))
    assert small["layer_types"] == ["a", "b"]
    assert small["full_attn_layers"] == [1]
    assert small["time_step_limit"] == [0.0, 1.0]
