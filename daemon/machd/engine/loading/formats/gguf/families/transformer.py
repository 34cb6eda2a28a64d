"""What most families share: names of tensors, keys of the configuration, and how heads and norms are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.gguf.families.family import Change, decoder_layers
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx

NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}
"""Modules of a plain transformer: ggml's names and mlx-lm's."""

HEAD_NORMS: Mapping[str, str] = {
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
}

EXPERTS: Mapping[str, str] = {
    "blk.*.ffn_gate_inp": "model.layers.*.mlp.gate",
    "blk.*.ffn_gate_exps": "model.layers.*.mlp.switch_mlp.gate_proj",
    "blk.*.ffn_up_exps": "model.layers.*.mlp.switch_mlp.up_proj",
    "blk.*.ffn_down_exps": "model.layers.*.mlp.switch_mlp.down_proj",
}
"""The router and the experts of a layer, which ggml stacks as mlx-lm does."""


def transformer_config(header: GgufHeader) -> dict[str, object]:
    """Make the keys of a configuration that most families have.

    Raises:
        ModelFormatError: A key is missing, or the numbers contradict each other.
    """
    of = header.text("general.architecture")
    heads = header.integer(f"{of}.attention.head_count")
    hidden_size = header.integer(f"{of}.embedding_length")
    kv_heads = header.integer(f"{of}.attention.head_count_kv", heads)
    if heads == 0 or (hidden_size % heads and f"{of}.attention.key_length" not in header.metadata):
        raise ModelFormatError(f"{header.path.name}: {heads} heads do not divide {hidden_size}")
    if kv_heads == 0 or heads % kv_heads:
        raise ModelFormatError(
            f"{header.path.name}: {kv_heads} heads of keys do not divide {heads}"
        )
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": decoder_layers(header),
        "intermediate_size": header.integer(f"{of}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": header.integer(f"{of}.attention.key_length", hidden_size // heads),
        "rms_norm_eps": header.number(f"{of}.attention.layer_norm_rms_epsilon"),
        "vocab_size": header.shape("token_embd.weight")[0],
        "max_position_embeddings": header.integer(f"{of}.context_length"),
        "rope_theta": header.number(f"{of}.rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(header),
        "tie_word_embeddings": not header.has("output.weight"),
    }


def refuse_partial_rope(header: GgufHeader, head_dim: int) -> None:
    """Refuse rotary positions for a part of each head.

    Raises:
        ModelFormatError: The file asks for them, and mlx-lm's architecture has none.
    """
    of = header.text("general.architecture")
    if header.integer(f"{of}.rope.dimension_count", head_dim) != head_dim:
        raise ModelFormatError(f"{header.path.name}: partial rotary positions are not supported")


def rope_scaling(header: GgufHeader) -> dict[str, object] | None:
    """Make mlx-lm's ``rope_scaling`` of the metadata.

    Raises:
        ModelFormatError: A kind that machd does not know.
    """
    of = header.text("general.architecture")
    kind = header.text(f"{of}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = header.number(f"{of}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        context_tokens = header.integer(f"{of}.context_length")
        original = header.integer(f"{of}.rope.scaling.original_context_length", context_tokens)
        return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original} | {
            name: header.number(f"{of}.rope.scaling.yarn_{name}")
            for name in ("beta_fast", "beta_slow")
            if f"{of}.rope.scaling.yarn_{name}" in header.metadata
        }
    raise ModelFormatError(f"{header.path.name}: rotary scaling {shortened(kind)} is not supported")


def heads_in_halves(heads_key: str, default_key: str | None = None) -> Change:
    """Put the rows of each head in mlx-lm's order.

    llama.cpp stores the rows of some families' query and key projections in another order, for rotary positions that pair
    neighbours; mlx-lm pairs the first half of a head with the second.

    Args:
        heads_key: Metadata key of the number of heads, behind the architecture's name.
        default_key: The same, where the first is absent.
    """

    def change(header: GgufHeader, rows: mx.array) -> mx.array:
        of = header.text("general.architecture")
        default = None if default_key is None else header.integer(f"{of}.{default_key}")
        heads = header.integer(f"{of}.{heads_key}", default)
        if rows.shape[0] % (2 * heads):
            raise ModelFormatError(f"a projection of shape {rows.shape} has no {heads} even heads")
        paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return paired.swapaxes(1, 2).reshape(rows.shape)

    return change


LLAMA_ORDER: Mapping[str, Change] = {
    ".q_proj": heads_in_halves("attention.head_count"),
    ".k_proj": heads_in_halves("attention.head_count_kv", "attention.head_count"),
}
"""Of the families whose rows llama.cpp's converter reorders."""


def less_one(_header: GgufHeader, weight: mx.array) -> mx.array:
    """Return a norm's weight without the 1 that llama.cpp's converter adds, and mlx-lm's norm again."""
    return weight - 1
