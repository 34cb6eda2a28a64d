"""A tiny model written twice: as a directory in mlx-lm layout, and as the GGUF file that llama.cpp's converter would make.

Names of tensors are those of the package ``gguf``, which the converters take as well; what a family's converter changes besides
is in ``gguf_rules``. Nothing here is read from machd's own tables, so that reader and writer share no mistake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import mlx.core as mx
import numpy as np
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from unit.engine.tiny_llama import CHAT_TEMPLATE, MERGES, SPECIAL, byte_tokens

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.source import ModelSource, SourceKind
from machd_probes.tiny import TinyConfiguration, tiny_configuration, tiny_model
from support.checkpoints.header_checkpoint import write_tokenizer_files

Floats: TypeAlias = NDArray[np.float32]
Tensors: TypeAlias = dict[str, Floats]
Config: TypeAlias = Mapping[str, Any]
Metadata: TypeAlias = dict[str, Any]

_BLOCK = 32
"""Weights in a block of the types that ``gguf.quants`` writes."""

_ALWAYS_FLOATS = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "_norm")
"""Modules that converters store as F32 in every file."""

_UNITS_OF_A_VECTOR = 1024
"""Vectors are multiples of 1/1024, so that 1 is added to a norm, and taken away, without rounding."""


@dataclass(frozen=True)
class GgufRules:
    """How llama.cpp's converter writes one family.

    Attributes:
        architecture: ``general.architecture``.
        tiny: The prober's configuration whose model is written.
        config: What it has otherwise.
        case: Tells rules of one architecture apart.
        metadata: Makes the keys that :func:`common_metadata` lacks, without the architecture's name; None takes one away.
        names: Pieces of mlx-lm's parameter names, and what the original checkpoint calls them, in this order.
        changes: By the end of mlx-lm's parameter name: arrays that are stored in another way.
        rearranged: Merges or splits tensors of the original checkpoint's names, after the changes.
        added: Makes tensors that no parameter is, by ggml's names.
        dropped: Ends of parameters that neither directory nor file have.
        floats: ggml's modules that are F32 in every file, besides routers and norms.
        kinds: Types of matrices that are proved.
        is_rounded: The file has numbers that were computed, or mlx-lm computes with its order of rows, and logits are rounded otherwise.
        faults: By a name: puts something wrong into metadata (with whole keys) and tensors (by ggml's names).
    """

    architecture: str
    tiny: str
    config: Mapping[str, object] = field(default_factory=dict)
    case: str = ""
    metadata: Callable[[Config], Metadata] = lambda _config: {}
    names: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[Config, Floats], Floats]] = field(default_factory=dict)
    rearranged: Callable[[Config, Tensors], Tensors] = lambda _config, tensors: tensors
    added: Callable[[Config], Tensors] = lambda _config: {}
    dropped: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("F32", "F16", "Q8_0")
    is_rounded: bool = False
    faults: Mapping[str, Callable[[Metadata, Tensors], None]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name of a test's case."""
        return f"{self.architecture}-{self.case}" if self.case else self.architecture

    def without(self, change: str) -> GgufRules:
        """Return the rules of a converter that leaves one change out."""
        return replace(
            self, changes={end: one for end, one in self.changes.items() if end != change}
        )


@dataclass(frozen=True)
class GgufCheckpoint:
    """One model, twice."""

    directory: ModelSource
    file: ModelSource


def write_gguf_checkpoint(
    path: Path,
    rules: GgufRules,
    kind: str = "F32",
    fault: Callable[[Metadata, Tensors], None] = lambda _metadata, _tensors: None,
    converter: GgufRules | None = None,
) -> GgufCheckpoint:
    """Write a tiny model as a directory and as a GGUF file.

    Args:
        path: An empty directory.
        rules: The family's.
        kind: Of the matrices: ``F32``, ``F16``, or a type that ``gguf.quants`` quantises to. The directory has the very numbers
            that the file's stand for.
        fault: Changes the file's metadata and tensors before they are written.
        converter: The rules that the file is written by, where they are others.
    """
    configuration = tiny_configuration(rules.tiny)
    configuration = replace(configuration, config={**configuration.config, **rules.config})
    config = configuration.config
    weights = _weights(configuration, rules, kind)
    directory = path / "directory"
    _write_directory(directory, config, weights)
    converter = converter or rules
    metadata = common_metadata(converter.architecture, config) | {
        f"{converter.architecture}.{key}": value
        for key, value in converter.metadata(config).items()
    }
    tensors = _ggml_tensors(converter, config, weights)
    fault(metadata, tensors)
    file = path / "model.gguf"
    _write_file(file, converter, metadata, tensors, kind)
    return GgufCheckpoint(
        ModelSource(SourceKind.DIRECTORY, directory, "directory"),
        ModelSource(SourceKind.GGUF, file, "file"),
    )


def round_tensors(_metadata: Metadata, tensors: Tensors) -> None:
    """Round the matrices of a file that stay floats to numbers of Q8_0; to be used as a fault, which it is not."""
    for name, values in tensors.items():
        if not name.rpartition(".")[0].endswith(_ALWAYS_FLOATS):
            tensors[name] = values if values.ndim == 1 else _rounded(values, "Q8_0")


def common_metadata(architecture: str, config: Config) -> Metadata:
    """The keys that llama.cpp's converter writes for every transformer, and a tokenizer."""
    config = config.get("text_config", config)
    keys = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "rope.freq_base": "rope_theta",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "expert_used_count": "num_experts_per_tok",
    }
    found = {key: config[of] for key, of in keys.items() if config.get(of) is not None}
    for of in ("num_local_experts", "num_experts", "n_routed_experts"):
        if of in config:
            found["expert_count"] = config[of]
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        of = "original_max_position_embeddings"
        found["rope.scaling.original_context_length"] = scaling[of]
        for of in ("beta_fast", "beta_slow"):
            if of in scaling:
                found[f"rope.scaling.yarn_{of}"] = float(scaling[of])
    return {f"{architecture}.{key}": value for key, value in found.items()} | _tokenizer(
        config["vocab_size"]
    )


