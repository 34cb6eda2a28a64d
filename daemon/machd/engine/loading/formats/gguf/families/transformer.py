"""What most families share: names of tensors, keys of the configuration, and how heads and norms are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.gguf.families.family import (
    ROPE_FACTORS,
    Change,
    decoder_layers,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray

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

TIED_NAMES: Mapping[str, str] = {name: path for name, path in NAMES.items() if name != "output"}
"""The same for families whose embeddings are always the output's weights, too."""

HEAD_NORMS: Mapping[str, str] = {
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
}

FEEDFORWARD_NORMS: Mapping[str, str] = {
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
"""The norms around attention and feed-forward of Gemma 2 and later."""


def experts_at(module: str, router: str = "gate") -> dict[str, str]:
    """Name the router and the experts of a layer, which ggml stacks as mlx-lm does.

    Args:
        module: mlx-lm's name of the module in a layer.
        router: The router's in that.
    """
    path = f"model.layers.*.{module}"
    return {
        "blk.*.ffn_gate_inp": f"{path}.{router}",
        "blk.*.ffn_gate_exps": f"{path}.switch_mlp.gate_proj",
        "blk.*.ffn_up_exps": f"{path}.switch_mlp.up_proj",
        "blk.*.ffn_down_exps": f"{path}.switch_mlp.down_proj",
    }


EXPERTS: Mapping[str, str] = experts_at("mlp")
"""Of most mixtures."""


def _first(header: GgufHeader, rows: mx.array) -> mx.array:
    return rows[:, : _expert_rows(header)]


def _last(header: GgufHeader, rows: mx.array) -> mx.array:
    return rows[:, -_expert_rows(header) :]


def _expert_rows(header: GgufHeader) -> int:
    return header.integer(f"{header.text('general.architecture')}.expert_feed_forward_length")


FUSED_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "blk.*.ffn_gate_up_exps": (EXPERTS["blk.*.ffn_gate_exps"], EXPERTS["blk.*.ffn_up_exps"])
}
"""The experts' gates before their other rows in one tensor, as a converter writes them when it is asked to; with :data:`UNFUSED`."""

UNFUSED: Mapping[str, Change] = {
    ".switch_mlp.gate_proj": _first,
    ".switch_mlp.up_proj": _last,
}
"""Takes rows out of one tensor; those of two stay."""


def transformer_config(header: GgufHeader, epsilon: str = "rms_norm_eps") -> dict[str, object]:
    """Make the keys of a configuration that most families have.

    Args:
        header: The file's.
        epsilon: mlx-lm's name for the epsilon of the norms; any but ``rms_norm_eps`` is that of a layer norm.

    Raises:
        ModelFormatError: A key is missing, or the numbers contradict each other.
    """
    of = header.text("general.architecture")
    heads = header.integer(f"{of}.attention.head_count")
    hidden_size = header.integer(f"{of}.embedding_length")
    kv_heads = header.integer(f"{of}.attention.head_count_kv", heads)
    norm = "layer_norm_rms" if epsilon == "rms_norm_eps" else "layer_norm"
    if heads == 0 or (hidden_size % heads and f"{of}.attention.key_length" not in header.metadata):
        raise ModelFormatError(f"{header.path.name}: {heads} heads do not divide {hidden_size}")
    if kv_heads == 0 or heads % kv_heads:
        raise ModelFormatError(
            f"{header.path.name}: {kv_heads} heads of keys do not divide {heads}"
        )
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": decoder_layers(header),
        "intermediate_size": header.integer(
            f"{of}.feed_forward_length",
            # Where every layer has experts, no layer has a length of its own.
            header.integer(f"{of}.expert_feed_forward_length", 0) or None,
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": header.integer(f"{of}.attention.key_length", hidden_size // heads),
        epsilon: header.number(f"{of}.attention.{norm}_epsilon"),
        "vocab_size": header.shape("token_embd.weight")[0],
        "max_position_embeddings": header.integer(f"{of}.context_length"),
        "rope_theta": header.number(f"{of}.rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(header),
        "tie_word_embeddings": not header.has("output.weight"),
    }


def check_heads(header: GgufHeader, config: Mapping[str, object]) -> None:
    """Refuse heads whose values or rotary positions are not as wide as their keys.

    Raises:
        ModelFormatError: The file has them, and mlx-lm's architecture knows one width.
    """
    of = header.text("general.architecture")
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    refuse_partial_rope(header, head_dim)
    key = f"{of}.attention.value_length"
    if header.integer(key, head_dim) != head_dim:
        raise ModelFormatError(f"{header.path.name}: {key} other than {head_dim} is not supported")


def refuse_partial_rope(header: GgufHeader, head_dim: int) -> None:
    """Refuse rotary positions for a part of each head.

    Raises:
        ModelFormatError: The file asks for them, and mlx-lm's architecture has none.
    """
    of = header.text("general.architecture")
    if header.integer(f"{of}.rope.dimension_count", head_dim) != head_dim:
        raise ModelFormatError(f"{header.path.name}: partial rotary positions are not supported")


def partial_rotary_factor(header: GgufHeader, head_dim: int) -> float:
    """Return the rotary part of a head's dimensions; times ``head_dim`` and rounded down, as mlx-lm does, it is the file's number.

    Raises:
        ModelFormatError: The part is not even, or larger than the head.
    """
    of = header.text("general.architecture")
    rotary = header.integer(f"{of}.rope.dimension_count", head_dim)
    if not 0 < rotary <= head_dim or rotary % 2:
        raise ModelFormatError(
            f"{header.path.name}: {of}.rope.dimension_count is {rotary} for heads of {head_dim}"
        )
    factor = rotary / head_dim
    return factor if int(factor * head_dim) == rotary else math.nextafter(factor, 1.0)


def refuse_rope_scaling(header: GgufHeader) -> None:
    """Refuse scaled rotary positions.

    Raises:
        ModelFormatError: The file asks for them, and mlx-lm's architecture has none.
    """
    if header.has(ROPE_FACTORS) or rope_scaling(header) is not None:
        raise ModelFormatError(f"{header.path.name}: scaled rotary positions are not supported")


def plain_rope_config(header: GgufHeader, epsilon: str = "rms_norm_eps") -> dict[str, object]:
    """Make the configuration of an architecture that rotates whole heads without scaling.

    Raises:
        ModelFormatError: The file asks for another rotation; or as in :func:`transformer_config`.
    """
    config = transformer_config(header, epsilon)
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    refuse_partial_rope(header, head_dim)
    refuse_rope_scaling(header)
    return config


def refuse_head_dim(header: GgufHeader) -> None:
    """Refuse heads of another width than the hidden state's share.

    Raises:
        ModelFormatError: The file has them, and mlx-lm's architecture computes the width.
    """
    of = header.text("general.architecture")
    heads = header.integer(f"{of}.attention.head_count")
    share = header.integer(f"{of}.embedding_length") // max(heads, 1)
    for key in (f"{of}.attention.key_length", f"{of}.attention.value_length"):
        if header.integer(key, share) != share:
            raise ModelFormatError(f"{header.path.name}: {key} other than {share} is not supported")


def rope_scaling(header: GgufHeader) -> dict[str, object] | None:
    """Make mlx-lm's ``rope_scaling`` of the metadata.

    Raises:
        ModelFormatError: A kind that machd does not know.
    """
    of = header.text("general.architecture")
    # As in llama.cpp, a factor alone is one of linear scaling, and 0 is none.
    kind = header.text(f"{of}.rope.scaling.type", "linear")
    former = header.number(f"{of}.rope.scale_linear", 1.0)
    factor = header.number(f"{of}.rope.scaling.factor", former) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(header, factor)
    raise ModelFormatError(f"{header.path.name}: rotary scaling {shortened(kind)} is not supported")


_OPTIONAL_OF_YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}


