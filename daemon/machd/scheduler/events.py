"""What happened, as frozen facts. The scheduler emits them; fan-out and telemetry subscribe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from machd.engine.protocol.step import PromptLogprob, SampledToken
from machd.errors import MachdError


class DecodeMode(StrEnum):
    """How a sequence's tokens are made, as ``X-Decode-Mode`` spells it."""

    SINGLE = "single"
    SPECULATIVE = "speculative"
    BATCHED = "batched"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SequenceQueued:
    """A sequence was accepted and waits; ``position`` 0 is next."""

    sequence_id: str
    position: int


@dataclass(frozen=True, slots=True)
class SequenceAdmitted:
    """A sequence got a slot, or joined the sequence of an identical one.

    Attributes:
        active_loops: Generation loops now running: the sequences that sequence, each once however
            many clients read it.
        at_s: On the monotonic clock, as in every event.
        coalesced_with: The request id of the sequence whose sequence is shared; None for a
            sequence that decodes itself, or that shares with one of its own request.
        request_id: Of the request that the sequence belongs to.
        prompt_tokens: Length of the prompt.
        max_tokens: Tokens that the completion may have.
        active_limit: Sequences that may decode at once.
        fanout: Sequences that read this sequence, this one included.
    """

    sequence_id: str
    slot_index: int
    decode_mode: DecodeMode
    active_loops: int
    at_s: float
    coalesced_with: str | None = None
    request_id: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    active_limit: int = 1
    fanout: int = 1


@dataclass(frozen=True, slots=True)
class PromptReused:
    """A beginning of a sequence's prompt need not be computed; told before its first token.

    Attributes:
        cached_tokens: How much of it, as :class:`SequenceFinished` repeats; at least one token.
    """

    sequence_id: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a sequence's whole prompt, which asked for them; told before its first token.

    A sequence that was queued again after it is told so twice.

    Attributes:
        logprobs: One entry for each token but the first.
    """

    sequence_id: str
    logprobs: tuple[PromptLogprob, ...]


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """A sequence is about to get its first token; told once, before that.

    Attributes:
        decode_mode: How that token was made, which may be another way than at admission, because
            others have come or gone.
    """

    sequence_id: str
    decode_mode: DecodeMode
    at_s: float


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """A sequence got a token that belongs to its text (stop tokens do not)."""

    sequence_id: str
    token: SampledToken
    at_s: float


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A sequence ended and its slot is free.

    Attributes:
        error: Why, for ``abort`` and ``error``; None when the client itself had enough.
        completion_tokens: Tokens generated, a final stop token included.
        stop_token: The token that ended it and is not part of its text, if one did.
    """

    sequence_id: str
    reason: FinishReason
    error: MachdError | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    at_s: float
    stop_token: SampledToken | None = None


@dataclass(frozen=True, slots=True)
class DecodeModeChanged:
    """Tokens are made in another way than by the steps before, at a step boundary."""

    previous: DecodeMode
    mode: DecodeMode


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """The engine computed a step.

    Attributes:
        batch_width: Rows that decoded, those whose prompt ended in this step included.
        prefill_tokens: Prompt tokens computed.
        duration_s: Wall time of the engine's ``run``.
        certain_tokens: Tokens of the rows that went through the step beside one each.
        drafted_tokens: Guesses that it verified.
        accepted_tokens: Those that were right.
    """

    batch_width: int
    prefill_tokens: int
    duration_s: float
    certain_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineFaulted:
    """A step failed, or the engine stopped; the sequences that it ended finish on their own."""


@dataclass(frozen=True, slots=True)
class InvariantBroken:
    """The scheduler's or the engine's books do not add up: a bug, and ``detail`` says which."""

    detail: str


Event = (
    SequenceQueued
    | SequenceAdmitted
    | PromptReused
    | PromptScored
    | SequenceStarted
    | TokenGenerated
    | SequenceFinished
    | DecodeModeChanged
    | StepCompleted
    | EngineFaulted
    | InvariantBroken
)