def _tokenizer(vocabulary: int) -> Metadata:
    """A tokenizer of bytes, as many as the vocabulary has room for, and a few merges."""
    merged = ["".join(pair) for pair in MERGES]
    tokens = [*SPECIAL, *byte_tokens()[: vocabulary - len(SPECIAL) - len(merged)], *merged]
    tokens += [f"<unused{index}>" for index in range(vocabulary - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _weights(configuration: TinyConfiguration, rules: GgufRules, kind: str) -> Tensors:
    """A model's parameters by mlx-lm's names, rounded to numbers that a file of this type has."""
    import_mlx_lm()
    flat = tree_flatten(tiny_model(configuration).parameters())
    return {
        name: _rounded(np.array(array.astype(mx.float32)), kind)
        for name, array in dict(flat).items()
        if not name.endswith(rules.dropped)
    }


def _rounded(values: Floats, kind: str) -> Floats:
    if values.ndim == 1:
        return np.round(values * _UNITS_OF_A_VECTOR) / np.float32(_UNITS_OF_A_VECTOR)
    blocks = _blocks_of(values, kind)
    return values if blocks is None else dequantize(blocks, _type(kind)).reshape(values.shape)


def _blocks_of(values: Floats, kind: str) -> NDArray[Any] | None:
    """Quantise a matrix; None where a converter leaves it as F32."""
    if values.ndim == 1 or kind == "F32" or (kind != "F16" and values.shape[-1] % _BLOCK):
        return None
    blocks: NDArray[Any] = quantize(values, _type(kind))
    return blocks


def _type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def _ggml_tensors(rules: GgufRules, config: Config, weights: Tensors) -> Tensors:
    """Name and change parameters as the converter does."""
    originals: Tensors = {}
    for name, values in weights.items():
        changed = values
        for end, change in rules.changes.items():
            if name.endswith(end):
                changed = change(config, changed)
        original = name
        for piece, other in rules.names.items():
            original = original.replace(piece, other)
        originals[original] = changed
    (architecture,) = (
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == rules.architecture
    )
    layers = config.get("text_config", config)["num_hidden_layers"]
    known = gguf.get_tensor_name_map(architecture, layers)
    tensors: Tensors = {}
    for name, values in rules.rearranged(config, originals).items():
        ggml = known.get_name(name, (".weight", ".bias"))
        assert ggml is not None, f"gguf has no name for {name} in {rules.architecture}"
        tensors[ggml] = values
    return tensors | rules.added(config)


def _write_directory(directory: Path, config: Config, weights: Tensors) -> None:
    directory.mkdir(parents=True)
    arrays = {name: mx.array(values) for name, values in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer_files(directory)


def _write_file(
    path: Path, rules: GgufRules, metadata: Metadata, tensors: Tensors, kind: str
) -> None:
    writer = gguf.GGUFWriter(path, rules.architecture)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in tensors.items():
        module = name.rpartition(".")[0]
        is_float = module.endswith((*_ALWAYS_FLOATS, *rules.floats))
        blocks = None if is_float else _blocks_of(values, kind)
        if blocks is None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, blocks, raw_dtype=_type(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)
