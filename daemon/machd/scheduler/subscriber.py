"""A prompt with its growing completion, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import SampledToken
from machd.errors import MachdError
from machd.scheduler.events import FinishReason, SequenceFinished


class Priority(StrEnum):
    """Who goes first when requests wait; see ``WaitingQueue`` for what it is worth in seconds."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


class SubscriberState(StrEnum):
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
        max_tokens: Tokens that the completion may have; 0 computes the prompt alone.
        stop_token_ids: Tokens that end the completion; empty to run to ``max_tokens``.
        arrived_s: When the request came, on the monotonic clock.
        request_id: What the client knows the request by; followers are told their leader's.
        namespace: Whose request it is; only sequences of one namespace may share a sequence.
        cache_namespace: Only sequences of one such namespace find each other's blocks.
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
    cache_namespace: str = ""
    priority: Priority = Priority.NORMAL


class Subscriber:
    """One subscriber of a sequence, from arrival to its end; nobody but the scheduler changes it."""

    __slots__ = ("completion_tokens", "is_group_started", "request", "state")

    def __init__(self, request: SequenceRequest) -> None:
        """Begin in the waiting state."""
        assert request.prompt, "a prompt has at least one token"
        assert request.max_tokens >= 0, "a completion has no fewer than 0 tokens"
        self.request = request
        self.state = SubscriberState.WAITING
        self.completion_tokens = 0
        # Once a sibling runs, the request is being answered: only its whole time is limited.
        self.is_group_started = False

    @property
    def sequence_id(self) -> str:
        """The id that events and aborts use."""
        return self.request.sequence_id

    def start(self) -> None:
        """Begin to be answered."""
        assert self.state is SubscriberState.WAITING, f"started while {self.state}"
        self.state = SubscriberState.RUNNING

    def requeue(self) -> None:
        """Wait for a slot again; only before the first token."""
        assert self.state is SubscriberState.RUNNING, f"queued again while {self.state}"
        assert not self.completion_tokens, "a sequence with tokens cannot begin again"
        self.state = SubscriberState.WAITING

    def count_token(self) -> None:
        """Record that one more token of the completion exists."""
        assert self.state is SubscriberState.RUNNING, f"token while {self.state}"
        self.completion_tokens += 1

    def finish(
        self,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
        *,
        cached_tokens: int = 0,
        stop_token: SampledToken | None = None,
    ) -> SequenceFinished:
        """End the sequence and say so."""
        assert self.state is not SubscriberState.FINISHED, "finished twice"
        self.state = SubscriberState.FINISHED
        return SequenceFinished(
            sequence_id=self.sequence_id,
            reason=reason,
            error=error,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=cached_tokens,
            completion_tokens=self.completion_tokens,
            at_s=now_s,
            stop_token=stop_token,
        )
