"""Changes that make an adapter one that must not be served, and the words of each refusal."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from machd.engine.adapters.adapter_files import adapter_digest, read_adapter
from machd.errors import AdapterError
from support.checkpoints.adapters import BASE, Tensors, stored

_MOST_SECONDS = 10.0
"""A hostile file takes milliseconds; the bound leaves room for a busy machine."""

_MOST_BYTES = 64 << 20


@dataclass
class MadeAdapter:
    """An adapter before it is written: its tensors, and its configuration or metadata."""

    tensors: Tensors
    config: dict[str, Any]


Change: TypeAlias = Callable[[MadeAdapter], object]

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
GA, GB = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


def setting(**values: object) -> Change:
    """Set keys, with two underscores for a point."""
    return lambda made: made.config.update({k.replace("__", "."): v for k, v in values.items()})


def without(*keys: str) -> Change:
    """Take keys or tensors away."""

    def change(made: MadeAdapter) -> None:
        for key in keys:
            made.config.pop(key, None)
            made.tensors.pop(key, None)

    return change


def with_tensor(name: str, *shape: int, dtype: str = "F32", value: float = 1.0) -> Change:
    """Put a tensor of one value in."""

    def change(made: MadeAdapter) -> None:
        made.tensors[name] = stored(np.full(shape, value, np.float32), dtype)

    return change


def of_lora(**values: object) -> Change:
    """Set keys of mlx-lm's parameters."""
    return lambda made: made.config["lora_parameters"].update(values)


def swapped(one: str, other: str) -> Change:
    """Exchange two tensors."""

    def change(made: MadeAdapter) -> None:
        tensors = made.tensors
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def transposed(*names: str) -> Change:
    """Turn the axes of tensors round."""

    def change(made: MadeAdapter) -> None:
        for name in names:
            dtype, shape, raw = made.tensors[name]
            made.tensors[name] = dtype, shape[::-1], raw

    return change


def renamed(old: str, new: str) -> Change:
    """Replace a part of all names."""

    def change(made: MadeAdapter) -> None:
        made.tensors = {name.replace(old, new): tensor for name, tensor in made.tensors.items()}

    return change


def empty(made: MadeAdapter) -> None:
    """Take all tensors away."""
    made.tensors.clear()


