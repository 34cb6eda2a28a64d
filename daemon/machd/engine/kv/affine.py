"""Keys and values as small integers, with a scale and an offset for each group of numbers.

The layout is mlx-lm's: what ``mx.quantize`` gives, the integers packed into 32-bit words. Only
where a vector is no multiple of a group it is filled up for the quantiser, and the filling is left
out of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.kv.kv_format import VectorFormat

_GROUP = 64
_GROUPS = (32, 64, 128)
"""What ``mx.quantize`` knows."""

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
        """Take the bits of a number: 8 or 4."""
        assert bits in {_BYTE_BITS, _NIBBLE_BITS}
        self.name = f"affine{bits}"
        self._bits = bits

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """As they are for bytes; for halves of bytes see :meth:`join_outputs`."""
        if self._bits == _BYTE_BITS:
            return (queries,)
        even, odd = queries[..., 0::2], queries[..., 1::2]
        return even, odd - _NIBBLES * even

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """Of whole bytes, which are ``even + 16 * odd``, and of their upper halves, both."""
        if self._bits == _BYTE_BITS:
            return parts[0]
        whole, odd = parts
        joined = mx.stack([whole - _NIBBLES * odd, odd], axis=-1)
        return joined.reshape(*joined.shape[:-2], -1)

    def _encoded(self, vectors: mx.array) -> tuple[mx.array, mx.array]:
        rows, heads, tokens, width = vectors.shape
        if not width:
            return vectors.astype(mx.uint32), mx.zeros((rows, 2 * heads, tokens, 0), vectors.dtype)
        group = _group(width)
        filled = -(-width // group) * group
        if filled > width:
            # The last number again: a group's range stays what it is.
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
    """Numbers that share a scale: mlx-lm's 64, and for odd vectors all of them up to 128."""
    if width % _GROUP == 0 or width > _GROUPS[-1]:
        return _GROUP
    return next(group for group in _GROUPS if group >= width)
