"""Adapters of mlx-lm: ``adapters.safetensors`` and ``adapter_config.json``, LoRA and DoRA."""

from __future__ import annotations

from machd.engine.adapters.adapter_config import CONFIG_FILE, AdapterConfig
from machd.engine.adapters.stored_adapter import (
    StoredAdapter,
    StoredArray,
    StoredLayer,
    check_arrays,
    check_layers,
    check_rank,
    together,
)
from machd.engine.backend.model_files import shortened
from machd.errors import AdapterError

WEIGHTS_FILE = "adapters.safetensors"

_PARTS = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}


def read_mlx_lm(config: AdapterConfig, arrays: list[StoredArray]) -> StoredAdapter:
    """Find the layers of an adapter.

    Raises:
        AdapterError: It is damaged, or something else than LoRA or DoRA was trained.
    """
    is_dora = _is_dora(config)
    parameters = config.object("lora_parameters")
    if "scale" not in parameters.values:
        raise AdapterError(
            f"{CONFIG_FILE} has no lora_parameters with a scale, without which mlx-lm loads no adapter"
        )
    rank, scale = parameters.integer("rank"), parameters.factor("scale")
    parts: dict[str, dict[str, StoredArray]] = {}
    for array in arrays:
        name, _, part = array.name.rpartition(".")
        if part not in _PARTS or not name:
            raise AdapterError(
                f"{WEIGHTS_FILE} holds {shortened(array.name)}, which is no tensor of LoRA: weights that were trained "
                "whole are not served as an adapter"
            )
        parts.setdefault(name, {})[_PARTS[part]] = array
    check_arrays(arrays)
    together(parts)
    layers = check_layers(
        StoredLayer(
            name=name,
            a=(of_layer["a"],),
            b=(of_layer["b"],),
            scale=scale,
            magnitude=of_layer.get("magnitude"),
            is_transposed=len(of_layer["a"].shape) == 2,  # experts' are not
        )
        for name, of_layer in parts.items()
    )
    for layer in layers:
        check_rank(layer, rank)
        if (layer.magnitude is not None) != is_dora:
            has = "no m" if is_dora else "m, which is DoRA's"
            raise AdapterError(
                f"{CONFIG_FILE} says {'dora' if is_dora else 'lora'}, and {shortened(layer.name)} has {has}"
            )
    return StoredAdapter(layers, config.text("model"))


def _is_dora(config: AdapterConfig) -> bool:
    kind = config.text("fine_tune_type")
    if kind == "full":
        raise AdapterError(
            f"{CONFIG_FILE} says fine_tune_type full: all weights were trained, which is no adapter; fuse it with "
            "`mlx_lm.fuse` and serve the result as a model"
        )
    if kind not in (None, "lora", "dora"):
        raise AdapterError(f"{CONFIG_FILE}: fine_tune_type {shortened(kind)} is not lora or dora")
    return kind == "dora"
