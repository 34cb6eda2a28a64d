"""Events of the scheduler, for fan-out and telemetry: plain data, so that they can cross the link."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from machd.engine.protocol.step import RowOutput, SampledToken
from machd.errors import MachdError


class DecodeMode(StrEnum):
    """Decode mode of a sequence, as in the ``X-Decode-Mode`` header."""

    SINGLE = "single"
    SPECULATIVE = "speculative"
    BATCHED = "batched"


class SuspendReason(StrEnum):
    """Reasons for which sequences lose their slots, to be resumed from their tokens."""

    MEMORY = "memory"
    """A step did not fit into the memory that was left."""

    FAULT = "fault"
    """A step failed, or a suspect had to run alone."""

    CONFIG = "config"
    """Another scheduler config came into force, or the model was measured for one."""

    RESTART = "restart"
    """The engine process died, and another one resumes its sequences."""


class CacheReason(StrEnum):
    """Why the prefix cache had no more of a prompt."""

    WHOLE = "whole"
    """It had all but the last token, which is always computed."""

    CONTINUED = "continued"
    """All of a kept text was found, and the prompt goes on behind it, as a conversation does."""

    FIRST_SEEN = "first_seen"
    """No kept text begins with the prompt's first token."""

    DIVERGED = "diverged"
    """Kept texts go on with other tokens."""

    IMAGE_CHANGED = "image_changed"
    """A kept text has another image or video there."""

    EVICTED = "evicted"
    """More was computed in this namespace before, and has left memory and disk: evicted, cleared, lost or never kept for want of room."""

    ADAPTER = "adapter"
    """More was computed for the same clients, by other adapters or by none."""

    OTHER_NAMESPACE = "other_namespace"
    """More was computed in another namespace. Never told to a client: it would show what others have asked."""

    KIND_CANNOT = "kind_cannot"
    """More is kept, and a cache with state or windows cannot begin in the middle of it; or the model's caches cannot be kept at all."""

    OFF = "off"
    """The settings ask for no prefix cache."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of the prompt need every token computed."""


class FinishReason(StrEnum):
    """Reasons for which a sequence ends."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceQueued(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A subscriber's sequence was queued; ``position`` 0 is next."""

    sequence_id: str
    position: int


class SequenceAdmitted(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A subscriber's sequence got a slot, or the subscriber joined a running one.

    Attributes:
        active_loops: Running sequences, each counted once.
        at_s: On the monotonic clock, as in every event.
        coalesced_with: Request id of the sequence's first subscriber; None if that is this request.
        request_id: The subscriber's request.
        prompt_tokens: Length of the prompt.
        max_tokens: Limit of completion tokens.
        active_limit: Sequences that may run at once.
        fanout: Subscribers of the sequence, this one included.
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


class SequenceResumed(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A subscriber's sequence, which had lost its slot after its first token, got a slot again.

    Its next token follows the last one that was generated. The engine process may be another one.

    Attributes:
        completion_tokens: Generated so far.
    """

    sequence_id: str
    slot_index: int
    reason: SuspendReason
    completion_tokens: int
    at_s: float
    request_id: str = ""


_UNCOMPARED = frozenset({CacheReason.OFF, CacheReason.KIND_CANNOT, CacheReason.PROMPT_LOGPROBS})


class CacheDiagnosis(Struct, frozen=True, array_like=True, gc=False):
    """What the prefix cache had of a prompt, and why not more.

    Attributes:
        cached_tokens: Tokens that were reused.
        parted_at_tokens: Tokens that the prompt has in common with a text of its namespace that is kept, in memory or on disk.
        reason: Cause of the largest part that was not reused, for operators.
        client_reason: The same without what other clients have asked.
    """

    cached_tokens: int
    parted_at_tokens: int
    reason: CacheReason
    client_reason: CacheReason

    @property
    def is_compared(self) -> bool:
        """False where the prompt was compared with no kept text, so that it has no place at which it parted from one."""
        return self.parted_at_tokens > 0 or self.client_reason not in _UNCOMPARED


class PromptLookedUp(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A prompt was looked up in the prefix cache and begins to be computed; sent before the first token.

    :class:`SequenceFinished` repeats the cached tokens.
    """

    sequence_id: str
    diagnosis: CacheDiagnosis


class SequenceStarted(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The first token comes next.

    Attributes:
        decode_mode: Mode of that token; it may differ from the mode at admission.
    """

    sequence_id: str
    decode_mode: DecodeMode
    at_s: float


class OutputGenerated(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A row's output: a token of the text, stop tokens excluded, or an output of another kind before it.

    A sequence that is suspended before its first token sends the other kinds again.
    """

    sequence_id: str
    output: RowOutput
    at_s: float


class SequenceFinished(Struct, frozen=True, tag=True, array_like=True):
    """A subscriber's sequence ended.

    Attributes:
        error: Cause of ``abort`` and ``error``; None if the client aborted.
        completion_tokens: Tokens generated, a final stop token included.
        stop_token: Token that ended the text without being part of it, if any.
    """

    sequence_id: str
    reason: FinishReason
    error: MachdError | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    at_s: float
    stop_token: SampledToken | None = None


class DecodeModeChanged(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The decode mode changed at a step boundary."""

    previous: DecodeMode
    mode: DecodeMode


class StepCompleted(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The engine computed a step.

    Attributes:
        batch_width: Rows that decoded, those whose prompt ended in this step included.
        prefill_tokens: Prompt tokens computed.
        duration_s: Wall time of the engine's ``run``.
        forced_tokens: Forced tokens of all rows.
        drafted_tokens: Draft tokens verified.
        accepted_tokens: Draft tokens accepted.
    """

    batch_width: int
    prefill_tokens: int
    duration_s: float
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class EngineFaulted(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A step failed, or the engine stopped; the affected sequences have their own events."""


class InvariantBroken(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """An invariant of the scheduler or engine does not hold, which is a bug; ``detail`` names it."""

    detail: str


Event = (
    SequenceQueued
    | SequenceAdmitted
    | SequenceResumed
    | PromptLookedUp
    | SequenceStarted
    | OutputGenerated
    | SequenceFinished
    | DecodeModeChanged
    | StepCompleted
    | EngineFaulted
    | InvariantBroken
)
