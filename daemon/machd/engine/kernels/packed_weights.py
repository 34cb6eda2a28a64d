"""Unpacking of quantised weights in float32, in groups that mlx's own functions refuse, too."""

from __future__ import annotations

import mlx.core as mx

from machd.engine.backend.untyped import Layer

MLX_GROUPS = (32, 64, 128)
"""Sizes of groups of affine weights that mlx computes with; K-quants of GGUF files have groups of 16, too."""


def is_left_to_kernels(layer: Layer) -> bool:
    """Return True for a quantised layer whose groups mlx refuses, so that machd's own kernels alone compute it."""
    if "scales" not in layer or getattr(layer, "mode", "affine") != "affine":
        return False
    return getattr(layer, "group_size", MLX_GROUPS[0]) not in MLX_GROUPS


def unpacked(layer: Layer, rows: mx.array | None = None) -> mx.array:
    """Return a quantised layer's weights in float32.

    Of affine weights of at most 8 bits, whose scales are float16 or the product of such and a whole number of 8 bits, each is
    rounded once, as its formula says.

    Args:
        layer: Its arrays are not changed.
        rows: Of the weights; all unless given.
    """

    def part(name: str) -> mx.array:
        array: mx.array = layer[name]
        return array if rows is None else array[rows]

    if layer.mode != "affine":
        return mx.dequantize(
            part("weight"),
            part("scales"),
            None,
            layer.group_size,
            layer.bits,
            layer.mode,
            global_scale=layer.get("global_scale"),
            dtype=mx.float32,
        )
    # float32 scales keep the product exact.
    scales, biases = part("scales").astype(mx.float32), part("biases").astype(mx.float32)
    if not is_left_to_kernels(layer):
        return mx.dequantize(part("weight"), scales, biases, layer.group_size, layer.bits)
    words = part("weight")
    groups = (
        *words.shape[:-1],
        words.shape[-1] // layer.bits,
    )  # 32 numbers take as many words as one has bits
    ones, zeros = mx.ones(groups), mx.zeros(groups)
    numbers = mx.dequantize(words, ones, zeros, MLX_GROUPS[0], layer.bits)
    numbers = numbers.reshape(*scales.shape, layer.group_size)
    weights = numbers * scales[..., None] + biases[..., None]
    return weights.reshape(*words.shape[:-1], -1)