HOSTILE_PEFT: dict[str, tuple[Change, str]] = {
    "no tensors": (empty, "changes no layer"),
    "A without B": (without(B), r"has no B"),
    "B without A": (without(A), r"has no A"),
    "rank 0 in the tensors": (
        lambda made: (with_tensor(A, 0, 64)(made), with_tensor(B, 64, 0)(made)),
        "has rank 0",
    ),
    "rank 0 in the config": (setting(r=0), "r is not a whole number of at least 1"),
    "a negative rank": (setting(r=-4), "r is not"),
    "a rank that is true": (setting(r=True), "r is not"),
    "a rank of 1e9": (setting(r=10**9), "says rank 1,000,000,000 for .* of rank 4"),
    "a rank of 4,000 digits": (setting(r=10**4000), "r is not|says rank"),
    "another rank in the config": (setting(r=8), "says rank 8"),
    "alpha 0": (setting(lora_alpha=0), "lora_alpha is not a finite number other than 0"),
    "alpha that no float holds": (setting(lora_alpha=10**400), "lora_alpha is not"),
    "alpha that is text": (setting(lora_alpha="16"), "lora_alpha is not a number"),
    "no alpha": (without("lora_alpha"), "lora_alpha is not"),
    "alpha 0 by a pattern": (setting(alpha_pattern={"q_proj": 0}), "alpha_pattern is not"),
    "a rank by a pattern that the tensors have not": (
        setting(rank_pattern={"q_proj": 2}),
        "says rank 2",
    ),
    "patterns that are a list": (setting(rank_pattern=["q_proj"]), "rank_pattern is not an object"),
    "a pattern that takes for ever": (setting(rank_pattern={"(a+)+b": 4}), "which is not read"),
    "a pattern of many choices": (
        setting(alpha_pattern={"(.|.)" * 40 + "x": 4}),
        "which is not read",
    ),
    "too many patterns": (
        lambda made: made.config.update(rank_pattern={f"p{n}": 4 for n in range(400_000)}),
        "too many|larger than",
    ),
    "biases": (setting(bias="all"), "bias all"),
    "biases of LoRA": (setting(bias="lora_only"), "bias lora_only"),
    "biases of B": (setting(lora_bias=True), "sets lora_bias"),
    "whole modules": (setting(modules_to_save=["lm_head"]), "modules_to_save"),
    "a tensor of a whole module": (
        with_tensor("base_model.model.lm_head.weight", 4, 4),
        "lm_head: trained embeddings",
    ),
    "a trained norm": (with_tensor("base_model.model.model.norm.weight", 4), "no tensor of LoRA"),
    "trained embeddings": (
        with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 8),
        "model.embed_tokens: trained embeddings",
    ),
    "embeddings of another name": (
        with_tensor("base_model.model.model.tokens.lora_embedding_B", 4, 8),
        "trains the embedding model.tokens",
    ),
    "an output layer": (renamed(Q, "lm_head"), "lm_head: trained embeddings"),
    "an input layer": (renamed(Q, "model.embed_tokens"), "embed_tokens: trained"),
    "another method": (setting(peft_type="IA3"), "peft_type IA3"),
    "no method": (without("peft_type"), "peft_type None"),
    "PiSSA, which changes the base": (
        setting(init_lora_weights="pissa_niter_4"),
        "pissa_niter_4 changes",
    ),
    "OLoRA": (setting(init_lora_weights="olora"), "olora changes"),
    "a start that is a list": (setting(init_lora_weights=["x"]), "changes the base"),
    "layers twice": (setting(layer_replication=[[0, 2]]), "sets layer_replication"),
    "single tokens": (setting(trainable_token_indices=[1]), "sets trainable_token_indices"),
    "an activated LoRA": (setting(alora_invocation_tokens=[1]), "sets alora_invocation_tokens"),
    "a method of next year": (setting(use_hyper_lora=True), "sets use_hyper_lora"),
    "DoRA without magnitudes": (setting(use_dora=True), "no lora_magnitude_vector"),
    "magnitudes without DoRA": (
        with_tensor(f"base_model.model.{Q}.lora_magnitude_vector", 64),
        "use_dora false",
    ),
    "DoRA of an unknown kind": (setting(use_dora="yes"), "use_dora is not true or false"),
    "a base model that is a number": (setting(base_model_name_or_path=3), "is not a text"),
    "two spellings of a tensor": (
        with_tensor(f"base_model.model.{Q}.lora_A.default.weight", 4, 64),
        "lora_A twice",
    ),
    "A and B exchanged": (swapped(A, B), "exchanged or transposed"),
    "both transposed": (transposed(A, B), "exchanged or transposed"),
    "A transposed alone": (transposed(A), "no rank in common"),
    "vectors": (
        lambda made: (with_tensor(A, 4)(made), with_tensor(B, 4)(made)),
        "have to be matrices",
    ),
    "five axes": (
        lambda made: (with_tensor(A, 1, 1, 1, 4, 64)(made), with_tensor(B, 1, 1, 1, 64, 4)(made)),
        "have to be matrices",
    ),
    "other inputs": (with_tensor(A, 4, 32), r"for \[64, 32\], and the model's is \[64, 64\]"),
    "other outputs": (with_tensor(B, 128, 4), r"for \[128, 64\]"),
    "another layer's": (
        lambda made: (
            with_tensor(f"base_model.model.{K}.lora_A.weight", 4, 32)(made),
            with_tensor(f"base_model.model.{K}.lora_B.weight", 64, 4)(made),
        ),
        "exchanged or transposed",
    ),
    "experts where there are none": (
        lambda made: (with_tensor(A, 2, 4, 64)(made), with_tensor(B, 2, 64, 4)(made)),
        "2 experts of",
    ),
    "layers that the model has not": (
        renamed("layers.1.", "layers.7."),
        "7 of 14 layers do not fit",
    ),
    "names of no model": (renamed("model.layers", "transformer.h"), "14 of 14 layers do not fit"),
    "one foreign name": (renamed(Q, "model.layers.0.self_attn.query"), "1 of 14 layers"),
    "names with line ends": (renamed("q_proj", "q\nproj\x1b[31m"), r"q\?proj\?\[31m"),
    "a name of 100,000 letters": (renamed("q_proj", "q" * 100_000), "no tensor of LoRA"),
    "NaN": (
        with_tensor(A, 4, 64, value=float("nan")),
        "lora_A.weight holds a number that is not finite",
    ),
    "infinity": (with_tensor(B, 64, 4, value=float("inf")), "not finite"),
    "infinity in float16": (with_tensor(B, 64, 4, dtype="F16", value=float("inf")), "not finite"),
    "integers": (with_tensor(A, 4, 64, dtype="I32"), "stored as I32"),
    "doubles": (with_tensor(A, 4, 64, dtype="F64"), "stored as F64"),
}

