"""The masks of a batch, filled in one call.

llguidance writes a bit a token, all rows in parallel and without Python's lock. Plain MLX operations
unpack the bits: llguidance's own kernel is for Metal alone, and bits are an eighth of the bytes of a
mask on their way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher

from machd.clock import Clock
from machd.engine.grammar.matcher import SLOW_MASK_S, WORD_BITS, Matcher

_Words: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint32]]


class TokenMasks:
    """Masks for logits of one width. Lives on the engine thread."""

    def __init__(self, vocabulary_tokens: int, clock: Clock) -> None:
        self._clock = clock
        self._times_each_row = False
        self._vocabulary_tokens = vocabulary_tokens
        self._words = -(-vocabulary_tokens // WORD_BITS)
        self._bits = mx.array([1 << bit for bit in range(WORD_BITS)], dtype=mx.uint32)
        self._executor = LLExecutor()
        self._buffer = np.zeros((0, self._words), dtype=np.uint32)

    def fill(self, matchers: Sequence[Matcher]) -> mx.array:
        """Make the masks of rows that need one, of one row at least: bool [matchers, vocabulary_tokens].

        Raises:
            GrammarError: One row's grammar has become too complex, or has held up the batch for too
                long. Fill the masks one by one to find the row.
        """
        words = mx.array(self._fill(matchers))  # [matchers, words]
        mask = (words[:, :, None] & self._bits) != 0  # [matchers, words, 32]
        return mask.reshape(len(matchers), -1)[:, : self._vocabulary_tokens]

    def _fill(self, matchers: Sequence[Matcher]) -> _Words:
        if len(self._buffer) < len(matchers):
            self._buffer = np.zeros((len(matchers), self._words), dtype=np.uint32)
        words = self._buffer[: len(matchers)]
        words.fill(0)
        before_s = self._clock.monotonic_s()
        if self._times_each_row:
            for matcher, row in zip(matchers, words, strict=True):
                matcher.write_mask(row)
        else:
            asked = [
                (one.llmatcher, row)
                for row, one in enumerate(matchers)
                if one.is_masked_by_grammar and isinstance(one.llmatcher, LLMatcher)
            ]
            if asked:
                row_bytes = self._words * words.itemsize
                self._executor.unsafe_compute_mask_ptr(
                    asked, words.ctypes.data, row_bytes, len(matchers)
                )
            for matcher, row in zip(matchers, words, strict=True):
                if matcher.is_separate:
                    matcher.write_mask(row)
                else:
                    matcher.complete_mask(row)
        # Only masks that are written one by one tell which row is slow.
        self._times_each_row = self._clock.monotonic_s() - before_s > SLOW_MASK_S
        return words
