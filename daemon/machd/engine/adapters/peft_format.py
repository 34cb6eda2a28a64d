"""Adapters of PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``, LoRA, rsLoRA and DoRA."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from machd.engine.adapters.adapter_config import (
    CONFIG_FILE,
    AdapterConfig,
    factor,
    positive_integer,
)
from machd.engine.adapters.stored_adapter import (
    StoredAdapter,
    StoredArray,
    StoredLayer,
    check_arrays,
    check_layers,
    check_rank,
    refuse_embedding,
    together,
)
from machd.engine.backend.model_files import shortened
from machd.errors import AdapterError

WEIGHTS_FILE = "adapter_model.safetensors"

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_PARTS = {"lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "magnitude"}

_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<number>\d{1,4})\.(?P<projection>\w+)")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names of an expert's projections, which mlx-lm calls as other models do."""

_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "use_dora",
        "use_rslora",
    }
)
_OF_TRAINING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Keys that change nothing of what the tensors mean. A key that is in neither set has to be absent, false or empty."""

_KEEPS_BASE = frozenset({"eva", "gaussian", "orthogonal"})
"""Values of ``init_lora_weights`` that leave the base model's weights as they are; PiSSA's, OLoRA's and others change them."""

_MAX_NAME_CHARS = 160
_PIECE = r"(?:[\w-]|\\?\.(?!\*)|\\d)"
_PATTERN = re.compile(rf"\^?{_PIECE}*(?:\.\*{_PIECE}*)?\$?")
"""Patterns of layers' names: letters, points and digits, and ``.*`` once, so that matching takes no long time."""

_MAX_MATCHES = 1 << 22
"""Of layers with patterns; takes some seconds."""

_WILD_MATCHES = 64
"""What a pattern with ``.*`` counts for."""


def read_peft(config: AdapterConfig, arrays: list[StoredArray]) -> StoredAdapter:
    """Find the layers of an adapter.

    Raises:
        AdapterError: It is damaged, or holds what is not served as an adapter.
    """
    _check_config(config)
    parts: dict[str, dict[str, StoredArray]] = {}
    for array in arrays:
        match = _TENSOR.fullmatch(array.name)
        if match is None or len(array.name) > _MAX_NAME_CHARS:
            raise _no_tensor(array.name)
        of_layer = parts.setdefault(match["layer"], {})
        if _PARTS[match["part"]] in of_layer:
            raise AdapterError(
                f"{shortened(match['layer'])} has {match['part']} twice, as two spellings of its name"
            )
        of_layer[_PARTS[match["part"]]] = array
    check_arrays(arrays)
    together(parts)
    layers = check_layers(_with_experts([*_layers(config, parts)]))
    return StoredAdapter(layers, config.text("base_model_name_or_path"))


def _no_tensor(name: str) -> AdapterError:
    layer = name.removeprefix("base_model.model.").partition(".lora_embedding_")[0]
    layer = layer.removesuffix(".weight").removesuffix(".base_layer")
    refuse_embedding(layer.partition(".modules_to_save")[0])
    if ".lora_embedding_" in name:
        raise AdapterError(f"it trains the embedding {shortened(layer)}, which is not served")
    return AdapterError(
        f"{WEIGHTS_FILE} holds {shortened(name)}, which is no tensor of LoRA; weights that were trained whole are not served"
    )


def _check_config(config: AdapterConfig) -> None:
    kind = config.text("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{CONFIG_FILE}: peft_type {shortened(str(kind))} is not served, only LORA"
        )
    if (bias := config.text("bias")) not in (None, "none"):
        raise AdapterError(
            f"{CONFIG_FILE}: bias {shortened(str(bias))} is not served: trained biases are no part of LoRA"
        )
    if config.values.get("modules_to_save"):
        raise AdapterError(
            f"{CONFIG_FILE}: modules_to_save names modules that were trained whole, which are not served; fuse the "
            "adapter into its model with merge_and_unload"
        )
    start = config.values.get("init_lora_weights")
    if not isinstance(start, bool | None) and str(start) not in _KEEPS_BASE:
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights {shortened(str(start))} changes the base model's weights; save the adapter "
            "with path_initial_model_for_weight_conversion"
        )
    config.flag(
        "fan_in_fan_out"
    )  # How the base model stores a weight: the adapter's product is the same.
    for key, value in config.values.items():
        if value and key not in _READ and key not in _OF_TRAINING:
            raise AdapterError(f"{CONFIG_FILE} sets {shortened(key)}, which is not served")


