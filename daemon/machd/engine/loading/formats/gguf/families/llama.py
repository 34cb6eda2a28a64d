"""The llama family of GGUF files as mlx-lm's llama, without mlx: configuration, names of tensors, order of rows.

llama.cpp stores the rows of the query and key projections in another order, for rotary positions
that pair neighbours; mlx-lm pairs the first half of a head with the second. The rows are put back
here, and those of the quantisation scales and biases with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from machd.engine.backend.inspection_bounds import check_counts, check_finite
from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.gguf.header import (
    EXPANDED,
    KEPT_BITS,
    GgufHeader,
    GgufTensor,
    read_gguf_header,
)
from machd.errors import ModelArchitectureError, ModelFormatError

if TYPE_CHECKING:
    import mlx.core as mx

ARCHITECTURE = "llama"
"""The one architecture of GGUF files that machd reads."""

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


def read_gguf(path: Path, bounds: Callable[[str], AbstractContextManager[None]]) -> Checkpoint:
    """Read and check a file's header, under limits of time and memory.

    Raises:
        ModelArchitectureError: The file's architecture is none that machd reads.
        ModelFormatError: The file is damaged, or holds what machd does not read.
    """
    with bounds("reading the header"):
        header = read_gguf_header(path)
    check_gguf(header)
    return Checkpoint(
        path=path,
        config=llama_config(header),
        weight_files=(path,),
        stored_bytes=sum(tensor.size_bytes for tensor in header.tensors),
        header=header,
    )


def check_gguf(header: GgufHeader) -> None:
    """Refuse what cannot become a llama of mlx-lm, before anything large is read.

    Raises:
        ModelArchitectureError: Another architecture, or a mixture of experts.
        ModelFormatError: A tensor type that machd does not read, a tensor that llama has not, or more
            layers than tensors.
    """
    name = header.path.name
    architecture = header.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelArchitectureError(
            f"{name} holds the architecture {shortened(architecture)}; machd reads GGUF files of "
            "the llama family: take the model in mlx-lm layout (safetensors) instead"
        )
    _refuse_experts(header)
    for tensor in header.tensors:
        if tensor.type_name not in KEPT_BITS and tensor.type_name not in EXPANDED:
            raise ModelFormatError(
                f"{name}: {shortened(tensor.name)} is stored as {tensor.type_name}, which machd does not "
                "read; use a Q4_0, Q4_1, Q8_0, F16 or F32 file"
            )
        if len(tensor.shape) == 1 and tensor.type_name in KEPT_BITS:
            raise ModelFormatError(
                f"{name}: {shortened(tensor.name)} is a vector stored as {tensor.type_name}; no converter writes that"
            )
        if tensor.name != ROPE_FACTORS and module_path(tensor.name) is None:
            raise ModelFormatError(f"{name}: a plain llama has no tensor {shortened(tensor.name)}")
    if not any(tensor.name == "token_embd.weight" for tensor in header.tensors):
        raise ModelFormatError(f"{name} holds no token_embd.weight; it is no language model")
    config = llama_config(header)
    check_counts(config, len(header.tensors))
    check_finite(config)


def _refuse_experts(header: GgufHeader) -> None:
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


def module_path(tensor_name: str) -> str | None:
    """Find mlx-lm's path of the module that a tensor belongs to; None for another tensor."""
    match = _TENSOR_NAME.fullmatch(tensor_name)
    if match is None or match["part"] != "weight":
        return None
    if match["layer"] is None:
        return _GLOBAL_NAMES.get(match["module"])
    name = _LAYER_NAMES.get(match["module"])
    return None if name is None else f"model.layers.{match['layer']}.{name}"


def module_tensors(header: GgufHeader) -> dict[str, GgufTensor]:
    """Find the tensor of each module, by mlx-lm's path of the module."""
    paths = ((module_path(tensor.name), tensor) for tensor in header.tensors)
    return {path: tensor for path, tensor in paths if path is not None}


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
