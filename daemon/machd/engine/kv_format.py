"""How keys and values are kept: as they are, or in fewer bits.

A format turns what a layer computes into planes, arrays whose third axis is the position, and back.
Whoever stores planes need not know what they mean: a slab, a prompt's cache and a block all keep
them as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

__all__ = ["PLAIN", "KvFormat", "PlainFormat", "kv_format_named"]


class KvFormat(Protocol):
    """Makes planes of keys or of values."""

    @property
    def name(self) -> str:
        """As ``cache.kv_quantization`` spells it."""
        ...

    def encode(self, array: mx.array) -> tuple[mx.array, ...]:
        """Keys or values [rows, heads, tokens, head_dim] as planes [rows, heads, tokens, n]."""
        ...

    def decode(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """What :meth:`encode` was given, or what comes near it."""
        ...


class PlainFormat:
    """Keys and values as the model computes them: one plane."""

    name = "none"

    def encode(self, array: mx.array) -> tuple[mx.array, ...]:
        """The array itself."""
        return (array,)

    def decode(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The array itself."""
        del dtype
        return planes[0]


PLAIN = PlainFormat()


def kv_format_named(name: str) -> KvFormat:
    """The format of a value of ``cache.kv_quantization``."""
    assert name == "none", "no other format exists yet"
    return PLAIN
