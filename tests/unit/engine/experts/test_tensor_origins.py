"""Experts are located in the files of a checkpoint, whichever layout it has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from support.engines.banked_models import moe_model
from support.engines.rounding import is_equal_but_for_rounding

from machd.engine.backend.own_code import OwnCode
from machd.engine.experts.residency import Residency
from machd.engine.experts.tensor_origins import TensorOrigins, projections, switch_layers
from machd.engine.loading.formats.checkpoint import read_directory
from machd.engine.loading.formats.opened import Opened
from machd.engine.loading.formats.opening import open_model
from machd.engine.loading.placing.banked import place_banked
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.whole import place_whole
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.progress import SilentProgress
from machd.errors import ModelFormatError
from machd_probes.tiny import tiny_configuration, tiny_model

_FLOAT32 = PlacingSettings("float32")
_IDS = mx.array([[1, 2, 3, 4, 5, 6, 7, 8]])


def _weights(model: Module) -> dict[str, mx.array]:
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    return dict(flat)


def _as_published(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Split experts into a tensor each, as the model's makers store them and mlx-lm stacks them."""
    published = {}
    for name, array in weights.items():
        before, is_expert, after = name.partition(".switch_mlp.")
        if not is_expert:
            published[name] = array
            continue
        for number in range(array.shape[0]):
            published[f"{before}.experts.{number}.{after}"] = array[number]
    return published


def _write(directory: Path, weights: dict[str, mx.array], config: object) -> Path:
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _opened(directory: Path) -> Opened:
    source = ModelSource(SourceKind.DIRECTORY, directory, directory.name)
    return open_model(source, own_code=OwnCode.REFUSED)


def _banked_logits(directory: Path, bank_bytes: int = 200_000) -> mx.array:
    opened = _opened(directory)
    origins = TensorOrigins(opened.checkpoint.tensors)
    built = opened.build(origins)
    model = built.model
    assert type(model).__name__ == "Model"
    residency = Residency(bank_bytes, 0)
    banked = place_banked(opened, built, origins, _FLOAT32, residency, SilentProgress())
    logits = mx.array(model(_IDS))
    mx.eval(logits)
    assert banked.reading().misses > 0
    banked.close()
    return logits


@pytest.mark.parametrize("layout", [dict, _as_published], ids=["stacked", "one by one"])
def test_experts_are_located_in_both_layouts(
    tmp_path: Path, layout: Callable[[dict[str, mx.array]], dict[str, mx.array]]
) -> None:
    """Logits equal those from memory for stacked experts and for one tensor an expert."""
    loaded = moe_model()
    configuration = tiny_configuration("qwen3_moe")
    directory = _write(tmp_path, layout(_weights(loaded.model)), configuration.config)
    assert is_equal_but_for_rounding(_banked_logits(directory), loaded.model(_IDS))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_experts_are_converted_to_the_dtype_of_the_loader(tmp_path: Path, dtype: mx.Dtype) -> None:
    """16-bit experts become the float32 values that loading the whole model gives."""
    model = moe_model().model
    weights = {name: array.astype(dtype) for name, array in _weights(model).items()}
    config = tiny_configuration("qwen3_moe").config
    directory = _write(tmp_path, weights, config)
    opened = _opened(directory)
    resident = place_whole(opened, opened.build, _FLOAT32, SilentProgress()).model
    assert is_equal_but_for_rounding(_banked_logits(directory), resident(_IDS))


def test_quantised_experts_stay_quantised(tmp_path: Path) -> None:
    """Weights, scales and biases of 4-bit experts come from the file, and logits are close to mlx-lm's."""
    configuration = tiny_configuration("qwen3_moe")
    model = tiny_model(configuration)
    quantize(model, 32, 4)
    packing = {"quantization": {"group_size": 32, "bits": 4}}
    directory = _write(tmp_path, _weights(model), {**configuration.config, **packing})
    # Only close: here the dense weights are dequantised to float32, and there they stay quantised.
    assert mx.allclose(_banked_logits(directory, 40_000), model(_IDS), rtol=1e-3, atol=1e-3).item()


def test_computed_experts_are_refused(tmp_path: Path) -> None:
    """An expert that the model computes from a tensor has no location; the message has the command that helps."""
    model = moe_model().model
    weights = _weights(model)
    directory = _write(tmp_path, weights, tiny_configuration("qwen3_moe").config)
    origins = TensorOrigins(read_directory(directory, OwnCode.REFUSED).tensors)
    with origins.recording(weights):
        _, switch = switch_layers(model)[0]
        up = dict(projections(switch))["up_proj"]
        up.weight = mx.split(mx.concatenate([up.weight, up.weight], axis=1), 2, axis=1)[0]
    with pytest.raises(ModelFormatError, match=r"mlx_lm\.convert"):
        origins.stored_layers(model, mx.float32, backend="cpu")
