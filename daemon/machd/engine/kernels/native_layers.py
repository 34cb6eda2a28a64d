"""Layers that machd's own kernels compute on the CPU.

They read weights as they are stored and expand them in registers: a token of a 4-bit model reads a sixth of what its
weights take in float32. Rows are computed in float32, and a row's bits depend on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.packed_weights import unpacked

_PLAIN_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_SCALED_BITS = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
_LANES = 16
"""Weights of a group are read so many at a time."""


def has_native_product(layer: Module) -> bool:
    """Return True for a layer that machd computes itself here, with its weights as they are stored."""
    if native_kernels() is None or _native_class(layer) is None:
        return False
    weight = layer["weight"]
    if weight.ndim != (2 if type(layer) in _COMPUTED_BY else 3):
        return False
    if "scales" not in layer:
        return weight.dtype in _PLAIN_DTYPES
    mode, bits, group = layer.mode, layer.bits, layer.group_size
    fits = bits in _AFFINE_BITS if mode == "affine" else _SCALED_BITS.get(mode) == bits
    # Affine weights of 4 bits are read two in a byte.
    lanes = 2 * _LANES if (mode, bits) == ("affine", 4) else _LANES
    return fits and group % lanes == 0 and "global_scale" not in layer


def take_native(layer: Module) -> bool:
    """Have machd's kernels compute a layer, or a norm's float32 rows, if they can.

    It gets a subclass of its own class, so that whatever asks for the class still finds it.

    Returns:
        True if the layer computes with its weights as they are stored.
    """
    if has_native_product(layer):
        layer.__class__ = _native_class(layer)
        return True
    if type(layer) is RMSNorm and native_kernels() is not None:
        layer.__class__ = _NativeRMSNorm
    return False


def is_native(layer: Module) -> bool:
    """Return True if machd's kernels compute a layer, in float32 whatever its weights' dtype."""
    return type(layer) in (*_COMPUTED_BY.values(), *_experts_computed_by().values())


def _native_class(layer: Module) -> Any:  # noqa: ANN401 - a class that __class__ takes
    kind = type(layer)
    return _COMPUTED_BY.get(kind) or _experts_computed_by().get(kind)


def is_native_norm(layer: Module) -> bool:
    """Return True for a norm of float32 rows that machd's kernels compute."""
    return type(layer) is _NativeRMSNorm and layer.weight.dtype == mx.float32


def lay_in_large_pages(model: Module) -> None:
    """Put the weights of the layers that machd's kernels compute where they are read fastest; they are not held twice."""
    for layer in model.modules():
        if is_native(layer):
            for name in [name for name, value in layer.items() if isinstance(value, mx.array)]:
                layer[name] = native_kernels().in_large_pages(layer[name])


def layer_weights(layer: Layer) -> Any | None:  # noqa: ANN401 - of a package that may be absent
    """Return the weights of a layer for one operation of several layers; None where it is not all product."""
    if not is_native(layer) or "bias" in layer:
        return None
    arrays = (layer.weight, layer.get("scales"), layer.get("biases"))
    return native_kernels().LayerWeights(*arrays, **_format(layer))


def is_left_to_mlx(layer: Module) -> bool:
    """Return True if mlx computes a layer of a class that machd's kernels compute."""
    return type(layer) in _COMPUTED_BY


# `stands_for` is the class by which a layer's code is recognised.


def _product(layer: Any, x: mx.array) -> mx.array:  # noqa: ANN401 - a layer's attributes depend on its class
    product: mx.array = native_kernels().product(
        x, layer.weight, layer.get("scales"), layer.get("biases"), **_format(layer)
    )
    return product


def _gathered_product(
    layer: Any,  # noqa: ANN401 - the same
    x: mx.array,
    indices: mx.array,
    sorted_indices: bool = False,  # noqa: FBT001, FBT002 - mlx-lm's
) -> mx.array:
    """Multiply rows with the experts that indices name, in whatever order."""
    del sorted_indices
    product: mx.array = native_kernels().gathered_product(
        x, layer.weight, layer.get("scales"), layer.get("biases"), indices, **_format(layer)
    )
    return product + mx.expand_dims(layer.bias[indices], -2) if "bias" in layer else product


def _format(layer: Any) -> dict[str, object]:  # noqa: ANN401 - the same
    if "scales" not in layer:
        return {}
    return {"mode": layer.mode, "group": layer.group_size, "bits": layer.bits}


class _NativeLinear(Linear):
    stands_for = Linear

    def __call__(self, x: mx.array) -> mx.array:
        product = _product(self, x)
        return product + self["bias"] if "bias" in self else product


class _NativeQuantizedLinear(QuantizedLinear):
    stands_for = QuantizedLinear

    def __call__(self, x: mx.array) -> mx.array:
        product = _product(self, x)
        return product + self["bias"] if "bias" in self else product


class _NativeEmbedding(Embedding):
    stands_for = Embedding

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = self["weight"][x]
        return rows.astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class _NativeQuantizedEmbedding(QuantizedEmbedding):
    stands_for = QuantizedEmbedding

    def __call__(self, x: mx.array) -> mx.array:
        return unpacked(self, x)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class _NativeRMSNorm(RMSNorm):
    stands_for = RMSNorm

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32 or self.weight.dtype != mx.float32:
            return mx.fast.rms_norm(x, self.weight, self.eps)
        normed: mx.array = native_kernels().rms_norm(x, self.weight, self.eps)
        return normed


_COMPUTED_BY: Mapping[type, type] = {
    Linear: _NativeLinear,
    QuantizedLinear: _NativeQuantizedLinear,
    Embedding: _NativeEmbedding,
    QuantizedEmbedding: _NativeQuantizedEmbedding,
}


@cache
def _experts_computed_by() -> Mapping[type, type]:
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: PLC0415 - after import_mlx_lm()

    return {
        kind: type(
            f"_Native{kind.__name__}", (kind,), {"__call__": _gathered_product, "stands_for": kind}
        )
        for kind in (SwitchLinear, QuantizedSwitchLinear)
    }
