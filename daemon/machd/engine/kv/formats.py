"""The KV formats by name, and the affine ones: small integers with a scale and an offset for each group.

The affine layout is mlx-lm's, that of ``mx.quantize``: integers packed into 32-bit words. A vector whose
width is no multiple of a group is padded for the quantiser, and the padding is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.kv.kv_format import PLAIN, KvFormat, VectorFormat
from machd.engine.kv.turboquant import TurboQuantFormat

_GROUP = 64
_GROUPS = (32, 64, 128)
"""Group sizes of ``mx.quantize``."""

_WORD_BITS = 32
_BYTE_BITS = 8
_NIBBLES = 16
_NIBBLE_BITS = 4


class AffineFormat(VectorFormat):
    """``affine8`` and ``affine4``.

    Words are uint32 [rows, heads, tokens, words]; parameters are scales and offsets, [rows, heads,
    tokens, groups] in the vectors' dtype.
    """

    parameter_count = 2

    def __init__(self, bits: int) -> None:
        assert bits in {_BYTE_BITS, _NIBBLE_BITS}
        self.name = f"affine{bits}"
        self._bits = bits

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """Keep queries for 8-bit keys; split those for 4-bit keys into even and odd dimensions."""
        if self._bits == _BYTE_BITS:
            return (queries,)
        even, odd = queries[..., 0::2], queries[..., 1::2]  # [..., head_dim / 2]
        return even, odd - _NIBBLES * even

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """Join sums over bytes, which are ``even + 16 * odd``, with sums over their upper halves."""
        if self._bits == _BYTE_BITS:
            return parts[0]
        whole, odd = parts
        joined = mx.stack([whole - _NIBBLES * odd, odd], axis=-1)  # [..., head_dim / 2, 2]
        return joined.reshape(*joined.shape[:-2], -1)

    def _encoded(self, vectors: mx.array) -> tuple[mx.array, mx.array]:
        rows, heads, tokens, width = vectors.shape
        if not width:
            return vectors.astype(mx.uint32), mx.zeros((rows, 2 * heads, tokens, 0), vectors.dtype)
        group = _group(width)
        filled = -(-width // group) * group
        if filled > width:
            # Padded with the last number, so that the group's range does not change.
            vectors = mx.pad(vectors, [(0, 0)] * 3 + [(0, filled - width)], mode="edge")
        words, scales, offsets = mx.quantize(vectors, group_size=group, bits=self._bits)
        if filled > width:
            words = words[..., : -(-width * self._bits // _WORD_BITS)]
        return words, mx.concatenate([scales, offsets], axis=1)

    def _decoded(
        self, words: mx.array, parameters: mx.array, width: int, dtype: mx.Dtype
    ) -> mx.array:
        if not width:
            return words.astype(dtype)
        scales, offsets = mx.split(parameters, 2, axis=1)
        group = _group(width)
        missing = scales.shape[-1] * group * self._bits // _WORD_BITS - words.shape[-1]
        if missing:
            words = mx.pad(words, [(0, 0)] * 3 + [(0, missing)])
        vectors = mx.dequantize(words, scales, offsets, group_size=group, bits=self._bits)
        return vectors[..., :width].astype(dtype)

    def _fills_words(self, width: int) -> bool:
        return width * self._bits % _WORD_BITS == 0

    def _parts(self, words: mx.array) -> tuple[mx.array, ...]:
        # A word's numbers come lowest first, and so do a little-endian word's bytes.
        whole = words.view(mx.uint8)
        if self._bits == _BYTE_BITS:
            return (whole.astype(mx.float32),)
        return whole.astype(mx.float32), (whole >> _NIBBLE_BITS).astype(mx.float32)


def _group(width: int) -> int:
    """Group size: mlx-lm's 64; a width that is no multiple of 64 is one group, up to 128."""
    if width % _GROUP == 0 or width > _GROUPS[-1]:
        return _GROUP
    return next(group for group in _GROUPS if group >= width)


_FORMATS: dict[str, KvFormat] = {
    one.name: one for one in (PLAIN, AffineFormat(8), AffineFormat(4), TurboQuantFormat())
}


def kv_format_named(name: str) -> KvFormat:
    """Return the format of a value of ``cache.kv_quantization``."""
    return _FORMATS[name]
