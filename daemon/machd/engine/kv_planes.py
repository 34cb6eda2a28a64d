"""What a format of keys and values is: planes, arrays whose third axis is the position.

Whoever stores planes need not know what they mean: a slab, a prompt's cache and a block all keep
them as they come, copy them and cut them between positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

__all__ = ["FoldedKv", "KvFormat", "KvWidths", "PlainFormat", "Vectors", "VectorsFormat"]


@dataclass(frozen=True, slots=True)
class KvWidths:
    """What planes do not tell of the keys and values that they were made of.

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
class Vectors:
    """Keys or values as sums of products: a vector is ``scales * parts + offsets``.

    Attributes:
        parts: float32 [rows, heads, columns, n] each; what they stand for
            :meth:`KvFormat.split_queries` and :meth:`KvFormat.join_outputs` know.
        scales: [rows, heads, columns, 1].
        offsets: The same, added to every number of a vector; None for none.
    """

    parts: tuple[mx.array, ...]
    scales: mx.array
    offsets: mx.array | None


@dataclass(frozen=True, slots=True)
class FoldedKv:
    """Keys and values that attention can be computed of without decoding them."""

    keys: Vectors
    values: Vectors


class KvFormat(Protocol):
    """Makes planes of keys and values."""

    @property
    def name(self) -> str:
        """As ``cache.kv_quantization`` spells it."""
        ...

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Keys and values [rows, heads, tokens, head_dim] as planes [rows, ., tokens, .].

        What a position's columns hold depends on nothing but its key and its value.
        """
        ...

    def decode(self, planes: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """What :meth:`encode` was given, or what comes near it."""
        ...

    def fold(self, planes: Sequence[mx.array], widths: KvWidths) -> FoldedKv | None:
        """For the attention of :mod:`machd.engine.cpu_attention`; None where that has to decode."""
        ...

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """Queries [..., head_dim] that meet the parts of folded keys."""
        ...

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """Of sums over the parts of folded values [..., n] the one over the values [..., head_dim]."""
        ...


class PlainFormat:
    """Keys and values as the model computes them: a plane each."""

    name = "none"

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Both as they are."""
        return keys, values

    def decode(self, planes: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """Both as they are."""
        del widths
        keys, values = planes
        return keys, values

    def fold(self, planes: Sequence[mx.array], widths: KvWidths) -> None:
        """There is nothing to decode."""

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """As they are."""
        return (queries,)

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """The only part."""
        return parts[0]


class VectorsFormat:
    """A format that encodes every vector by itself, of what kind it may be.

    Keys and values of one shape are encoded together, the values' heads behind the keys': half as
    many arrays to write and to read.
    """

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Two planes of both together, or two of each."""
        if keys.shape == values.shape:
            return self._encoded(mx.concatenate([keys, values], axis=1))
        return (*self._encoded(keys), *self._encoded(values))

    def decode(self, planes: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """The vectors in the dtype that they had."""
        if len(planes) > self.plane_count:
            keys, values = planes[: self.plane_count], planes[self.plane_count :]
            return (
                self._decoded(keys, widths.keys, widths.dtype),
                self._decoded(values, widths.values, widths.dtype),
            )
        both = self._decoded(planes, widths.keys, widths.dtype)
        heads = both.shape[1] // 2
        return both[:, :heads], both[:, heads:]

    def fold(self, planes: Sequence[mx.array], widths: KvWidths) -> FoldedKv | None:
        """Only of keys and values that were encoded together."""
        if len(planes) > self.plane_count:
            return None
        both = self._folded(planes, widths.keys)
        if both is None:
            return None
        heads = both.scales.shape[1] // 2
        return FoldedKv(_of_heads(both, slice(heads)), _of_heads(both, slice(heads, None)))

    plane_count = 2
    """Planes of vectors of one kind."""

    def _encoded(self, vectors: mx.array) -> tuple[mx.array, ...]:
        raise NotImplementedError

    def _decoded(self, planes: Sequence[mx.array], width: int, dtype: mx.Dtype) -> mx.array:
        raise NotImplementedError

    def _folded(self, planes: Sequence[mx.array], width: int) -> Vectors | None:
        raise NotImplementedError


def _of_heads(vectors: Vectors, heads: slice) -> Vectors:
    offsets = vectors.offsets
    return Vectors(
        tuple(part[:, heads] for part in vectors.parts),
        vectors.scales[:, heads],
        None if offsets is None else offsets[:, heads],
    )
