"""What a format of keys and values is: planes, arrays whose third axis is the position.

Whoever stores planes need not know what they mean: a slab, a prompt's cache and a block all keep
them as they come, copy them and cut them between positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

__all__ = ["FoldedKv", "FoldedVectors", "KvFormat", "KvWidths", "PlainFormat", "VectorsFormat"]


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
class FoldedVectors:
    """Keys or values as sums of products: a vector is ``scales * parts + offsets``.

    Attributes:
        words: [rows, heads, columns, n], what :meth:`KvFormat.parts` makes the parts of.
        scales: [rows, heads, columns, 1].
        offsets: The same, added to every number of a vector; None for none.
    """

    words: mx.array
    scales: mx.array
    offsets: mx.array | None


@dataclass(frozen=True, slots=True)
class FoldedKv:
    """Keys and values that attention can be computed of without decoding them."""

    keys: FoldedVectors
    values: FoldedVectors


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

    def parts(self, words: mx.array) -> tuple[mx.array, ...]:
        """Of words of folded vectors, float32 [rows, heads, columns, n] each."""
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

    def parts(self, words: mx.array) -> tuple[mx.array, ...]:
        """Themselves."""
        return (words,)

    def split_queries(self, queries: mx.array) -> tuple[mx.array, ...]:
        """As they are."""
        return (queries,)

    def join_outputs(self, parts: Sequence[mx.array]) -> mx.array:
        """The only part."""
        return parts[0]


class VectorsFormat:
    """A format that encodes every vector by itself, keys and values alike.

    A vector becomes words and parameters. Words have planes of their own, first those of keys, then
    those of values. Parameters of keys and values of one shape share a plane: [rows, heads, columns,
    n], where each parameter has the heads of keys and then those of values. Otherwise they are two.
    """

    parameter_count: int
    """Parameters of a vector, or of each of its groups."""

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Three planes, or four where keys and values differ in shape."""
        if keys.shape == values.shape:
            heads = keys.shape[1]
            words, parameters = self._encoded(mx.concatenate([keys, values], axis=1))
            return words[:, :heads], words[:, heads:], parameters
        key_words, key_parameters = self._encoded(keys)
        value_words, value_parameters = self._encoded(values)
        return key_words, value_words, key_parameters, value_parameters

    def decode(self, planes: Sequence[mx.array], widths: KvWidths) -> tuple[mx.array, mx.array]:
        """The vectors in the dtype that they had."""
        key_parameters, value_parameters = self._parameters(planes)
        return (
            self._decoded(planes[0], key_parameters, widths.keys, widths.dtype),
            self._decoded(planes[1], value_parameters, widths.values, widths.dtype),
        )

    def fold(self, planes: Sequence[mx.array], widths: KvWidths) -> FoldedKv | None:
        """Where a vector has one scale and its words are nothing but its numbers."""
        key_parameters, value_parameters = self._parameters(planes)
        keys = self._folded(planes[0], key_parameters, widths.keys)
        values = self._folded(planes[1], value_parameters, widths.values)
        return None if keys is None or values is None else FoldedKv(keys, values)

    def _parameters(self, planes: Sequence[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
        """The parameters of keys and those of values, [rows, heads, columns, n] each."""
        words, _, *parameters = planes
        first, last = (mx.split(one, self.parameter_count, axis=1) for one in _ends(parameters))
        if len(parameters) > 1:
            return first, last
        heads = words.shape[1]
        return [one[:, :heads] for one in first], [one[:, heads:] for one in last]

    def _encoded(self, vectors: mx.array) -> tuple[mx.array, mx.array]:
        """Words and parameters."""
        raise NotImplementedError

    def _decoded(
        self, words: mx.array, parameters: Sequence[mx.array], width: int, dtype: mx.Dtype
    ) -> mx.array:
        raise NotImplementedError

    def _folded(
        self, words: mx.array, parameters: Sequence[mx.array], width: int
    ) -> FoldedVectors | None:
        raise NotImplementedError


def _ends(arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    return arrays[0], arrays[-1]
