"""One pass for the next token of every row and a chunk of another row's prompt.

On the CPU a step of a few tokens takes as long as reading the weights. A chunk in a pass of its own
reads them again; in the pass of the running rows it costs only its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kernels.cpu_attention import attend, attend_rows
from machd.engine.kv.slab import SlabCache


class MixedCache:
    """One layer's slab of the decoding rows, with the cache of the chunk's prompt.

    To the model all tokens are rows of one token. Only attention tells them apart, so it has to be one
    of :mod:`machd.engine.kernels.fused_llama`, which calls :meth:`attend`.
    """

    def __init__(self, slab: SlabCache, prompt: Cache, positions: mx.array) -> None:
        """Borrow both.

        Args:
            slab: Holds the decoding rows, opened for a step of one token.
            prompt: Holds the prompt so far: mlx-lm's standard cache or one in the slab's format.
            positions: int32 [rows + tokens], the position of each of the pass's tokens in its row.
        """
        self._slab = slab
        self._prompt = prompt
        self.offset = positions

    def make_mask(self, *_: object, **__: object) -> None:
        """Return None: no mask fits all rows; see :meth:`attend`."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float
    ) -> mx.array:
        """Write the pass's keys and values, and attend each token to its own row.

        Args:
            queries: [rows + tokens, heads, 1, head_dim], rotated.
            keys: [rows + tokens, kv_heads, 1, head_dim], rotated.
            values: The same, with a head_dim of its own.
            scale: Of the scores.

        Returns:
            [rows + tokens, heads, 1, head_dim of the values].
        """
        rows = self._slab.rows
        decoded = attend_rows(queries[:rows], keys[:rows], values[:rows], self._slab, scale=scale)
        seen = self._prompt.update_and_fetch(_as_tokens(keys[rows:]), _as_tokens(values[rows:]))
        filled = attend(_as_tokens(queries[rows:]), *seen, scale=scale, mask="causal")
        return mx.concatenate([decoded, _as_tokens(filled)])


def mixed_caches(
    slabs: Sequence[SlabCache], prompt: Sequence[Cache], tokens: int
) -> list[MixedCache]:
    """Make one cache a layer for a pass of all rows and so many prompt tokens."""
    start = prompt[0].offset
    chunk = mx.arange(start, start + tokens, dtype=mx.int32)
    # One array for all layers, so that angles are computed from it once.
    positions = mx.concatenate([slabs[0].offset, chunk])
    return [MixedCache(slab, one, positions) for slab, one in zip(slabs, prompt, strict=True)]


def _as_tokens(rows: mx.array) -> mx.array:
    """Turn [n, heads, 1, head_dim] into [1, heads, n, head_dim], or the other way round."""
    return rows.transpose(2, 1, 0, 3)
