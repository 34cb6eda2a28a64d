"""Keys and values as small integers, with a scale and an offset for each group of numbers.

The layout is mlx-lm's: what ``mx.quantize`` gives, the integers packed into 32-bit words. Only
where a vector is no multiple of a group it is filled up for the quantiser, and the filling is left
out of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.kv_planes import Vectors, VectorsFormat

__all__ = ["AffineFormat"]

_GROUP = 64
_GROUPS = (32, 64, 128)
"""What ``mx.quantize`` knows."""

_WORD_BITS = 32
_BYTE_BITS = 8
_NIBBLES = 16
_NIBBLE_BITS = 4


class AffineFormat(VectorsFormat):
    """``affine8`` and ``affine4``.

    Planes of vectors [rows, heads, tokens, n]: the words, uint32 [rows, heads, tokens, words], and
    the scales with the offsets behind them, [rows, 2 * heads, tokens, groups] in the vectors' dtype.
    """

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

    def _encoded(self, vectors: mx.array) -> tuple[mx.array, ...]:
        width = vectors.shape[-1]
        if not vectors.size:
            return _of_nothing(vectors)
        group = _group(width)
        filled = -(-width // group) * group
        if filled > width:
            # The last number again: a group's range stays what it is.
            vectors = mx.pad(vectors, [(0, 0)] * 3 + [(0, filled - width)], mode="edge")
        words, scales, offsets = mx.quantize(vectors, group_size=group, bits=self._bits)
        return words[..., : self._words(width)], mx.concatenate([scales, offsets], axis=1)

    def _decoded(self, planes: Sequence[mx.array], width: int, dtype: mx.Dtype) -> mx.array:
        words, parameters = planes
        if not width:
            return words.astype(dtype)
        scales, offsets = mx.split(parameters, 2, axis=1)
        group = _group(width)
        filled = parameters.shape[-1] * group * self._bits // _WORD_BITS
        if filled > words.shape[-1]:
            words = mx.pad(words, [(0, 0)] * 3 + [(0, filled - words.shape[-1])])
        vectors = mx.dequantize(words, scales, offsets, group_size=group, bits=self._bits)
        return vectors[..., :width].astype(dtype)

    def _folded(self, planes: Sequence[mx.array], width: int) -> Vectors | None:
        words, parameters = planes
        is_whole = words.shape[-1] * _WORD_BITS == width * self._bits
        if parameters.shape[-1] != 1 or not is_whole:
            return None
        scales, offsets = mx.split(parameters, 2, axis=1)
        # A word's numbers come lowest first, and so do a little-endian word's bytes.
        whole = words.view(mx.uint8)
        parts = [whole.astype(mx.float32)]
        if self._bits == _NIBBLE_BITS:
            parts.append((whole >> _NIBBLE_BITS).astype(mx.float32))
        return Vectors(tuple(parts), scales, offsets)

    def _words(self, width: int) -> int:
        return -(-width * self._bits // _WORD_BITS)


def _group(width: int) -> int:
    """Numbers that share a scale: mlx-lm's 64, and for odd vectors all of them up to 128."""
    if width % _GROUP == 0 or width > _GROUPS[-1]:
        return _GROUP
    return next(group for group in _GROUPS if group >= width)


def _of_nothing(vectors: mx.array) -> tuple[mx.array, ...]:
    """Planes without columns' content, for layers that keep no values, and for no tokens."""
    rows, heads, tokens, _ = vectors.shape
    assert not vectors.shape[-1], "a pass has tokens"
    return mx.zeros((rows, heads, tokens, 0), mx.uint32), mx.zeros((rows, 2 * heads, tokens, 0))
