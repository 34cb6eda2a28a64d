"""Adapters that mlx-lm itself makes and saves: what machd reads of them is what mlx-lm fuses and computes."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3_moe
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from support.checkpoints.adapters import BASE, random_adapter

from machd.engine.adapters.adapter_files import adapter_digest, read_adapter
from machd.engine.adapters.linear_layers import base_layers
from machd.engine.adapters.low_rank import BaseLayer, BaseLayers
from machd.engine.kernels.fused_llama import fuse_layers

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
_OF_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def _model(*, experts: bool) -> Module:
    mx.random.seed(3)
    sizes = (
        {"model_type": "qwen3_moe", **_SIZES, **_OF_EXPERTS}
        if experts
        else {"model_type": "llama", **_SIZES}
    )
    module = qwen3_moe if experts else llama
    model: Module = module.Model(module.ModelArgs.from_dict(sizes))
    return model


def _layers(model: Module) -> BaseLayers:
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear):
            outputs, inputs = layer.weight.shape
            found[path] = BaseLayer(outputs, inputs)
        if isinstance(layer, SwitchLinear):
            found[path] = BaseLayer(layer.output_dims, layer.input_dims, layer.num_experts)
    return found


def _trained(directory: Path, *, experts: bool, dora: bool) -> Path:
    """Save an adapter of random weights, as mlx-lm's training does."""
    model = _model(experts=experts)
    model.freeze()
    keys = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate"] if experts and dora else None
    parameters = {"rank": 3, "scale": 3.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 2, dict(parameters), use_dora=dora)
    weights = dict(tree_flatten(model.trainable_parameters()))
    assert isinstance(weights, dict)
    changed = {name: one + 0.2 * mx.random.normal(one.shape) for name, one in weights.items()}
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), changed)
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": 2,
        "lora_parameters": parameters,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", ["lora", "dora", "lora of experts", "dora beside experts"])
def test_adapter_is_what_mlx_lm_fuses(tmp_path: Path, kind: str) -> None:
    """The weights with an adapter are those that ``mlx_lm.fuse`` makes."""
    experts, dora = "experts" in kind, "dora" in kind
    directory = _trained(tmp_path / "adapter", experts=experts, dora=dora)
    model = _model(experts=experts)
    weights = {path: np.array(one.weight) for path, one in model.named_modules() if "weight" in one}
    adapter = read_adapter(directory, adapter_digest(directory), _layers(model))
    load_adapters(model, str(directory))
    fused = {path: one.fuse() for path, one in model.named_modules() if hasattr(one, "fuse")}
    assert fused.keys() == adapter.keys()
    for path, one in adapter.items():
        expected = weights[path] + one.scale * (one.b @ one.a)
        if one.magnitude is not None:
            expected *= (one.magnitude / np.linalg.norm(expected, axis=1))[:, None]
        assert np.abs(expected - np.array(fused[path].weight)).max() < 1e-6
        assert np.abs(expected - weights[path]).max() > 1e-2


@pytest.mark.parametrize("is_merged", [False, True])
def test_file_of_llama_cpp_fits_a_model_of_mlx_lm(*, is_merged: bool) -> None:
    """The model tells the heads by which llama.cpp orders rows, before and after machd merges its layers."""
    wider = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **_SIZES, **wider}))
    if is_merged:
        assert fuse_layers(model) > 0
    file = Path(__file__).parent / "llama_cpp_llama.gguf"
    found = read_adapter(file, adapter_digest(file), base_layers(model))
    expected = random_adapter(
        {path: layer for path, layer in BASE.items() if ".layers.0." in path}, seed=11, rank=2
    )
    assert found.keys() == expected.keys()
    for path, one in expected.items():
        assert np.array_equal(found[path].b, one.b), path
