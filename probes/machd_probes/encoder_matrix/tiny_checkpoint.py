"""Checkpoints of tiny encoders, in the layout of transformers and sentence-transformers.

Every weight follows from its name and place by whole numbers, so that any program writes the same files: the reference vectors
of ``tests/unit/engine/encoding/reference_vectors.json`` were computed of these by transformers 5.24 in float32, with pooling, dense
layers and normalisation of sentence-transformers 6.2.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from machd_probes.encoder_matrix.tiny_encoders import (
    HIDDEN_NUMBERS,
    VOCABULARY_TOKENS,
    TinyEncoder,
)

_FIRST_TOKEN = 10
"""Ids below stand for special tokens in some families."""


def token_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens of a text, none of them special."""
    numbers = _numbers(f"text {length} {seed}", length)
    span = VOCABULARY_TOKENS - _FIRST_TOKEN
    return tuple(int(_FIRST_TOKEN + (one + 1) / 2 * span) for one in numbers)


def write_encoder(directory: Path, encoder: TinyEncoder, **changes: object) -> Path:
    """Write a checkpoint, with other values in ``config.json`` where some are given; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: _weight(name, shape, encoder.norm_offset) for name, shape in encoder.shapes.items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _write(directory / "config.json", {**encoder.config, **changes})
    if encoder.pooling:
        _write_modules(directory, encoder)
    if encoder.prompts:
        _write(directory / "config_sentence_transformers.json", {"prompts": encoder.prompts})
    return directory


def _write_modules(directory: Path, encoder: TinyEncoder) -> None:
    kinds = ["Transformer", "Pooling", *("Dense" for _ in encoder.dense)]
    kinds += ["Normalize"] if encoder.is_normalised else []
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    flag = f"pooling_mode_{encoder.pooling}"
    _write(
        directory / "1_Pooling/config.json",
        {"word_embedding_dimension": HIDDEN_NUMBERS, flag: True},
    )
    width = HIDDEN_NUMBERS
    for place, activation in enumerate(encoder.dense):
        out = width * 2 if place % 2 == 0 else width // 2
        has_bias = place % 2 == 1
        folder = directory / f"{place + 2}_Dense"
        config = {
            "in_features": width,
            "out_features": out,
            "bias": has_bias,
            "activation_function": activation,
        }
        _write(folder / "config.json", config)
        shapes = {"linear.weight": (out, width)} | ({"linear.bias": (out,)} if has_bias else {})
        weights = {name: _weight(f"{place} {name}", shape, 1.0) for name, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        width = out


def _write(path: Path, value: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def _numbers(name: str, count: int) -> NDArray[np.float64]:
    """Numbers in [-1, 1) that follow from a name: SplitMix64 of its CRC and the place."""
    with np.errstate(over="ignore"):
        state = (
            np.arange(1, count + 1, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
        ) * (np.uint64(0x9E3779B97F4A7C15))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0


def _weight(name: str, shape: tuple[int, ...], norm_offset: float) -> NDArray[np.float32]:
    """Weights large enough that attention is not flat, and norms and biases that are not 1 and 0."""
    numbers = _numbers(name, int(np.prod(shape))).reshape(shape)
    if len(shape) == 1:
        is_norm = "norm" in name.lower() and name.endswith("weight")
        return (norm_offset * is_norm + 0.3 * numbers).astype(np.float32)
    gain = 1.0 if "embed" in name else 2.0 * np.sqrt(3.0 / shape[-1])
    return (gain * numbers).astype(np.float32)
