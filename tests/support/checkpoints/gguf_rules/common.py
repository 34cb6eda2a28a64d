"""Changes that several families' converters make, and faults that several can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from support.checkpoints.gguf_checkpoint import Config, Floats, Metadata, Tensors


def permuted(heads_key: str) -> Callable[[Config, Floats], Floats]:
    """Put rows in the order of llama.cpp's ``LlamaModel.permute``."""

    def change(config: Config, rows: Floats) -> Floats:
        heads = config[heads_key]
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))

    return change


def rotary_dimensions(config: Config) -> Metadata:
    """Write what ``LlamaModel`` does besides."""
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config.get("head_dim") or share,
    }


LLAMA_ORDER: Mapping[str, Callable[[Config, Floats], Floats]] = {
    "q_proj.weight": permuted("num_attention_heads"),
    "k_proj.weight": permuted("num_key_value_heads"),
    "q_proj.bias": permuted("num_attention_heads"),
    "k_proj.bias": permuted("num_key_value_heads"),
}


WITHOUT_BIASES = {end: LLAMA_ORDER[end] for end in ("q_proj.weight", "k_proj.weight")}
"""The same of a checkpoint whose projections have none."""


def plus_one(_config: Config, weight: Floats) -> Floats:
    """Store a norm's weight with its 1."""
    return weight + np.float32(1)


def first_row(end: str) -> Callable[[Config, Tensors], Tensors]:
    """Store matrices of one row as vectors, which converters once did."""

    def rearranged(_config: Config, tensors: Tensors) -> Tensors:
        return {
            name: values[0] if name.endswith(end) else values for name, values in tensors.items()
        }

    return rearranged


def with_key(
    key: str, value: object, *, is_new: bool = False
) -> Callable[[Metadata, Tensors], None]:
    """Return a fault: a file whose key has this value, or is absent for None; a new key is one that the file has not."""

    def fault(metadata: Metadata, _tensors: Tensors) -> None:
        assert (key in metadata) != is_new, f"{key} is not there to be wrong, or is already"
        metadata[key] = value

    return fault


def exchanged(first: str, second: str) -> Callable[[Metadata, Tensors], None]:
    """Return a fault: two modules of every layer, such as ``ffn_gate`` and ``ffn_up``, have each other's tensors."""

    def fault(_metadata: Metadata, tensors: Tensors) -> None:
        names = [name for name in tensors if f".{first}." in name]
        assert names, f"{first} is not there to be exchanged"
        for name in names:
            other = name.replace(f".{first}.", f".{second}.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return fault
