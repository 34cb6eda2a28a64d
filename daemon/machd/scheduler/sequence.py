"""A prompt with its growing completion, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from machd.engine.protocol import PrefillChunk, SamplingParams
from machd.errors import MachdError
from machd.scheduler.events import FinishReason, SequenceFinished

__all__ = ["Priority", "Sequence", "SequenceRequest", "SequenceState"]


class Priority(StrEnum):
    """Who goes first when requests wait; see ``WaitingQueue`` for what it is worth in seconds."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


class SequenceState(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence as it was asked for.

    Attributes:
        group_id: Shared by the sequences of one request.
        prompt: Token ids, at least one.
        max_tokens: Tokens that the completion may have, at least one.
        stop_token_ids: Tokens that end the completion; empty to run to ``max_tokens``.
        arrived_s: When the request came, on the monotonic clock.
        request_id: What the client knows the request by; followers are told their leader's.
        namespace: Whose request it is; only sequences of one namespace may share a decode.
        priority: Its place among those that wait.
    """

    sequence_id: str
    group_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    arrived_s: float
    request_id: str = ""
    namespace: str = ""
    priority: Priority = Priority.NORMAL


class Sequence:
    """The scheduler's own record; nobody else changes it."""

    __slots__ = (
        "admitted_s",
        "completion_tokens",
        "is_group_started",
        "prefilled_tokens",
        "request",
        "slot_index",
        "state",
    )

    def __init__(self, request: SequenceRequest) -> None:
        """Begin in the waiting state."""
        assert request.prompt, "a prompt has at least one token"
        assert request.max_tokens >= 1, "a completion may have at least one token"
        self.request = request
        self.state = SequenceState.WAITING
        self.slot_index: int | None = None
        self.prefilled_tokens = 0
        self.completion_tokens = 0
        self.admitted_s: float | None = None
        # Once a sibling runs, the request is being answered: only its whole time is limited.
        self.is_group_started = False

    @property
    def sequence_id(self) -> str:
        """The id that events and aborts use."""
        return self.request.sequence_id

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.prefilled_tokens == len(self.request.prompt)

    @property
    def reserved_tokens(self) -> int:
        """Positions that prompt and completion may take together."""
        return len(self.request.prompt) + self.request.max_tokens

    def admit(self, slot_index: int, now_s: float) -> None:
        """Take a slot."""
        assert self.state is SequenceState.WAITING, f"admitted while {self.state}"
        self.state = SequenceState.RUNNING
        self.slot_index = slot_index
        self.admitted_s = now_s

    def next_chunk(self, chunk_tokens: int) -> PrefillChunk:
        """The next piece of the prompt, at most ``chunk_tokens`` long."""
        assert self.slot_index is not None, "prefill needs a slot"
        start = self.prefilled_tokens
        token_ids = self.request.prompt[start : start + chunk_tokens]
        assert token_ids, "the prompt is already prefilled"
        return PrefillChunk(
            slot_index=self.slot_index,
            token_ids=token_ids,
            start=start,
            is_last=start + len(token_ids) == len(self.request.prompt),
            sampling=self.request.sampling,
            reserved_tokens=self.reserved_tokens,
        )

    def count_token(self) -> None:
        """Record that one more token of the completion exists."""
        assert self.state is SequenceState.RUNNING, f"token while {self.state}"
        self.completion_tokens += 1

    def finish(
        self, reason: FinishReason, now_s: float, error: MachdError | None = None
    ) -> SequenceFinished:
        """End the sequence and say so."""
        assert self.state is not SequenceState.FINISHED, "finished twice"
        self.state = SequenceState.FINISHED
        self.slot_index = None
        return SequenceFinished(
            sequence_id=self.sequence_id,
            reason=reason,
            error=error,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=0,
            completion_tokens=self.completion_tokens,
            at_s=now_s,
        )
