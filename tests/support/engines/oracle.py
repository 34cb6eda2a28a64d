"""An oracle as a proposer, planted faults of verification, and an engine that remembers its results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from machd.engine.assembly import engine_parts
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.step import Lane, ProposerKind, SpanCost, StepPlan, StepResult
from machd.engine.sampling.draft_sampling import RowDraws
from machd.engine.speculation.draws import OpenDraws
from machd.engine.step import decoder
from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.decoder import Decoder, Sampled
from machd.engine.step.mlx_engine import MlxEngine
from machd.engine.step.ports import Proposer, RowProposer
from machd.request.generation import SamplingParams
from machd.scheduler.pacing import StepPace

Answers = Mapping[tuple[tuple[int, ...], SamplingParams], Sequence[int]]
"""Prompt and parameters to all that the row says."""


class VerificationError(Exception):
    """A planted fault of sampling a span with tokens ahead."""


def fail_verification(patch: pytest.MonkeyPatch) -> None:
    """Have every sampling of spans with tokens ahead raise VerificationError, and no other."""
    right = Decoder.sample

    def sample(this: Decoder, current: DecodePass) -> Sampled | None:
        with pytest.MonkeyPatch.context() as inner:
            if current.longest > 1:
                inner.setattr(decoder, "Sampler", _raise)
            return right(this, current)

    def _raise(*_: object) -> None:
        raise VerificationError

    patch.setattr(Decoder, "sample", sample)


def open_draws(vocabulary_tokens: int) -> OpenDraws:
    """Return draws for a served model with logits of this width."""
    return partial(RowDraws, vocabulary_tokens=vocabulary_tokens)


def draft_eagerly(patch: pytest.MonkeyPatch) -> None:
    """Have a scheduler allow all drafts, whether they pay or not, but for steps that measure."""

    def draft_tokens(pace: StepPace, lane: Lane, rows: int, max_tokens: int) -> int:
        cost = pace._costs.get((lane, rows))
        return 0 if cost is not None and not cost.is_measured else max_tokens

    patch.setattr(StepPace, "draft_tokens", draft_tokens)
    patch.setattr(StepPace, "span_cost", lambda _pace, _lane, _rows: SpanCost())


@dataclass
class Oracle:
    """A proposer that knows rows' answers, and is wrong at a chosen share of places.

    Attributes:
        answers: Rows' answers, by prompt and parameters.
        right_of_ten: Number of right places in ten; a hash of the place chooses them.
        vocabulary_tokens: Wrong tokens are below this id.
        asked: Number of calls of ``propose``.
        open_rows: Number of rows that are not closed.
    """

    answers: Answers
    right_of_ten: int = 10
    vocabulary_tokens: int = 128
    asked: int = 0
    open_rows: int = field(default=0)

    @property
    def kind(self) -> ProposerKind:
        """Any kind would do."""
        return ProposerKind.NGRAM

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowProposer:
        """Open a proposer for one row; it knows the row's answer if ``answers`` has it."""
        self.open_rows += 1
        return _Row(self, len(prompt), self.answers.get((tuple(prompt), sampling), ()))

    def close(self) -> None:
        """Nothing is shared."""


class _Row:
    def __init__(self, oracle: Oracle, prompt_tokens: int, answer: Sequence[int]) -> None:
        self._oracle = oracle
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._said: list[int] = []

    @property
    def kv_bytes(self) -> int:
        return 1  # so that rows that are left open show

    def extend(self, token_ids: Sequence[int]) -> None:
        self._said.extend(token_ids)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        self._oracle.asked += 1
        begin = len(self._said)
        assert list(self._answer[:begin]) == self._said[: len(self._answer)], "told all, in order"
        return tuple(self._wrong_or_right(begin, max_tokens))

    def close(self) -> None:
        self._oracle.open_rows -= 1

    def _wrong_or_right(self, begin: int, max_tokens: int) -> Iterator[int]:
        for place in range(begin, begin + max_tokens):
            token_id = self._answer[place] if place < len(self._answer) else 1
            key = repr((self._prompt_tokens, begin, place)).encode()
            digest = hashlib.blake2b(key, digest_size=1).digest()[0]
            is_right = digest % 10 < self._oracle.right_of_ten
            yield (
                token_id
                if is_right
                else (token_id + 1 + digest % 7) % self._oracle.vocabulary_tokens
            )


class WatchedEngine(MlxEngine):
    """Remembers what its steps told, since :meth:`forget`."""

    def __init__(
        self,
        loaded: LoadedModel,
        proposer: Proposer | None,
        *,
        looks_ahead: bool = False,
        max_rows: int = 256,
    ) -> None:
        """Take over a model whose drafts come from ``proposer``."""
        self.results: list[StepResult] = []
        parts = engine_parts(loaded, proposer=proposer, looks_ahead=looks_ahead)
        super().__init__(parts, max_rows=max_rows)
        self.forget()

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step and remember its result."""
        result = super().run(plan)
        self.results.append(result)
        return result

    def forget(self) -> None:
        """Drop the remembered results."""
        self.results = []

    @property
    def passes(self) -> int:
        """Number of steps with tokens."""
        return sum(bool(result.tokens) for result in self.results)

    @property
    def drafted_tokens(self) -> int:
        """Number of drafts that were verified."""
        return sum(one.drafted_tokens for result in self.results for one in result.drafts)

    @property
    def accepted_tokens(self) -> int:
        """Number of drafts that were accepted."""
        return sum(one.accepted_tokens for result in self.results for one in result.drafts)

    @property
    def said_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(result.tokens) for result in self.results)

    @property
    def draft_faults(self) -> list[tuple[int, BaseException]]:
        """Slots whose proposer failed, each with its cause."""
        return [
            (one.slot_index, one.cause) for result in self.results for one in result.draft_faults
        ]
