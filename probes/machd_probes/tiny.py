"""A tiny model of any of mlx-lm's architectures, with random weights that let a probe fail.

mlx-lm's own initialisation is too weak for a comparison: a model that repeats one token whatever it
reads hides every fault of its cache. Here weights keep the size of what flows through them, and no
norm or bias is neutral. ``architectures/NAME.toml`` holds each architecture's configuration, and
the seed and scales with which its greedy answers are varied and depend on the first tokens of the
prompt; a test holds them to it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from machd.engine.backend.untyped import LanguageModel
from machd.engine.loading.architecture import import_architecture

Floats = NDArray[np.float32]

_DIRECTORY = "architectures"
_DECAYS = ("A_log", "decay", "time_decay")
"""Parameters that set how fast a state forgets; far from their usual values it forgets at once, or
never."""


@dataclass(frozen=True)
class TinyConfiguration:
    """The configuration of a tiny model, and the recipe of its weights.

    Attributes:
        config: As in the ``config.json`` of a checkpoint.
        seed: Of the random weights.
        gain: How much larger than size-preserving the weights are.
        embedding_scale: Small where the head is the embedding, which would only repeat what it
            just read.
        scales: Factors for the parameters whose path ends so, where a part's size matters.
        centres: What parameters are drawn around whose path ends so, such as those that set how fast
            a state forgets.
        attributes: Numbers of a real vocabulary that an architecture's code holds, for a tiny one.
    """

    config: Mapping[str, object]
    seed: int = 0
    gain: float = 1.5
    embedding_scale: float = 1.0
    scales: Mapping[str, float] = field(default_factory=dict)
    centres: Mapping[str, float] = field(default_factory=dict)
    attributes: Mapping[str, list[int]] = field(default_factory=dict)


def tiny_variants(architecture: str) -> list[str]:
    """Names of the architecture's configurations, the main one first; empty without any."""
    names = [entry.name for entry in (files(__package__) / _DIRECTORY).iterdir()]
    stems = [name.removesuffix(".toml") for name in names if name.endswith(".toml")]
    return sorted(stem for stem in stems if stem.partition("+")[0] == architecture)


def tiny_configuration(variant: str) -> TinyConfiguration:
    """Read a configuration.

    Raises:
        FileNotFoundError: There is none of this name.
    """
    path = files(__package__) / _DIRECTORY / f"{variant}.toml"
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return TinyConfiguration(config=values["config"], **values.get("weights", {}))


def tiny_model(configuration: TinyConfiguration) -> Module:
    """Build a model on this thread, the same every time.

    Raises:
        BaseException: Whatever importing or building the architecture raises.
    """
    module = import_architecture(str(configuration.config["model_type"]))
    return build_tiny(configuration, module.Model, module.ModelArgs)


def build_tiny(
    configuration: TinyConfiguration, model_class: LanguageModel, args_class: LanguageModel
) -> Module:
    """Build a model of these classes on this thread, the same every time.

    Raises:
        BaseException: Whatever building the model raises.
    """
    mx.random.seed(configuration.seed)  # some parameters stay near what the architecture draws
    model = blank_model(configuration, model_class, args_class)
    draw_weights(model, configuration)
    model.eval()
    return model


def blank_model(
    configuration: TinyConfiguration, model_class: LanguageModel, args_class: LanguageModel
) -> Module:
    """Build a model without weights of its own: MLX computes those of the architecture when they are asked for.

    Raises:
        BaseException: Whatever building the model raises.
    """
    model: Module = model_class(args_class.from_dict(_copied(configuration.config)))
    for name, numbers in configuration.attributes.items():
        setattr(model, name, mx.array(numbers))
    return model


def _copied(value: object) -> object:
    """Plain dictionaries and lists, because architectures change what they are given."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def draw_weights(model: Module, configuration: TinyConfiguration) -> None:
    """Give every parameter a size that keeps the signal's, and no parameter a neutral value."""
    random = np.random.default_rng(configuration.seed)
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    drawn = []
    for name, array in flat:
        value = _drawn(name, array, random, configuration)
        drawn.append((name, array if value is None else mx.array(value).astype(array.dtype)))
    model.load_weights(drawn, strict=False)
    mx.eval(model.parameters())


def _drawn(
    name: str, array: mx.array, random: np.random.Generator, configuration: TinyConfiguration
) -> Floats | NDArray[np.uint32] | None:
    """Another value for one parameter; None leaves it as it is."""
    if not mx.issubdtype(array.dtype, mx.floating):
        # Packed weights: every pattern of bits is one.
        is_packed = array.dtype == mx.uint32
        return random.integers(0, 2**32, array.shape, dtype=np.uint32) if is_packed else None
    if name.endswith("signs") or not array.size:
        return None
    noise = random.standard_normal(array.shape).astype(np.float32)
    value = _value(name, array, noise, configuration)
    for suffix, scale in configuration.scales.items():
        if name.endswith(suffix):
            value = value * np.float32(scale)
    return value


def _value(name: str, array: mx.array, noise: Floats, configuration: TinyConfiguration) -> Floats:
    last = name.rpartition(".")[2]
    for suffix, centre in configuration.centres.items():
        if name.endswith(suffix):
            return np.float32(centre) + np.float32(0.3) * noise
    if last.endswith(_DECAYS):
        return _floats(array) + np.float32(0.1) * noise
    if array.ndim <= 1 or array.size == max(array.shape):
        return _centre(last, array) + np.float32(0.3) * noise
    if array.ndim >= 4 and last == "weight":  # a convolution: (channels, height, width, channels)
        return noise * np.float32(configuration.gain / np.sqrt(array.size // array.shape[0]))
    if "embed" in name or name.endswith(("wte.weight", "wpe.weight", "tok_embeddings.weight")):
        return noise * np.float32(configuration.embedding_scale)
    # The last axis alone for a depthwise convolution's (channels, kernel, 1) too.
    fan_in = array.size // array.shape[0] if "conv" in name else array.shape[-1]
    return noise * np.float32(configuration.gain / np.sqrt(fan_in))


def _centre(last: str, array: mx.array) -> Floats:
    """Return the centre to draw a vector around: mlx-lm's value, or zero where that is random."""
    value = _floats(array)
    is_constant = bool(np.all(value == value.flat[0]))
    return value if is_constant and last != "bias" else np.zeros(array.shape, dtype=np.float32)


def _floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))
