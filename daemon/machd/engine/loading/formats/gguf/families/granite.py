"""Granite 3, dense and with experts: a llama with four factors."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    LLAMA_ORDER,
    NAMES,
    biases,
    check_heads,
    experts_at,
    refuse_head_dim,
    scale,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError


def _config(header: GgufHeader) -> dict[str, object]:
    of = header.text("general.architecture")
    config = transformer_config(header)
    check_heads(header, config)
    refuse_head_dim(header)
    if not header.flag(f"{of}.rope.scaling.finetuned", default=True):
        raise ModelFormatError(
            f"{header.path.name}: {of} without rotary positions is not supported"
        )
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    return (
        config
        | biases(header)
        | {
            "logits_scaling": header.number(f"{of}.logit_scale"),
            "attention_multiplier": scale(header, "attention.scale", head_dim**-0.5),
            "embedding_multiplier": scale(header, "embedding_scale"),
            "residual_multiplier": scale(header, "residual_scale"),
        }
    )


def _moe_config(header: GgufHeader) -> dict[str, object]:
    return _config(header) | {
        "num_local_experts": header.integer("granitemoe.expert_count"),
        "num_experts_per_tok": header.integer("granitemoe.expert_used_count"),
    }


GRANITE = Family("granite", "granite", NAMES, _config, LLAMA_ORDER)

GRANITEMOE = Family(
    "granitemoe",
    "granitemoe",
    {**NAMES, **experts_at("block_sparse_moe", router="router.layer")},
    _moe_config,
    LLAMA_ORDER,
)
