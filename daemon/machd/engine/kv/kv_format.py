"""KV formats: how keys and values are stored, as arrays whose third axis is the position.

Slabs, caches and blocks copy and cut a format's arrays by position, whatever they contain. On the CPU attention
reads quantised keys and values without dequantising them: codes are unpacked, and scales multiply scores (``unpack``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

_SHARED = 2
"""Number of arrays if keys and values share them."""


@dataclass(frozen=True, slots=True)
class KvWidths:
    """Numbers in a key and in a value (0 where a layer keeps none), and their dtype, which stored arrays do not tell."""

    keys: int
    values: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> KvWidths:
        """Read them from keys and values [rows, heads, tokens, n]."""
        return cls(keys.shape[-1], values.shape[-1], keys.dtype)


@dataclass(frozen=True, slots=True)
class UnpackedVectors:
    """Quantised keys or values, not dequantised: a vector is ``scale * parts + offset``.

    Attributes:
        parts: Codes as float32 [rows, heads, width, n] each, to be used with :meth:`KvFormat.split_queries` and
            :meth:`KvFormat.join_outputs`.
        scales: [rows, heads, 1, width].
        offsets: The same, added to every number of a vector; None for none.
    """

    parts: tuple[mx.array, ...]
    scales: mx.array
    offsets: mx.array | None


@dataclass(frozen=True, slots=True)
class UnpackedKv:
    """Keys and values for attention without dequantising."""

    keys: UnpackedVectors
    values: UnpackedVectors


class KvFormat(Protocol):
    """Encodes keys and values as arrays, and decodes them; named as ``cache.kv_quantization`` has it."""

    name: str

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Encode keys and values [rows, heads, tokens, head_dim] as arrays [rows, ., tokens, .].

        A position's columns depend only on its key and its value.
        """
        ...

    def decode(self, arrays: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """Invert :meth:`encode`, exactly or nearly."""
        ...

    def unpack(self, arrays: Sequence[mx.array], widths: KvWidths, width: int) -> UnpackedKv | None:
        """Unpack the first ``width`` columns for :mod:`machd.engine.kernels.cpu_attention`; None where that has to decode."""
        del arrays, widths, width
        return None

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """Turn queries [..., head_dim] into one for each part of the unpacked keys."""
        return (queries,)

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """Turn sums over the parts of unpacked values [..., n] into the values' [..., head_dim]."""
        return parts[0]


class PlainFormat(KvFormat):
    """Keys and values as the model computes them: one array each."""

    name = "none"

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Return both as they are."""
        return keys, values

    def decode(self, arrays: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """Return both as they are."""
        del widths
        keys, values = arrays
        return keys, values


PLAIN = PlainFormat()


class VectorFormat(KvFormat, ABC):
    """A format that encodes every vector by itself, keys and values alike.

    A vector becomes words and parameters, an array each. Keys and values of one shape share the two
    arrays: the values' heads come after the keys', and every parameter has the heads of both. Other
    keys and values take four arrays.
    """

    parameter_count: int
    """Parameters of a vector, or of each of its groups."""

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Encode as two arrays, or four where keys and values differ in shape."""
        if keys.shape == values.shape:
            return self._encoded(mx.concatenate([keys, values], axis=1))  # [rows, 2 * heads, ...]
        return (*self._encoded(keys), *self._encoded(values))

    def decode(self, arrays: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """Decode to vectors in their original dtype."""
        if len(arrays) > _SHARED:
            return (
                self._decoded(arrays[0], arrays[1], widths.keys, widths.dtype),
                self._decoded(arrays[2], arrays[3], widths.values, widths.dtype),
            )
        both = self._decoded(arrays[0], arrays[1], widths.keys, widths.dtype)
        keys, values = mx.split(both, 2, axis=1)
        return keys, values

    def unpack(self, arrays: Sequence[mx.array], widths: KvWidths, width: int) -> UnpackedKv | None:
        """Unpack if keys and values share arrays, a vector has one scale, and words are full."""
        words, parameters = arrays[0], arrays[1]
        is_shared = len(arrays) == _SHARED and parameters.shape[-1] == 1
        if not is_shared or not self._fills_words(widths.keys):
            return None
        heads = words.shape[1] // 2
        parts = self._parts(words)
        along = parameters[:, :, :width].swapaxes(
            -1, -2
        )  # [rows, heads of all parameters, 1, width]
        # Scales of keys, of values; then offsets of both, where there are any.
        split = [*mx.split(along, 2 * self.parameter_count, axis=1), None, None]
        return UnpackedKv(
            UnpackedVectors(tuple(part[:, :heads, :width] for part in parts), split[0], split[2]),
            UnpackedVectors(tuple(part[:, heads:, :width] for part in parts), split[1], split[3]),
        )

    @abstractmethod
    def _encoded(self, vectors: mx.array) -> tuple[mx.array, mx.array]:
        """Encode vectors [rows, heads, tokens, width] as words and parameters."""

    @abstractmethod
    def _decoded(
        self, words: mx.array, parameters: mx.array, width: int, dtype: mx.Dtype
    ) -> mx.array:
        """Invert :meth:`_encoded`, exactly or nearly."""

    @abstractmethod
    def _fills_words(self, width: int) -> bool:
        """Return True if vectors leave no bits of their words empty."""

    @abstractmethod
    def _parts(self, words: mx.array) -> tuple[mx.array, ...]:
        """Turn words into float32 parts; see :class:`UnpackedVectors`."""
