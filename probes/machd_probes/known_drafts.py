"""Draft tokens for rows whose answers are known: right at most positions, always verified."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from machd.engine.protocol.step import ProposerKind
from machd.engine.step.ports import RowProposer
from machd.request.generation import SamplingParams

_RIGHT_OF_TEN = 7


class KnownDrafts:
    """A proposer that knows the answers; a hash of the position decides where it is wrong."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocabulary_tokens: int
    ) -> None:
        """Take the answer to each prompt."""
        self._answers = answers
        self._vocabulary_tokens = vocabulary_tokens

    @property
    def kind(self) -> ProposerKind:
        """Return a kind that needs no draft model."""
        return ProposerKind.NGRAM

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowProposer:
        """Begin with a row."""
        del sampling
        return _KnownRow(self._answers[tuple(prompt)], len(prompt), self._vocabulary_tokens)

    def close(self) -> None:
        """Nothing is shared."""


class _KnownRow:
    def __init__(self, answer: Sequence[int], prompt_tokens: int, vocabulary_tokens: int) -> None:
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._vocabulary_tokens = vocabulary_tokens
        self._said_tokens = 0

    @property
    def kv_bytes(self) -> int:
        return 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self._said_tokens += len(token_ids)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        begin = self._said_tokens
        return tuple(
            self._right_or_wrong(begin, place)
            for place in range(begin, min(begin + max_tokens, len(self._answer)))
        )

    def close(self) -> None:
        pass

    def _right_or_wrong(self, begin: int, place: int) -> int:
        token_id = self._answer[place]
        drawn = zlib.crc32(f"{self._prompt_tokens} {begin} {place}".encode())
        is_right = drawn % 10 < _RIGHT_OF_TEN
        return token_id if is_right else (token_id + 1 + drawn % 7) % self._vocabulary_tokens
