"""One row's forward passes: prefill in chunks, then decode one step ahead of the reader.

The row computes alone, at batch width 1. While the caller looks at token ``k``, the model is
already at work on token ``k + 1``: the next step is dispatched from the device's own copy of the
token, before anyone has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from machd.engine.protocol import PrefillChunk, SampledToken
from machd.engine.sampling import RowSampling, Sampler, Selection

__all__ = ["Forward", "RowDecoder", "RowFailure"]

Forward = Callable[[mx.array, list[Any]], mx.array]
"""Token ids int32 [1, n] and the row's caches to logits [1, n, vocabulary]."""


class RowFailure(Exception):  # noqa: N818 - it never leaves the engine, which reports a RowFault
    """What one row asked for failed; the forward pass, and so every other row, is sound."""


_HEAD_TOKENS = 16
"""Prompt tokens that go through the output head with the last one.

The head is 49,152 columns wide for the embedded model: running it over a whole chunk would cost as
much as several layers, and only the last position's logits are read. Splitting off few tokens
keeps the second pass short, yet wide enough to use the matrix units.
"""


class RowDecoder:
    """One sequence's caches, sampler and the step in flight. Lives on the engine thread."""

    def __init__(
        self, forward: Forward, caches: list[Any], chunk: PrefillChunk, vocabulary_tokens: int
    ) -> None:
        """Open a row for the prompt that ``chunk`` begins."""
        assert chunk.start == 0, "the first chunk opens the row"
        self._forward = forward
        self._caches = caches
        self._slot_index = chunk.slot_index
        self._vocabulary_tokens = vocabulary_tokens
        self._params = chunk.sampling
        self._prompt: list[int] = []
        self._sampler: Sampler | None = None
        self._last: mx.array | None = None
        self._in_flight: Selection | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes that the row's caches hold."""
        return sum(cache.nbytes for cache in self._caches)

    def prefill(self, chunk: PrefillChunk) -> SampledToken | None:
        """Compute a chunk; the last one yields the first token, and waits for it."""
        assert chunk.start == len(self._prompt), "chunks come in order, without gaps"
        self._prompt.extend(chunk.token_ids)
        if not chunk.is_last:
            self._fill(chunk.token_ids)
            return None
        head = chunk.token_ids[-_HEAD_TOKENS:]
        if len(head) < len(chunk.token_ids):
            self._fill(chunk.token_ids[: -len(head)])
        self._sampler = self._make_sampler()
        selection = self._step(_row(head))
        mx.eval(selection.arrays)
        return self._read(selection)

    def decode(self, *, has_next: bool) -> SampledToken:
        """The next token; with ``has_next`` the one after it is on its way when this returns."""
        selection = self._in_flight or self._dispatch()
        self._in_flight = self._dispatch() if has_next else None
        return self._read(selection)

    def _fill(self, token_ids: Sequence[int]) -> None:
        """Run tokens for their keys and values alone; the head is never computed."""
        self._forward(_row(token_ids), self._caches)
        mx.eval([cache.state for cache in self._caches])

    def _dispatch(self) -> Selection:
        assert self._last is not None, "decode follows a whole prefill"
        selection = self._step(self._last[None])
        mx.async_eval(selection.arrays)
        return selection

    def _step(self, token_ids: mx.array) -> Selection:
        assert self._sampler is not None, "decode follows a whole prefill"
        logits = self._forward(token_ids, self._caches)[:, -1, :]
        try:
            selection = self._sampler.sample(logits)
        except Exception as cause:
            raise RowFailure from cause
        self._last = selection.token_ids
        return selection

    def _make_sampler(self) -> Sampler:
        try:
            row = RowSampling.for_prompt(self._params, self._prompt, self._vocabulary_tokens)
            return Sampler([row], self._vocabulary_tokens)
        except Exception as cause:
            raise RowFailure from cause

    def _read(self, selection: Selection) -> SampledToken:
        tokens, poisoned = selection.read([self._slot_index], [self._params])
        if poisoned:
            raise RowFailure from FloatingPointError("the row's logits are not numbers")
        return tokens[0]


def _row(token_ids: Sequence[int]) -> mx.array:
    return mx.array([list(token_ids)], dtype=mx.int32)
