"""Rows that read given texts, in passes with rejected drafts behind them, beside plain rows.

What comes next is given, so whatever a row kept of a rejected draft shows in its log-probabilities, and
in those of all tokens behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.lane_kv import LaneKv, PrefilledRow
from machd.engine.kv.row_caches import make_row_caches
from machd.engine.kv.serial_lane import SerialLaneKv
from machd_probes.scripts import random_prompt

LANES = ("alone", "batch")
_ROOM_TOKENS = 16


def make_caches(lane: str) -> LaneKv:
    """Make the KV of a row alone, or of a batch."""
    return SerialLaneKv() if lane == "alone" else BatchLaneKv(8)


@dataclass(frozen=True)
class Text:
    """A row's text: its prompt, and the tokens after it, which are given one by one."""

    seed: int
    prompt_tokens: int
    tokens: int = 160
    vocabulary_tokens: int = 128

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return random_prompt(self.tokens, self.seed, self.vocabulary_tokens)


@dataclass
class _Reading:
    """A text that is read token by token, as far as it was asked for."""

    caches: list[Cache]
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass
class PlainTexts:
    """A model, and what it says of texts that it reads token by token, each token once."""

    model: LanguageModel
    kv_format: KvFormat = PLAIN
    _known: dict[Text, _Reading] = field(default_factory=dict)

    def expected(self, text: Text, start: int, count: int) -> NDArray[np.float32]:
        """Log-probabilities [tokens, vocabulary] after ``count`` tokens, the first of them ``start`` behind the prompt."""
        if text not in self._known:
            self._known[text] = _Reading(self.prefilled(text))
        reading = self._known[text]
        following = text.token_ids[text.prompt_tokens :]
        for token_id in following[len(reading.logprobs) : start + count]:
            reading.logprobs.append(self.logprobs([[token_id]], reading.caches)[0, 0])
        return np.stack(reading.logprobs[start : start + count])

    def prefilled(self, text: Text) -> list[Cache]:
        """Caches with the text's prompt."""
        caches = make_row_caches(self.model, self.kv_format)
        if text.prompt_tokens:
            self.logprobs([text.token_ids[: text.prompt_tokens]], caches)
        return caches

    def logprobs(
        self, token_ids: Sequence[Sequence[int]], caches: list[Cache]
    ) -> NDArray[np.float32]:
        """Log-probabilities [rows, tokens, vocabulary] after each token."""
        output = self.model(mx.array([*map(list, token_ids)], dtype=mx.int32), cache=caches)
        logits = getattr(output, "logits", output).astype(mx.float32)
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@dataclass
class _Row:
    text: Text
    length: int


class DraftedRows:
    """Rows in the caches under test."""

    def __init__(self, plain: PlainTexts, caches: LaneKv, seed: int = 0) -> None:
        """Begin without rows."""
        self.plain = plain
        self.caches = caches
        self.rows: list[_Row] = []
        self.worst = 0.0
        """The largest difference of a log-probability so far, in nats."""
        self.was_done: list[bool] = []
        """The results of ``roll_back``."""
        self._random = np.random.default_rng(seed)

    def join(self, text: Text) -> None:
        """A row with its prompt."""
        self.caches.join(
            PrefilledRow(
                self.plain.prefilled(text),
                length=text.prompt_tokens,
                limit=text.tokens + _ROOM_TOKENS,
                last_token_id=text.token_ids[text.prompt_tokens],
            )
        )
        self.rows.append(_Row(text, text.prompt_tokens))

    def keep(self, *order: int) -> None:
        """Rows that stay."""
        self.rows = [self.rows[row] for row in order]
        if order:
            self.caches.select(order)
        else:
            self.caches.clear()

    def steps(self, count: int) -> None:
        """Steps of one token each."""
        for _ in range(count):
            self._pass([1] * len(self.rows), [0] * len(self.rows))

    def draft(self, right: Sequence[int], wrong: Sequence[int]) -> None:
        """Run a pass with so many accepted and rejected drafts of each row, and roll the latter back."""
        self.caches.checkpoint()
        kept = [1 + count for count in right]
        before = [row.length for row in self.rows]
        self._pass(kept, wrong)
        is_done = self.caches.roll_back(wrong)
        self.was_done.append(is_done)
        if not is_done:
            for row, length in zip(self.rows, before, strict=True):
                row.length = length
            self._pass(kept, [0] * len(self.rows))

    def draft_in_vain(self, tokens: Sequence[int]) -> None:
        """Run a pass of rejected drafts only, and roll all of them back."""
        self.caches.checkpoint()
        self._pass([0] * len(self.rows), tokens)
        assert self.caches.roll_back(tokens)

    def _pass(self, kept: Sequence[int], wrong: Sequence[int]) -> None:
        """Read on, and compare; wrong tokens stand behind those of the text."""
        lengths = [one + other for one, other in zip(kept, wrong, strict=True)]
        longest = max(lengths)
        tokens = []
        for row, count, extra in zip(self.rows, kept, wrong, strict=True):
            own = row.text.token_ids[row.length : row.length + count]
            assert len(own) == count, "the text is long enough"
            garbage = self._random.integers(1, row.text.vocabulary_tokens, extra).tolist()
            tokens.append([*own, *garbage, *[0] * (longest - count - extra)])
        self.caches.begin_pass(lengths if longest > 1 else None)
        said = self.plain.logprobs(tokens, self.caches.caches)
        self.caches.end_pass()
        for row, count, own in zip(self.rows, kept, said, strict=True):
            if count:
                start = row.length - row.text.prompt_tokens
                self._compare(self.plain.expected(row.text, start, count), own[:count])
            row.length += count

    def _compare(self, expected: NDArray[np.float32], said: NDArray[np.float32]) -> None:
        # What a model rules out is at minus infinity in both.
        both = expected == said
        apart = np.abs(np.where(both, 0.0, expected) - np.where(both, 0.0, said))
        self.worst = float(max(self.worst, np.max(np.where(np.isnan(apart), np.inf, apart))))