def _layers(
    config: AdapterConfig, parts: Mapping[str, Mapping[str, StoredArray]]
) -> Iterator[StoredLayer]:
    rank, alpha = config.integer("r"), config.factor("lora_alpha")
    is_dora, is_rslora = config.flag("use_dora"), config.flag("use_rslora")
    ranks = _Patterns(config, "rank_pattern", len(parts))
    alphas = _Patterns(config, "alpha_pattern", len(parts))
    for name, of_layer in parts.items():
        said = positive_integer(ranks.value_of(name, rank), "rank_pattern")
        of_name = factor(alphas.value_of(name, alpha), "alpha_pattern")
        layer = StoredLayer(
            name=name,
            a=(of_layer["a"],),
            b=(of_layer["b"],),
            scale=of_name / (math.sqrt(said) if is_rslora else said),
            magnitude=of_layer.get("magnitude"),
        )
        check_layers([layer])
        check_rank(layer, said)
        if (layer.magnitude is not None) != is_dora:
            has = "no lora_magnitude_vector" if is_dora else "a lora_magnitude_vector"
            raise AdapterError(
                f"{CONFIG_FILE} says use_dora {str(is_dora).lower()}, and {shortened(name)} has {has}"
            )
        yield layer


class _Patterns:
    """Values for some layers: of the first pattern that matches the end of a layer's name, as PEFT does."""

    def __init__(self, config: AdapterConfig, key: str, layers: int) -> None:
        values = config.object(key).values
        cost = sum(_WILD_MATCHES if "*" in pattern else 1 for pattern in values)
        if cost * layers > _MAX_MATCHES:
            raise AdapterError(
                f"{CONFIG_FILE}: {key} has {len(values):,} patterns for {layers:,} layers, which is too many"
            )
        for pattern in values:
            if len(pattern) > _MAX_NAME_CHARS or not _PATTERN.fullmatch(pattern):
                raise AdapterError(
                    f"{CONFIG_FILE}: {key} has the pattern {shortened(pattern)}, which is not read; names of layers, with "
                    "`.*` once, are"
                )
        self._compiled = [
            (re.compile(rf"(?:.*\.)?(?:{one})$"), value) for one, value in values.items()
        ]

    def value_of(self, name: str, otherwise: object) -> object:
        """Return the value for a layer."""
        values = (value for pattern, value in self._compiled if pattern.match(name))
        return next(values, otherwise)


def _with_experts(layers: list[StoredLayer]) -> Iterator[StoredLayer]:
    """Put the experts of a layer together, which mlx-lm has in one module."""
    experts: dict[str, dict[int, StoredLayer]] = {}
    for layer in layers:
        match = _EXPERT.fullmatch(layer.name)
        if match is None:
            yield layer
            continue
        projection = _PROJECTIONS.get(match["projection"], match["projection"])
        name = f"{match['block']}.switch_mlp.{projection}"
        experts.setdefault(name, {})[int(match["number"])] = layer
    for name, by_number in experts.items():
        ordered = [by_number[number] for number in sorted(by_number)]
        if sorted(by_number) != list(range(len(ordered))) or len(ordered) == 1:
            raise AdapterError(
                f"it changes {len(ordered):,} experts of {shortened(name)}; it has to change all of a layer or none"
            )
        if len({layer.scale for layer in ordered}) > 1 or any(one.magnitude for one in ordered):
            raise AdapterError(
                f"the experts of {shortened(name)} have different scales, or DoRA's magnitudes, which is not served"
            )
        yield StoredLayer(
            name=name,
            a=tuple(layer.a[0] for layer in ordered),
            b=tuple(layer.b[0] for layer in ordered),
            scale=ordered[0].scale,
        )
