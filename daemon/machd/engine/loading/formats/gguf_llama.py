"""The llama family of GGUF files as mlx-lm's llama: configuration, names of tensors, order of rows.

llama.cpp stores the rows of the query and key projections in another order, for rotary positions
that pair neighbours; mlx-lm pairs the first half of a head with the second. The rows are put back
here, and those of the quantisation scales and biases with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.gguf_header import GgufHeader
from machd.errors import ModelArchitectureError, ModelFormatError

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with one divisor for each rotary frequency."""

_GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<part>weight|scales|biases)"
)


def refuse_experts(header: GgufHeader) -> None:
    """Refuse a mixture of experts.

    Raises:
        ModelArchitectureError: It is one.
    """
    if header.integer("llama.expert_count", 0):
        raise ModelArchitectureError(
            f"{header.path.name} is a mixture of experts, which machd reads in mlx-lm layout only"
        )


def llama_config(header: GgufHeader, rope_factors: list[float] | None = None) -> dict[str, object]:
    """Make the configuration that ``mlx_lm.models.llama.ModelArgs.from_dict`` takes.

    Args:
        header: A header that ``check_gguf`` let pass.
        rope_factors: The values of ``rope_freqs.weight``, one divisor a rotary frequency, as llama 3
            files carry them; None in other files.

    Raises:
        ModelFormatError: The numbers contradict each other, or ask for what mlx-lm's llama has not.
    """
    heads = header.integer("llama.attention.head_count")
    hidden_size = header.integer("llama.embedding_length")
    kv_heads = header.integer("llama.attention.head_count_kv", heads)
    if heads == 0 or hidden_size % heads:
        raise ModelFormatError(f"{header.path.name}: {heads} heads do not divide {hidden_size}")
    if kv_heads == 0 or heads % kv_heads:
        raise ModelFormatError(
            f"{header.path.name}: {kv_heads} heads of keys do not divide {heads}"
        )
    head_dim = header.integer("llama.attention.key_length", hidden_size // heads)
    if header.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelFormatError(f"{header.path.name}: partial rotary positions are not supported")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": header.integer("llama.block_count"),
        "intermediate_size": header.integer("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": header.number("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": header.integer("llama.context_length"),
        "rope_theta": header.number("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, rope_factors),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def make_llama(config: dict[str, object]) -> Module:
    """Make mlx-lm's llama of a configuration.

    Raises:
        Exception: Any error of mlx-lm's about a contradiction.
    """
    from mlx_lm.models.llama import Model, ModelArgs  # noqa: PLC0415 - after import_mlx_lm()

    model: Module = Model(ModelArgs.from_dict(config))
    return model


def module_path(tensor_name: str) -> str | None:
    """Find mlx-lm's path of the module that a tensor belongs to; None for another tensor."""
    match = _TENSOR_NAME.fullmatch(tensor_name)
    if match is None or match["part"] != "weight":
        return None
    if match["layer"] is None:
        return _GLOBAL_NAMES.get(match["module"])
    name = _LAYER_NAMES.get(match["module"])
    return None if name is None else f"model.layers.{match['layer']}.{name}"


def in_mlx_order(header: GgufHeader, path: str, rows: mx.array) -> mx.array:
    """Put the rows of a module's stored array, [heads x head_dim, columns], in the order of mlx-lm's llama.

    Raises:
        ModelFormatError: They are not those of so many heads.
    """
    if not path.endswith((".q_proj", ".k_proj")):
        return rows
    heads = header.integer("llama.attention.head_count")
    if path.endswith(".k_proj"):
        heads = header.integer("llama.attention.head_count_kv", heads)
    if rows.ndim != 2 or rows.shape[0] % (2 * heads):
        raise ModelFormatError(f"a projection of shape {rows.shape} has no {heads} even heads")
    paired = rows.reshape(heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _rope_scaling(header: GgufHeader, rope_factors: list[float] | None) -> dict[str, object] | None:
    context_tokens = header.integer("llama.context_length")
    if rope_factors is not None:
        # mlx-lm's "longrope" takes a factor for each frequency; with equal context lengths it scales
        # nothing else.
        return {
            "type": "longrope",
            "original_max_position_embeddings": context_tokens,
            "short_factor": rope_factors,
            "long_factor": rope_factors,
        }
    kind = header.text("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = header.number("llama.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        original = header.integer("llama.rope.scaling.original_context_length", context_tokens)
        return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelFormatError(f"{header.path.name}: rotary scaling {shortened(kind)} is not supported")
