"""Formats of quantised weights: a model's own, and those of ``model.quantize`` for plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.untyped import Layer
from machd.errors import SettingsError

_TRIAL_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Quantization:
    """The packing of a layer's weights.

    Attributes:
        mode: ``affine``, ``mxfp4``, ``nvfp4`` or ``mxfp8``.
    """

    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, group {self.group_size}"


WEIGHT_FORMATS: Mapping[str, Quantization] = {
    "affine8": Quantization("affine", 8, 64),
    "affine4": Quantization("affine", 4, 64),
    "affine2": Quantization("affine", 2, 64),
    "mxfp8": Quantization("mxfp8", 8, 32),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "nvfp4": Quantization("nvfp4", 4, 16),
}
"""The values of ``model.quantize``, with the group sizes that mlx-lm uses."""


def weight_format(name: str | None, packed: Quantization | None) -> Quantization | None:
    """Return the format that ``model.quantize`` names; None without it. ``packed`` is what the weights have already.

    Raises:
        SettingsError: The model is quantised already, or the backend cannot compute in this format.
    """
    if name is None:
        return None
    wanted = WEIGHT_FORMATS[name]
    if packed is not None:
        problem = f"the model is quantised already ({packed})"
    elif not multiplies(wanted):
        problem = f"mlx does not compute {wanted} on {mx.default_device().type.name}"
    else:
        return wanted
    raise SettingsError([f"model.quantize: {problem}; leave {name} out, or take another format"])


def multiplies(quantization: Quantization) -> bool:
    """Tell whether two rows times 64 x 64 packed weights give the right product here.

    Takes a millisecond. The right product is that of the unpacked weights.
    """
    group, bits, mode = quantization.group_size, quantization.bits, quantization.mode
    plain = mx.sin(mx.arange(64 * 64, dtype=mx.float32)).reshape(64, 64)
    rows = mx.cos(mx.arange(2 * 64, dtype=mx.float32)).reshape(2, 64)
    try:
        weight, scales, *rest = mx.quantize(plain, group, bits, mode)
        biases = rest[0] if rest else None
        product = mx.quantized_matmul(
            rows, weight, scales, biases, transpose=True, group_size=group, bits=bits, mode=mode
        )
        unpacked = mx.dequantize(weight, scales, biases, group, bits, mode, dtype=mx.float32)
        difference = mx.abs(product - rows @ unpacked.T).max().item()
    except (RuntimeError, ValueError, TypeError):
        return False  # mlx has no kernel for it here
    return isinstance(difference, float) and difference < _TRIAL_TOLERANCE


def quantization_of(model: Module) -> Quantization | None:
    """Find the packing of most of the quantised layers; None when all weights are plain."""
    kinds: Counter[Quantization] = Counter()
    for _, module in model.named_modules():
        if "scales" in module and hasattr(module, "bits"):
            mode = str(getattr(module, "mode", "affine"))
            kinds[Quantization(mode, int(module.bits), int(module.group_size))] += 1
    return kinds.most_common(1)[0][0] if kinds else None


def can_quantise(model: Layer, path: str, module: Layer, quantise_to: Quantization) -> bool:
    """Return True for a layer that has a quantised form, unless the model excludes it."""
    if not hasattr(module, "to_quantized") or module.weight.shape[-1] % quantise_to.group_size:
        return False
    wants = getattr(model, "quant_predicate", None)
    return wants is None or wants(path, module) is not False
