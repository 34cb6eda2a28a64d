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


def random_adapter(base: BaseLayers, *, rank: int, seed: int, scale: float) -> AdapterWeights:
    """Draw an adapter of all linear layers, the same every time; each of its layers counts for ``scale``."""
    random = np.random.default_rng((seed, rank))
    weights: dict[str, LowRank] = {}
    for path, layer in base.items():
        a = random.standard_normal((rank, layer.inputs)) / np.sqrt(layer.inputs)
        b = random.standard_normal((layer.outputs, rank)) * (_STRENGTH / np.sqrt(rank) / scale)
        weights[path] = LowRank(a.astype(np.float32), b.astype(np.float32), scale)
    return weights


def merged(model: Module, weights: AdapterWeights, scale: float) -> Module:
    """Return a copy of a model whose weights have an adapter in them.

    Args:
        model: As mlx-lm builds it. Its quantised layers are plain ones in the copy.
        weights: The adapter.
        scale: What a request lets the adapter count for.
    """
    model = copy.deepcopy(model)
    parts = linear_parts(model)
    layers: dict[str, Linear] = {}
    for path, one in weights.items():
        layer = parts[path].layer
        delta = scale * one.scale * (mx.array(one.b) @ mx.array(one.a))
        if isinstance(layer, QuantizedLinear):
            layers[path] = _plain(layer, delta)
        else:
            layer.weight = (layer.weight.astype(mx.float32) + delta).astype(layer.weight.dtype)
    model.update_modules(tree_unflatten(list(layers.items())))
    mx.eval(model.parameters())
    return model


def _plain(layer: QuantizedLinear, delta: mx.array) -> Linear:
    """Return a plain layer of a quantised one's weights with a change."""
    own = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    plain = Linear(own.shape[1], own.shape[0], bias="bias" in layer)
    plain.weight = own + delta
    if "bias" in layer:
        plain.bias = layer.bias
    return plain