def _yarn(header: GgufHeader, factor: float) -> dict[str, object]:
    of = header.text("general.architecture")
    scale_of_mlx_lm = 1.0 + 0.1 * math.log(max(factor, 1.0))
    for name, only in (
        ("attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_attn_factor", scale_of_mlx_lm),
    ):
        key = f"{of}.rope.scaling.{name}"
        if not math.isclose(header.number(key, only), only, rel_tol=1e-5):
            raise ModelFormatError(
                f"{header.path.name}: {key} is not supported, only as {only:.7g}"
            )
    context_tokens = header.integer(f"{of}.context_length")
    original = header.integer(f"{of}.rope.scaling.original_context_length", context_tokens)
    scaling: dict[str, object] = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for name, ggml in _OPTIONAL_OF_YARN.items():
        key = f"{of}.rope.scaling.{ggml}"
        if key in header.metadata:
            scaling[name] = header.number(key)
    return scaling


def biases(header: GgufHeader) -> dict[str, object]:
    """Tell whether projections have biases, as the tensors of the first layer say."""
    return {
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
    }


def scale(header: GgufHeader, key: str, default: float = 1.0) -> float:
    """Read a factor behind the architecture's name; 0 means, as in llama.cpp, that there is none."""
    return header.number(f"{header.text('general.architecture')}.{key}", default) or default


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
        return in_halves(rows, heads)

    return change


_Array = TypeVar("_Array", "mx.array", "NDArray[np.float32]")


def in_halves(rows: _Array, heads: int) -> _Array:
    """Put the rows of each head in mlx-lm's order: the first of each pair of neighbours, then the second of each.

    Raises:
        ModelFormatError: The rows are not those of so many heads.
    """
    if heads < 1 or rows.shape[0] % (2 * heads):
        raise ModelFormatError(f"a projection of shape {rows.shape} has no {heads} even heads")
    paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


LLAMA_ORDER: Mapping[str, Change] = {
    ".q_proj": heads_in_halves("attention.head_count"),
    ".k_proj": heads_in_halves("attention.head_count_kv", "attention.head_count"),
}
"""Of the families whose rows llama.cpp's converter reorders."""


def less_one(_header: GgufHeader, weight: mx.array) -> mx.array:
    """Return a norm's weight without the 1 that llama.cpp's converter adds, and mlx-lm's norm again."""
    return weight - 1


def with_channel(_header: GgufHeader, kernel: mx.array) -> mx.array:
    """Return a convolution's kernels [channels, width] with the axis of their one input channel."""
    return kernel.reshape(*kernel.shape[:2], 1)
