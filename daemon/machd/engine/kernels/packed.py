"""One pass for the next token of every row and for tokens of several prompts.

On the CPU a step of a few tokens takes as long as reading the weights. A chunk in a pass of its own
reads them again; in the pass of the running rows it costs only its tokens. Prompts that come together are
computed behind one another, without padding, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.layers.slab import SlabKv

Attend: TypeAlias = Callable[..., mx.array]
"""Attention as :func:`machd.engine.kernels.cpu_attention.attend`, or as ``attend_rows`` there."""


class PackedPrompt(NamedTuple):
    """One layer's cache of a prompt in the pass, which computes ``tokens`` more behind its ``start``, int32 [1]."""

    cache: Cache
    tokens: int
    start: mx.array


class PackedCache:
    """One layer's slabs of the decoding rows, with the caches of the prompts.

    To the model all tokens are rows of one token. Only attention tells them apart, so it has to be one
    of :mod:`machd.engine.kernels.fused_llama`, which calls :meth:`attend`.
    """

    def __init__(
        self, rows: SlabKv | None, prompts: Sequence[PackedPrompt], positions: mx.array
    ) -> None:
        """Borrow the decoding rows, if any, the prompts behind them, and the position of each of the pass's tokens in its row."""
        self.rows = rows
        self.prompts = prompts
        self.offset = positions

    @property
    def width(self) -> int:
        """Positions of the longest row, those of the running pass included."""
        ends: list[int] = [one.cache.offset + one.tokens for one in self.prompts]
        return max(ends if self.rows is None else [self.rows.width, *ends])

    def make_mask(self, *_: object, **__: object) -> None:
        """Return None: no mask fits all rows; see :meth:`attend`."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        attend: Attend,
        attend_rows: Attend,
    ) -> mx.array:
        """Write the pass's keys and values, and attend each token to its own row.

        Queries, and what is returned, are [rows + tokens, heads, 1, n]; keys and values have kv_heads.
        """
        parts, begin = [], 0
        if self.rows is not None:
            begin = self.rows.rows
            asking, own_keys, own_values = (each[:begin] for each in (queries, keys, values))
            parts.append(attend_rows(asking, own_keys, own_values, self.rows, scale=scale))
        for prompt in self.prompts:
            own = slice(begin, begin + prompt.tokens)
            seen = prompt.cache.update_and_fetch(_as_tokens(keys[own]), _as_tokens(values[own]))
            asking = _as_tokens(queries[own])
            filled = attend(asking, *seen, scale=scale, mask="causal")
            parts.append(_as_tokens(filled))
            begin += prompt.tokens
        return mx.concatenate(parts)


def attend_cached(
    heads: tuple[mx.array, mx.array, mx.array],
    cache: Cache,
    mask: mx.array | str | None,
    *,
    scale: float,
    attend: Attend,
    attend_rows: Attend,
) -> mx.array:
    """Attend with a pass's queries, keys and values, and the cache that the layer was called with, if any."""
    queries, keys, values = heads
    if isinstance(cache, PackedCache):
        return cache.attend(
            queries, keys, values, scale=scale, attend=attend, attend_rows=attend_rows
        )
    if isinstance(cache, SlabKv):
        return attend_rows(queries, keys, values, cache, scale=scale, mask=mask)
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    return attend(queries, keys, values, scale=scale, mask=mask)


def packed_caches(
    rows: Sequence[SlabKv], prompts: Sequence[tuple[Sequence[Cache], int]]
) -> list[PackedCache]:
    """Make one cache a layer for a pass of all rows, perhaps none, and of so many tokens of each prompt."""
    starts = [mx.array([caches[0].offset], dtype=mx.int32) for caches, _ in prompts]
    chunks = [
        start + mx.arange(tokens, dtype=mx.int32)
        for start, (_, tokens) in zip(starts, prompts, strict=True)
    ]
    # Arrays for all layers, so that what is computed from them is computed once.
    positions = mx.concatenate([rows[0].offset, *chunks] if rows else chunks)
    return [
        PackedCache(
            rows[layer] if rows else None,
            [
                PackedPrompt(caches[layer], tokens, start)
                for (caches, tokens), start in zip(prompts, starts, strict=True)
            ],
            positions,
        )
        for layer in range(len(prompts[0][0]))
    ]


def _as_tokens(rows: mx.array) -> mx.array:
    """Turn [n, heads, 1, head_dim] into [1, heads, n, head_dim], or the other way round."""
    return rows.transpose(2, 1, 0, 3)
