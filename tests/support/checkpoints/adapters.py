"""Random LoRA adapters, written in the three formats that are served; each from the format's own description.

The writers take tensors as bytes, so that a test can also write what no program writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from unit.engine.gguf_writer import Blocks, write_gguf

from machd.engine.adapters.low_rank import BaseLayer, BaseLayers, LowRank

Floats = NDArray[np.float32]
Tensors: TypeAlias = dict[str, Blocks]
"""By name: the type's name, the row-major shape, and the bytes."""

HEADS, KV_HEADS = 4, 2


def _block(layer: int) -> dict[str, BaseLayer]:
    at = f"model.layers.{layer}"
    return {
        f"{at}.self_attn.q_proj": BaseLayer(64, 64, heads=HEADS),
        f"{at}.self_attn.k_proj": BaseLayer(32, 64, heads=KV_HEADS),
        f"{at}.self_attn.v_proj": BaseLayer(32, 64),
        f"{at}.self_attn.o_proj": BaseLayer(64, 64),
        f"{at}.mlp.gate_proj": BaseLayer(96, 64),
        f"{at}.mlp.up_proj": BaseLayer(96, 64),
        f"{at}.mlp.down_proj": BaseLayer(64, 96),
    }


BASE: BaseLayers = _block(0) | _block(1)
"""Linear layers of a tiny llama."""

EXPERTS: BaseLayers = {
    f"model.layers.0.mlp.switch_mlp.{name}": BaseLayer(*shape, experts=3)
    for name, shape in (("gate_proj", (48, 32)), ("up_proj", (48, 32)), ("down_proj", (32, 48)))
}
"""Those of a layer with three experts."""

_GGML = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def random_adapter(
    base: BaseLayers = BASE,
    *,
    seed: int = 0,
    rank: int | Mapping[str, int] = 4,
    scale: float = 2.0,
    dora: bool = False,
) -> dict[str, LowRank]:
    """Make an adapter of all layers, with weights that bfloat16 holds exactly.

    Args:
        base: The layers.
        seed: Of the weights.
        rank: Of all layers, or by the layer's path.
        scale: Of all layers.
        dora: Whether it has magnitudes.
    """
    random = np.random.default_rng(seed)

    def weights(*shape: int) -> Floats:
        return bfloat16_values(random.standard_normal(shape).astype(np.float32))

    adapter = {}
    for path, layer in base.items():
        lead = (layer.experts,) if layer.experts else ()
        of_layer = rank if isinstance(rank, int) else rank[path]
        adapter[path] = LowRank(
            weights(*lead, of_layer, layer.inputs),
            weights(*lead, layer.outputs, of_layer),
            scale,
            np.abs(weights(layer.outputs)) if dora else None,
        )
    return adapter


def base_weights(seed: int = 100) -> dict[str, Floats]:
    """Make weights [outputs, inputs] of the layers of :data:`BASE`."""
    random = np.random.default_rng(seed)
    return {
        path: random.standard_normal((layer.outputs, layer.inputs)).astype(np.float32)
        for path, layer in BASE.items()
    }


def bfloat16_values(values: Floats) -> Floats:
    """Cut numbers to those that bfloat16 holds."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def stored(values: Floats, dtype: str = "F32") -> Blocks:
    """Store an array in a type of floats."""
    if dtype == "BF16":
        raw = (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    else:
        raw = values.astype(
            {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I32": "<i4"}[dtype]
        ).tobytes()
    return dtype, values.shape, raw


def mlx_lm_tensors(adapter: Mapping[str, LowRank], dtype: str = "F32") -> Tensors:
    """Make the tensors of mlx-lm's file: A [inputs, rank] and B [rank, outputs], but for experts."""
    tensors: Tensors = {}
    for path, one in adapter.items():
        plain = one.a.ndim == 2
        tensors[f"{path}.lora_a"] = stored(np.ascontiguousarray(one.a.T) if plain else one.a, dtype)
        tensors[f"{path}.lora_b"] = stored(np.ascontiguousarray(one.b.T) if plain else one.b, dtype)
        if one.magnitude is not None:
            tensors[f"{path}.m"] = stored(one.magnitude, dtype)
    return tensors


