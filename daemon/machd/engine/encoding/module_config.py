"""``config.json`` in the form that the libraries' modules read.

transformers 5 writes rotary positions and the kinds of layers in a new form, which the modules do not know: they would take
a default in silence.
"""

from __future__ import annotations

from collections.abc import Mapping

from machd.engine.backend.model_files import shortened
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.encoding.families import Layers
from machd.errors import ModelFormatError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PLAIN = {"default", None}


def module_config(files: EncoderFiles) -> dict[str, object]:
    """Return the configuration of the module that computes a checkpoint.

    Raises:
        ModelFormatError: It says something that no module computes.
    """
    config = dict(files.checkpoint.config)
    config["num_labels"] = len(files.description.labels)
    if files.family.layers is Layers.MODERNBERT:
        return _modernbert(config)
    if files.family.layers is Layers.GEMMA:
        return _gemma(config)
    if files.family.layers is Layers.DECODER:
        return _decoder(config)
    return config


def _modernbert(config: dict[str, object]) -> dict[str, object]:
    for kind, key in ((_FULL, "global_rope_theta"), (_SLIDING, "local_rope_theta")):
        rope = _rope(config, kind)
        if rope.get("rope_type") not in _PLAIN:
            raise _unknown_rope(rope)
        if "rope_theta" in rope:
            config[key] = rope["rope_theta"]
    every = _every(config, first_is_full=True)
    if every is not None:
        config["global_attn_every_n_layers"] = every
    return config


def _gemma(config: dict[str, object]) -> dict[str, object]:
    sliding = _rope(config, _SLIDING)
    if sliding.get("rope_type") not in _PLAIN:
        raise _unknown_rope(sliding)
    if "rope_theta" in sliding:
        config["rope_local_base_freq"] = sliding["rope_theta"]
    full = _rope(config, _FULL)
    if "rope_theta" in full:
        config["rope_theta"] = full["rope_theta"]
    if full.get("rope_type") not in _PLAIN:
        config["rope_scaling"] = full
    every = _every(config, first_is_full=False)
    if every is not None:
        config["sliding_window_pattern"] = every
    elif "_sliding_window_pattern" in config:
        config["sliding_window_pattern"] = config["_sliding_window_pattern"]
    return config


def _decoder(config: dict[str, object]) -> dict[str, object]:
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        config.setdefault("rope_theta", rope.get("rope_theta"))
        if rope.get("rope_type") not in _PLAIN:
            config["rope_scaling"] = rope
    kinds = config.pop("layer_types", None)
    if isinstance(kinds, list) and any(one != _FULL for one in kinds):
        raise ModelFormatError("config.json has layers other than full_attention in layer_types")
    config.pop("sliding_window", None)  # the mask is machd's own
    config.setdefault("tie_word_embeddings", True)
    return config


def _rope(config: Mapping[str, object], kind: str) -> dict[str, object]:
    found = config.get("rope_parameters")
    part = found.get(kind) if isinstance(found, dict) else None
    return part if isinstance(part, dict) else {}


def _unknown_rope(rope: Mapping[str, object]) -> ModelFormatError:
    return ModelFormatError(
        f"config.json says rope_type = {shortened(str(rope.get('rope_type')))}, which machd has not for this family"
    )


def _every(config: Mapping[str, object], *, first_is_full: bool) -> int | None:
    """Find the period of full attention from the kinds of layers; None where they are not listed."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return None
    first = 0 if first_is_full else 1
    for every in range(1, len(kinds) + 2):
        if all((kind == _FULL) == ((i + first) % every == 0) for i, kind in enumerate(kinds)):
            return every
    raise ModelFormatError("config.json has layer_types without a period")
