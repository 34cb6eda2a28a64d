"""A GGUF file of the llama family as mlx-lm's llama: configuration, weights and model.

llama.cpp stores the rows of the query and key projections in another order, for rotary positions
that pair neighbours; mlx-lm pairs the first half of a head with the second. The rows are put back
here, and those of the quantisation scales and biases with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from machd.engine.backend.inspection_bounds import check_counts, check_finite, printable
from machd.engine.backend.model_files import open_regular, shortened
from machd.engine.loading.formats.gguf_header import GgufHeader, GgufTensor
from machd.engine.loading.formats.gguf_tensors import EXPANDED, KEPT_BITS, read_tensor
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelArchitectureError, ModelFormatError

_GROUP_SIZE = 32
"""Weights that share a scale in every type that is kept quantised."""

_ROPE_FACTORS = "rope_freqs.weight"
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


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Weights under mlx-lm's names.

    Attributes:
        arrays: Plain weights, or packed ``weight`` (uint32), ``scales`` and ``biases`` (float16).
        bits: Module path to bits, of each module that is still quantised, in groups of 32.
        rope_factors: The values of ``rope_freqs.weight``, one divisor a rotary frequency, as llama 3
            files carry them; None in other files.
    """

    arrays: dict[str, mx.array]
    bits: dict[str, int]
    rope_factors: list[float] | None = None


def check_gguf(header: GgufHeader) -> None:
    """Refuse what cannot become a llama of mlx-lm, before anything large is read.

    Raises:
        ModelArchitectureError: Another architecture, or a mixture of experts.
        ModelFormatError: A tensor type that machd does not read, a tensor that llama has not, or more
            layers than tensors.
    """
    name = header.path.name
    architecture = header.text("general.architecture")
    if architecture != "llama":
        raise ModelArchitectureError(
            f"{name} holds the architecture {shortened(architecture)}; machd reads GGUF files of "
            "the llama family: take the model in mlx-lm layout (safetensors) instead"
        )
    if header.integer("llama.expert_count", 0):
        raise ModelArchitectureError(
            f"{name} is a mixture of experts, which machd reads in mlx-lm layout only"
        )
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
        if tensor.name != _ROPE_FACTORS and _module_path(tensor.name) is None:
            raise ModelFormatError(f"{name}: a plain llama has no tensor {shortened(tensor.name)}")
    if not any(tensor.name == "token_embd.weight" for tensor in header.tensors):
        raise ModelFormatError(f"{name} holds no token_embd.weight; it is no language model")
    config = llama_config(header)
    check_counts(config, len(header.tensors))
    check_finite(config)