def mlx_lm_config(adapter: Mapping[str, LowRank]) -> dict[str, object]:
    """Make mlx-lm's ``adapter_config.json``."""
    one = next(iter(adapter.values()))
    return {
        "fine_tune_type": "lora" if one.magnitude is None else "dora",
        "num_layers": 2,
        "model": "tiny/llama",
        "lora_parameters": {"rank": one.a.shape[-2], "scale": one.scale, "dropout": 0.0},
    }


def peft_tensors(adapter: Mapping[str, LowRank], dtype: str = "F32") -> Tensors:
    """Make the tensors of PEFT's file, with each expert's apart."""
    tensors: Tensors = {}
    for path, one in adapter.items():
        if one.a.ndim == 3:
            block, _, projection = path.rpartition(".switch_mlp.")
            names = [f"{block}.experts.{at}.{projection}" for at in range(len(one.a))]
            pairs = list(zip(names, one.a, one.b, strict=True))
        else:
            pairs = [(path, one.a, one.b)]
        for name, a, b in pairs:
            tensors[f"base_model.model.{name}.lora_A.weight"] = stored(a, dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = stored(b, dtype)
        if one.magnitude is not None:
            name = f"base_model.model.{path}.lora_magnitude_vector"
            tensors[name] = stored(one.magnitude, dtype)
    return tensors


def peft_config(adapter: Mapping[str, LowRank]) -> dict[str, object]:
    """Make PEFT's ``adapter_config.json``, with the keys that its version 0.21 writes."""
    one = next(iter(adapter.values()))
    rank = one.a.shape[-2]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny/llama",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "lora_alpha": one.scale * rank,
        "lora_bias": False,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "alpha_pattern": {},
        "rank_pattern": {},
        "r": rank,
        "target_modules": ["q_proj"],
        "use_dora": one.magnitude is not None,
        "use_rslora": False,
    }


def gguf_tensors(
    adapter: Mapping[str, LowRank], base: BaseLayers = BASE, dtype: str = "F32"
) -> Tensors:
    """Make the tensors of a GGUF file of llama's, whose rows of queries and keys llama.cpp has in pairs."""
    tensors: Tensors = {}
    for path, one in adapter.items():
        _, _, layer, _, module = path.split(".")
        name = f"blk.{layer}.{_GGML[module]}.weight"
        b = one.b
        if heads := base[path].heads:
            b = np.ascontiguousarray(
                b.reshape(heads, 2, -1, b.shape[-1]).swapaxes(1, 2).reshape(b.shape)
            )
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = (
            stored(one.a, dtype),
            stored(b, dtype),
        )
    return tensors


def gguf_metadata(adapter: Mapping[str, LowRank]) -> dict[str, object]:
    """Make the metadata that llama.cpp's converter writes."""
    one = next(iter(adapter.values()))
    return {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(one.scale * one.a.shape[-2]),
        "general.base_model.0.name": "Tiny Llama",
    }


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """Write a file of safetensors, by its format alone."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_mlx_lm(directory: Path, tensors: Tensors, config: Mapping[str, object]) -> Path:
    """Write a directory as mlx-lm saves it."""
    return _written(directory, "adapters.safetensors", tensors, config)


def write_peft(directory: Path, tensors: Tensors, config: Mapping[str, object]) -> Path:
    """Write a directory as PEFT saves it."""
    return _written(directory, "adapter_model.safetensors", tensors, config)


def _written(directory: Path, name: str, tensors: Tensors, config: Mapping[str, object]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / name, tensors)
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def write_gguf_adapter(path: Path, tensors: Tensors, metadata: Mapping[str, object]) -> Path:
    """Write a GGUF file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, metadata, tensors)
