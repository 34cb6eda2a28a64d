"""Answers of ``POST /v1/systemone``."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from machd.dialects.wire.errors import ErrorBody, error_body
from machd.errors import MachdError


class NoulAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """Whether a statement is true.

    Attributes:
        noul: The probability that it is.
        temperature: What log-probabilities were divided by.
        option_mass: Share of the model's next-token probability that is on the options: a low one says that the
            model would rather have said something else.
    """

    noul: float
    temperature: float
    option_mass: float


class ChoiceAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """Which option fits best.

    Attributes:
        choice: The most probable option, the first of equal ones.
        probabilities: By option, in the request's order; they sum to 1.
        confidence: ``(n * peak - 1) / (n - 1)`` of n options: 1 where one has everything, 0 where all are equal.
        temperature: As of :class:`NoulAnswer`.
        option_mass: As of :class:`NoulAnswer`.
    """

    choice: str
    probabilities: dict[str, float]
    confidence: float
    temperature: float
    option_mass: float


class ScoreAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """Where the state falls on a scale.

    Attributes:
        score: The expected level, from 0 on; it may lie between two.
        legend: Text of each level.
        probabilities: By level; they sum to 1.
        confidence: As of :class:`ChoiceAnswer`.
        temperature: As of :class:`NoulAnswer`.
        option_mass: As of :class:`NoulAnswer`.
    """

    score: float
    legend: dict[str, str]
    probabilities: dict[str, float]
    confidence: float
    temperature: float
    option_mass: float


Answer: TypeAlias = NoulAnswer | ChoiceAnswer | ScoreAnswer


class DecisionUsage(Struct, frozen=True, kw_only=True):
    """Tokens that a request took.

    Attributes:
        input_tokens: Of all prompts: each question's holds the state.
        output_tokens: One for each distribution that was read; nothing of it is shown.
        cached_tokens: Input tokens that were not computed again, as the state is for all questions but one.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int


class Decisions(Struct, frozen=True, kw_only=True):
    """An answer to each question, by its id, in the request's order."""

    id: str
    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class DecisionErrorBody(ErrorBody, frozen=True, kw_only=True):
    """OpenAI's envelope of an error, with its message where System One's clients read it."""

    detail: str


def decision_error_json(error: MachdError) -> bytes:
    """Encode an error as System One's clients read it."""
    body = DecisionErrorBody(error=error_body(error).error, detail=error.message)
    return msgspec.json.encode(body)
