"""Which tokens the constrained rows of a batch may take next: one call fills all masks.

llguidance writes a bit a token, all rows in parallel and without Python's lock. The bits become a
mask with plain MLX operations: its own kernel is for Metal alone, and this way a thirty-second of
the bytes travels to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor

from machd.clock import Clock
from machd.engine.grammar.matcher import SLOW_MASK_S, Matcher

_WORD_BITS = 32

_Words: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint32]]


class TokenMasks:
    """Masks for logits of one width. Lives on the engine thread."""

    def __init__(self, vocabulary_tokens: int, clock: Clock) -> None:
        """Make room for none yet.

        Args:
            vocabulary_tokens: Width of the logits.
            clock: Reads time.
        """
        self._clock = clock
        self._looks_closer = False
        self._vocabulary_tokens = vocabulary_tokens
        self._words = -(-vocabulary_tokens // _WORD_BITS)
        self._bits = mx.array([1 << bit for bit in range(_WORD_BITS)], dtype=mx.uint32)
        self._executor = LLExecutor()
        self._buffer = np.zeros((0, self._words), dtype=np.uint32)

    def fill(self, matchers: Sequence[Matcher]) -> mx.array:
        """What each matcher allows.

        Args:
            matchers: Of rows that need a mask, at least one.

        Returns:
            bool [matchers, vocabulary_tokens].

        Raises:
            GrammarError: One row's grammar has become too complex; which, ``matcher.check`` tells.
        """
        words = self._fill(matchers)
        array = mx.array(words)
        mask = (array[:, :, None] & self._bits) != 0
        return mask.reshape(len(matchers), -1)[:, : self._vocabulary_tokens]

    def _fill(self, matchers: Sequence[Matcher]) -> _Words:
        if len(self._buffer) < len(matchers):
            self._buffer = np.zeros((len(matchers), self._words), dtype=np.uint32)
        words = self._buffer[: len(matchers)]
        words.fill(0)
        before_s = self._clock.monotonic_s()
        self._ask_matchers(matchers, words)
        # Whose fault it was shows when masks are made one by one.
        self._looks_closer = self._clock.monotonic_s() - before_s > SLOW_MASK_S
        for matcher, row in zip(matchers, words, strict=True):
            matcher.check()
            if not matcher.masks_by_matcher:
                row[:] = ~np.uint32(0)
                for token_id in matcher.eos_token_ids:
                    row[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
            elif matcher.also_allowed is not None:
                token_id = matcher.also_allowed
                row[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)
        return words

    def _ask_matchers(self, matchers: Sequence[Matcher], words: _Words) -> None:
        row_bytes = self._words * words.itemsize
        asked = [
            (matcher.llmatcher, row)
            for row, matcher in enumerate(matchers)
            if matcher.masks_by_matcher and matcher.llmatcher is not None
        ]
        if self._looks_closer:
            for _, row in asked:
                matchers[row].fill_mask(words[row].ctypes.data, row_bytes)
        elif asked:
            self._executor.unsafe_compute_mask_ptr(
                asked, words.ctypes.data, row_bytes, len(matchers)
            )
