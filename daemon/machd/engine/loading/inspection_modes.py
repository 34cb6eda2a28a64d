"""Which quantisation modes this backend multiplies with as they are packed."""

from __future__ import annotations

import mlx.core as mx

from machd.engine.loading.precision import Quantization

MODES = (
    Quantization("affine", 4, 64),
    Quantization("mxfp4", 4, 32),
    Quantization("nvfp4", 4, 16),
    Quantization("mxfp8", 8, 32),
)
"""Every mode of mlx 0.32.4, with its usual bits and group."""

_WIDTH = 64
_ROWS = 2
_TOLERANCE = 1e-2


def native_modes() -> dict[str, bool]:
    """Multiply two rows with 64 x 64 packed weights, in every mode; takes a few milliseconds.

    A mode counts if mlx computes the product and it is that of the unpacked weights.
    """
    return {one.mode: _multiplies(one) for one in MODES}


def _multiplies(quantization: Quantization) -> bool:
    group, bits, mode = quantization.group_size, quantization.bits, quantization.mode
    plain = mx.sin(mx.arange(_WIDTH * _WIDTH, dtype=mx.float32)).reshape(_WIDTH, _WIDTH)
    rows = mx.cos(mx.arange(_ROWS * _WIDTH, dtype=mx.float32)).reshape(_ROWS, _WIDTH)
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
    return isinstance(difference, float) and difference < _TOLERANCE
