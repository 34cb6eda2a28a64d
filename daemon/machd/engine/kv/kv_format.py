"""What a format of keys and values is: arrays, arrays whose third axis is the position.

Whoever stores arrays need not know what they mean: a slab, a prompt's cache and a block all keep
them as they come, copy them and cut them between positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

_SHARED = 2
"""Arrays of keys and values that share them."""


@dataclass(frozen=True, slots=True)
class KvWidths:
    """What arrays do not tell of the keys and values that they were made of.

    Attributes:
        keys: Numbers in a key.
        values: Numbers in a value; 0 where a layer keeps none.
        dtype: Of both.
    """

    keys: int
    values: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> KvWidths:
        """Those of keys and values [rows, heads, tokens, n]."""
        return cls(keys.shape[-1], values.shape[-1], keys.dtype)


@dataclass(frozen=True, slots=True)
class FoldedVectors:
    """Keys or values as sums of products: a vector is ``scale * parts + offset``.

    Attributes:
        parts: float32 [rows, heads, width, n] each; what they stand for
            :meth:`KvFormat.split_queries` and :meth:`KvFormat.join_outputs` know.
        scales: [rows, heads, 1, width].
        offsets: The same, added to every number of a vector; None for none.
    """

    parts: tuple[mx.array, ...]
    scales: mx.array
    offsets: mx.array | None


@dataclass(frozen=True, slots=True)
class FoldedKv:
    """Keys and values that attention can be computed of without decoding them."""

    keys: FoldedVectors
    values: FoldedVectors


class KvFormat(Protocol):
    """Makes arrays of keys and values."""

    @property
    def name(self) -> str:
        """As ``cache.kv_quantization`` spells it."""
        ...

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Keys and values [rows, heads, tokens, head_dim] as arrays [rows, ., tokens, .].

        What a position's columns hold depends on nothing but its key and its value.
        """
        ...

    def decode(self, arrays: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """What :meth:`encode` was given, or what comes near it."""
        ...

    def fold(self, arrays: Sequence[mx.array], widths: KvWidths, width: int) -> FoldedKv | None:
        """For the attention of :mod:`machd.engine.kernels.cpu_attention`; None where that has to decode.

        Args:
            arrays: Of ``width`` columns or more.
            widths: Of the vectors.
            width: Columns that are looked at.
        """
        ...

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """Queries [..., head_dim] that meet the parts of folded keys."""
        ...

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """Of sums over the parts of folded values [..., n] the one over the values [..., head_dim]."""
        ...


class PlainFormat:
    """Keys and values as the model computes them: an array each."""

    name = "none"

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Both as they are."""
        return keys, values

    def decode(self, arrays: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """Both as they are."""
        del widths
        keys, values = arrays
        return keys, values

    def fold(self, arrays: Sequence[mx.array], widths: KvWidths, width: int) -> None:
        """There is nothing to decode."""

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """As they are."""
        return (queries,)

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """The only part."""
        return parts[0]


class VectorFormat(ABC):
    """A format that encodes every vector by itself, keys and values alike.

    A vector becomes words and parameters, an array each. Keys and values of one shape share the two:
    the heads of the values come behind those of the keys, and every parameter has the heads of both.
    Otherwise there are four arrays.
    """

    parameter_count: int
    """Parameters of a vector, or of each of its groups."""

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Two arrays, or four where keys and values differ in shape."""
        if keys.shape == values.shape:
            return self._encoded(mx.concatenate([keys, values], axis=1))
        return (*self._encoded(keys), *self._encoded(values))

    def decode(self, arrays: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """The vectors in the dtype that they had."""
        if len(arrays) > _SHARED:
            return (
                self._decoded(arrays[0], arrays[1], widths.keys, widths.dtype),
                self._decoded(arrays[2], arrays[3], widths.values, widths.dtype),
            )
        both = self._decoded(arrays[0], arrays[1], widths.keys, widths.dtype)
        keys, values = mx.split(both, 2, axis=1)
        return keys, values

    def fold(self, arrays: Sequence[mx.array], widths: KvWidths, width: int) -> FoldedKv | None:
        """Where keys and values share arrays, a vector has one scale, and words are full."""
        words, parameters = arrays[0], arrays[1]
        is_shared = len(arrays) == _SHARED and parameters.shape[-1] == 1
        if not is_shared or not self._fills_words(widths.keys):
            return None
        heads = words.shape[1] // 2
        parts = self._parts(words)
        along = parameters[:, :, :width].swapaxes(-1, -2)
        # Of keys, of values; where there are offsets, of both again.
        split = [*mx.split(along, 2 * self.parameter_count, axis=1), None, None]
        return FoldedKv(
            FoldedVectors(tuple(part[:, :heads, :width] for part in parts), split[0], split[2]),
            FoldedVectors(tuple(part[:, heads:, :width] for part in parts), split[1], split[3]),
        )

    @abstractmethod
    def _encoded(self, vectors: mx.array) -> tuple[mx.array, mx.array]:
        """Words and parameters."""

    @abstractmethod
    def _decoded(
        self, words: mx.array, parameters: mx.array, width: int, dtype: mx.Dtype
    ) -> mx.array:
        """Vectors of a width, of what :meth:`_encoded` gave."""

    @abstractmethod
    def _fills_words(self, width: int) -> bool:
        """Whether vectors leave nothing of their words empty."""

    @abstractmethod
    def _parts(self, words: mx.array) -> tuple[mx.array, ...]:
        """Words as floats; see :class:`FoldedVectors`."""