def llama_config(header: GgufHeader, rope_factors: list[float] | None = None) -> dict[str, object]:
    """Make the configuration that ``mlx_lm.models.llama.ModelArgs.from_dict`` takes.

    Args:
        header: A header that :func:`check_gguf` let pass.
        rope_factors: As of :class:`GgufWeights`.

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


def build_llama(header: GgufHeader, weights: GgufWeights) -> Module:
    """Make mlx-lm's llama of weights.

    Raises:
        ModelFormatError: The tensors' shapes are not those of the configuration.
    """
    from mlx_lm.models.llama import Model, ModelArgs  # noqa: PLC0415 - after import_mlx_lm()

    config = llama_config(header, weights.rope_factors)

    def packing(path: str, _: Module) -> bool | dict[str, int]:
        bits = weights.bits.get(path)
        return False if bits is None else {"group_size": _GROUP_SIZE, "bits": bits}

    try:
        model: Module = Model(ModelArgs.from_dict(config))
        quantize(model, class_predicate=packing)
        model.load_weights(list(weights.arrays.items()), strict=True)
    except Exception as error:
        # mlx-lm raises any error for a contradiction, such as ZeroDivisionError for no heads.
        raise ModelFormatError(
            f"{header.path.name}: its tensors do not fit its metadata: {printable(error)}"
        ) from error
    model.eval()
    return model


def load_llama_weights(
    header: GgufHeader,
    dtype: mx.Dtype | None,
    progress: LoadProgress,
    *,
    is_mixed: bool = False,
) -> GgufWeights:
    """Read every tensor, put rows in order, and dequantise where a dtype is given.

    Each tensor's original is dropped as soon as its replacement is computed.

    Args:
        header: A header that :func:`check_gguf` let pass.
        dtype: Dtype of all weights; None keeps quantised weights packed and gives the rest the dtype
            of their scales (float16), or float32 in a file that is float32.
        progress: Advanced by each tensor's size in the file.
        is_mixed: Each plain weight keeps a dtype of its own, where ``dtype`` is None.

    Raises:
        ModelFormatError: The file has become shorter since its header was read.
    """
    with open_regular(header.path) as file:
        try:
            return _read_weights(file, header, dtype, progress, is_mixed=is_mixed)
        except (OSError, EOFError) as error:
            raise ModelFormatError(
                f"{header.path.name} has changed while it was read; fetch the file again"
            ) from error


def _read_weights(
    file: BinaryIO,
    header: GgufHeader,
    dtype: mx.Dtype | None,
    progress: LoadProgress,
    *,
    is_mixed: bool,
) -> GgufWeights:
    plain_dtype = dtype or _stored_dtype(header)
    heads = header.integer("llama.attention.head_count")
    kv_heads = header.integer("llama.attention.head_count_kv", heads)
    weights = GgufWeights({}, {}, _rope_factors(file, header))
    for path, tensor in _weights_of_modules(header):
        parts = read_tensor(file, tensor)
        if path.endswith((".q_proj", ".k_proj")):
            rows = heads if path.endswith(".q_proj") else kv_heads
            parts = {part: _paired_by_halves(array, rows) for part, array in parts.items()}
        bits = KEPT_BITS.get(tensor.type_name)
        if bits is None:
            weight = parts["weight"]
            parts = {"weight": weight if is_mixed else weight.astype(plain_dtype)}
        elif dtype is not None:
            parts = {"weight": _dequantised(parts, bits, dtype)}
        else:
            weights.bits[path] = bits
        mx.eval(list(parts.values()))
        weights.arrays.update({f"{path}.{part}": array for part, array in parts.items()})
        progress.advance(tensor.size_bytes)
    return weights


def lazy_llama_weights(header: GgufHeader, *, is_mixed: bool = False) -> GgufWeights:
    """Make zeros in the shapes and dtypes of the stored weights, which are never computed.

    Args:
        header: A header that :func:`check_gguf` let pass.
        is_mixed: As of :func:`load_llama_weights`.
    """
    dtype = _stored_dtype(header)
    weights = GgufWeights({}, {})
    for path, tensor in _weights_of_modules(header):
        bits = KEPT_BITS.get(tensor.type_name)
        if bits is None:
            own = mx.float16 if tensor.type_name == "F16" else mx.float32
            weights.arrays[f"{path}.weight"] = mx.zeros(tensor.shape, own if is_mixed else dtype)
            continue
        *rows, columns = tensor.shape
        weights.bits[path] = bits
        weights.arrays[f"{path}.weight"] = mx.zeros((*rows, columns * bits // 32), mx.uint32)
        for part in ("scales", "biases"):
            groups = mx.zeros((*rows, columns // _GROUP_SIZE), mx.float16)
            weights.arrays[f"{path}.{part}"] = groups
    return weights


def _weights_of_modules(header: GgufHeader) -> Iterator[tuple[str, GgufTensor]]:
    """List the tensors with mlx-lm's path of their module; ``rope_freqs.weight`` has none."""
    for tensor in header.tensors:
        path = _module_path(tensor.name)
        if path is not None:
            yield path, tensor


def _module_path(tensor_name: str) -> str | None:
    """Find mlx-lm's path of the module that a tensor belongs to; None for another tensor."""
    match = _TENSOR_NAME.fullmatch(tensor_name)
    if match is None or match["part"] != "weight":
        return None
    if match["layer"] is None:
        return _GLOBAL_NAMES.get(match["module"])
    name = _LAYER_NAMES.get(match["module"])
    return None if name is None else f"model.layers.{match['layer']}.{name}"


def _rope_factors(file: BinaryIO, header: GgufHeader) -> list[float] | None:
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            return _floats(read_tensor(file, tensor)["weight"])
    return None


def _paired_by_halves(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order: (heads x head_dim, columns) -> the same shape, rows put back."""
    if rows.ndim != 2 or rows.shape[0] % (2 * heads):
        raise ModelFormatError(f"a projection of shape {rows.shape} has no {heads} even heads")
    paired = rows.reshape(heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _dequantised(parts: dict[str, mx.array], bits: int, dtype: mx.Dtype) -> mx.array:
    # With float32 scales the product is exact; float16 would round every weight.
    scales, biases = (parts[name].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(parts["weight"], scales, biases, _GROUP_SIZE, bits).astype(dtype)


def _stored_dtype(header: GgufHeader) -> mx.Dtype:
    is_float32 = all(tensor.type_name == "F32" for tensor in header.tensors)
    return mx.float32 if is_float32 else mx.float16


def _floats(array: mx.array) -> list[float]:
    values = array.astype(mx.float32).tolist()
    assert isinstance(values, list)
    return [value for value in values if isinstance(value, float)]


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
