"""Adapters of random weights, and copies of a model that have one merged into their weights."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten

from machd.engine.adapters.linear_layers import linear_parts
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayers, LowRank

_STRENGTH = 0.3
"""The size of what an adapter adds to a layer's output, for an input of size 1; the layer's own is about as large as its input."""


def random_adapter(
    base: BaseLayers, *, rank: int, seed: int, scale: float, has_magnitudes: bool = False
) -> AdapterWeights:
    """Draw an adapter of all linear layers, the same every time; each of its layers counts for ``scale``."""
    random = np.random.default_rng((seed, rank))
    weights: dict[str, LowRank] = {}
    for path, layer in base.items():
        a = random.standard_normal((rank, layer.inputs)) / np.sqrt(layer.inputs)
        b = random.standard_normal((layer.outputs, rank)) * (_STRENGTH / np.sqrt(rank) / scale)
        magnitude = 1 + random.random(layer.outputs, np.float32) if has_magnitudes else None
        weights[path] = LowRank(a.astype(np.float32), b.astype(np.float32), scale, magnitude)
    return weights


def merged(model: Module, weights: AdapterWeights, scale: float) -> Module:
    """Return a copy of a model whose weights have an adapter in them; see :func:`merge`."""
    model = copy.deepcopy(model)
    merge(model, weights, scale)
    return model


def merge(model: Module, weights: AdapterWeights, scale: float) -> None:
    """Add an adapter to the weights of a model.

    Args:
        model: As mlx-lm builds it. Its quantised layers become plain ones.
        weights: The adapter.
        scale: What a request lets the adapter count for.
    """
    parts = linear_parts(model)
    layers: dict[str, Linear] = {}
    for path, one in weights.items():
        layer = parts[path].layer
        assert type(layer) in (Linear, QuantizedLinear), "not merged, and not machd's"
        weight = parts[path].dense() + scale * one.scale * (mx.array(one.b) @ mx.array(one.a))
        if one.magnitude is not None:
            lengths = mx.linalg.norm(weight, axis=1)
            weight = weight * (mx.array(one.magnitude) / lengths)[:, None]
        if isinstance(layer, QuantizedLinear):
            layers[path] = _plain(layer, weight)
        else:
            layer.weight = weight.astype(layer.weight.dtype)
    model.update_modules(tree_unflatten(list(layers.items())))
    mx.eval(model.parameters())


def _plain(layer: QuantizedLinear, weight: mx.array) -> Linear:
    """Return a plain layer in the place of a quantised one."""
    plain = Linear(weight.shape[1], weight.shape[0], bias="bias" in layer)
    plain.weight = weight
    if "bias" in layer:
        plain.bias = layer.bias
    return plain