HOSTILE_MLX_LM: dict[str, tuple[Change, str]] = {
    "no tensors": (empty, "changes no layer"),
    "full fine-tuning": (setting(fine_tune_type="full"), "fine_tune_type full"),
    "another kind of training": (setting(fine_tune_type="vera"), "vera is not lora or dora"),
    "no scale": (lambda made: made.config["lora_parameters"].pop("scale"), "with a scale"),
    "alpha for a scale": (setting(lora_parameters={"rank": 4, "alpha": 16}), "with a scale"),
    "scale 0": (of_lora(scale=0), "scale is not"),
    "scale that is text": (of_lora(scale="20"), "scale is not a number"),
    "no rank": (lambda made: made.config["lora_parameters"].pop("rank"), "rank is not"),
    "a rank of 1e9": (of_lora(rank=10**9), "says rank 1,000,000,000"),
    "parameters that are a list": (
        setting(lora_parameters=[4]),
        "lora_parameters is not an object",
    ),
    "A without B": (without(f"{Q}.lora_b"), "has no B"),
    "magnitudes alone": (with_tensor("model.layers.0.x.m", 4), "has no A"),
    "trained norms": (with_tensor("model.norm.weight", 64), "no tensor of LoRA"),
    "a name without a layer": (with_tensor("lora_a", 64, 4), "no tensor of LoRA"),
    "embeddings": (renamed(Q, "model.embed_tokens"), "trained embeddings"),
    "magnitudes without DoRA": (with_tensor(f"{Q}.m", 64), "says lora"),
    "DoRA without magnitudes": (setting(fine_tune_type="dora"), "says dora"),
    "A and B exchanged": (swapped(f"{Q}.lora_a", f"{Q}.lora_b"), "exchanged or transposed"),
    "PEFT's order of axes": (
        transposed(f"{Q}.lora_a", f"{Q}.lora_b"),
        "exchanged or transposed",
    ),
}

HOSTILE_GGUF: dict[str, tuple[Change, str]] = {
    "no tensors": (empty, "changes no layer"),
    "a model": (setting(general__type="model"), "general.type is model"),
    "another kind of adapter": (setting(adapter__type="ia3"), "adapter.type is ia3"),
    "no kind": (without("adapter.type"), "no adapter.type"),
    "no alpha": (without("adapter.lora.alpha"), "no adapter.lora.alpha"),
    "alpha 0": (setting(adapter__lora__alpha=0.0), "adapter.lora.alpha is not"),
    "alpha NaN": (setting(adapter__lora__alpha=float("nan")), "alpha is not a finite number"),
    "an activated LoRA": (setting(adapter__alora__invocation_tokens=[1]), "activated LoRA"),
    "a part of several": (setting(split__count=2), "split into several"),
    "another family": (setting(general__architecture="mamba9"), "mamba9"),
    "A without B": (without(GB), "has no B"),
    "a trained norm": (with_tensor("blk.0.attn_norm.weight", 64), "no tensor of LoRA"),
    "LoRA of a bias": (renamed("blk.0.attn_q.weight", "blk.0.attn_q.bias"), "has no"),
    "a tensor of no family": (renamed("blk.0.attn_q", "blk.0.attn_x"), "llama has no"),
    "embeddings": (renamed("blk.0.attn_q", "token_embd"), "trained embeddings"),
    "an output layer": (renamed("blk.0.attn_q", "output"), "trained embeddings"),
    "integers": (with_tensor(GA, 4, 64, dtype="I32"), "stored as I32"),
    "rows that qwen35 has in another order": (
        lambda made: (
            setting(general__architecture="qwen35")(made),
            renamed("attn_v", "attn_qkv")(made),
        ),
        "take the adapter in PEFT's format",
    ),
}


@contextmanager
def bounds() -> Iterator[None]:
    """Fail if a block takes much time or memory."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        yield
        assert time.monotonic() - began < _MOST_SECONDS
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES
    finally:
        tracemalloc.stop()


def refused(path: Path, words: str) -> None:
    """Check that reading an adapter is refused in words of a few lines, which name no path."""
    digest = adapter_digest(path)
    with bounds(), pytest.raises(AdapterError, match=words) as error:
        read_adapter(path, digest, BASE)
    assert len(error.value.message) < 2_000
    assert error.value.message.isprintable()
    assert str(path.parent) not in error.value.message
