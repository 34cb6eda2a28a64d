"""A family's generated checkpoint: configuration, random weights, tokenizer and processor files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.engine.loading.embedded_tokenizer import write_embedded_tokenizer
from machd_probes.tiny import TinyConfiguration, draw_weights
from machd_probes.vision_families.chat_template import chat_template
from machd_probes.vision_families.family import (
    FAMILIES,
    Family,
    UnsupportedFamily,
    read_family,
)


class UnsupportedFamilyError(Exception):
    """A family without a generated checkpoint was asked for."""


def write_family(
    name: str, directory: Path, cache_directory: Path, *, seed: int = 0, scale: str = "tiny"
) -> Path:
    """Write a checkpoint that ``mlx_vlm.load`` reads.

    Args:
        name: A key of ``FAMILIES``.
        directory: Created if it does not exist.
        cache_directory: The user's, which holds the embedded model.
        seed: Of the weights.
        scale: ``tiny``, or ``mid`` where the family has a file of that size.

    Returns:
        The directory.

    Raises:
        UnsupportedFamilyError: There is no checkpoint of the family; the message is the reason.
        FileNotFoundError: The family has no file of this scale.
    """
    entry = FAMILIES[name]
    if isinstance(entry, UnsupportedFamily):
        raise UnsupportedFamilyError(entry.reason)
    family = read_family(name, scale)
    directory.mkdir(parents=True, exist_ok=True)
    eos_token_ids = write_embedded_tokenizer(directory, cache_directory)
    token_ids = _add_special_tokens(directory, family)
    config = {"eos_token_id": sorted(eos_token_ids), **_filled(family.config, token_ids)}
    _write_json(directory / "config.json", config)
    for file_name, values in family.files.items():
        _write_json(directory / file_name, _filled(values, token_ids))
    (directory / "chat_template.jinja").write_text(chat_template(family), encoding="utf-8")
    arrays = _random_weights(config, family, seed)
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "mlx"})
    return directory


def _add_special_tokens(directory: Path, family: Family) -> dict[str, int]:
    """Add the family's tokens to the tokenizer's files.

    Returns:
        The ids of all tokens.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.added_tokens)})
    tokenizer.save_pretrained(str(directory))
    path = directory / "tokenizer_config.json"
    _write_json(path, {**json.loads(path.read_text("utf-8")), **family.tokenizer_config})
    token_ids: dict[str, int] = tokenizer.get_vocab()
    return token_ids


def _filled(values: Mapping[str, object], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the values with ids for token texts."""
    return {key: _filled_value(value, token_ids) for key, value in values.items()}


def _filled_value(value: object, token_ids: Mapping[str, int]) -> object:
    if isinstance(value, Mapping):
        return _filled(value, token_ids)
    if isinstance(value, list):
        return [_filled_value(inner, token_ids) for inner in value]
    if value == "vocabulary":
        return len(token_ids)
    if isinstance(value, str) and value.startswith("token:"):
        return token_ids[value.removeprefix("token:")]
    return value


def _random_weights(config: Mapping[str, object], family: Family, seed: int) -> dict[str, mx.array]:
    recipe = family.weights
    mx.random.seed(seed)  # some parameters stay near what the architecture draws
    model = _build_model(config)
    drawn = TinyConfiguration(
        config={},
        seed=seed,
        gain=recipe.gain,
        embedding_scale=recipe.embedding_scale,
        scales=recipe.scales,
        centres=recipe.centres,
    )
    draw_weights(model, drawn)
    model.set_dtype(getattr(mx, recipe.dtype))
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    return dict(flat)


def _build_model(config: Mapping[str, object]) -> Module:
    """Build a model of mlx-vlm as its ``load_model`` does, without weights."""
    from mlx_vlm import utils  # noqa: PLC0415 - an extra, and takes a second

    values = json.loads(json.dumps(config))  # mlx-vlm changes what it is given
    package, _ = utils.get_model_and_args(config=values)
    values.setdefault("text_config", values.pop("llm_config", {}))
    values.setdefault("vision_config", {})
    values.setdefault("audio_config", {})
    arguments = package.ModelConfig.from_dict(values)
    modules = ["text", "vision", "perceiver", "projector", "audio"]
    arguments = utils.update_module_configs(arguments, package, values, modules)
    model: Module = package.Model(arguments)
    return model


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
