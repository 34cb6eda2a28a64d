"""Subscribers: one client's view of a sequence, from request to finish."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from machd.engine.protocol.media import MediaSpan
from machd.engine.protocol.step import SampledToken
from machd.errors import MachdError
from machd.request.generation import SamplingParams
from machd.scheduler.events import FinishReason, SequenceFinished


class Priority(StrEnum):
    """Priority of a waiting request; ``PRIORITY_DELAY_S`` has its delay in seconds."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


class SubscriberState(StrEnum):
    """State of a subscriber."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Resumption:
    """State of a completion whose engine process died, up to the last event that was read.

    Attributes:
        generated_token_ids: Completion tokens so far, in order; the next token follows them.
        reused_tokens: Prompt tokens from the prefix cache: those of :class:`machd.scheduler.events.PromptLookedUp`, 0 without one.
        is_group_started: The sequence or a sibling has had a slot, so the queue timeout no longer applies.
        is_suspect: The sequence was running when the process died. It is admitted while nothing else runs, and
            runs alone until its next token.
    """

    generated_token_ids: tuple[int, ...] = ()
    reused_tokens: int = 0
    is_group_started: bool = False
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One completion as requested.

    Attributes:
        group_id: Shared by all completions of one client request.
        prompt: Token ids, at least one.
        max_tokens: Limit of completion tokens; 0 computes the prompt alone.
        stop_token_ids: Tokens that end the completion; empty to run to ``max_tokens``.
        arrived_s: Arrival on the monotonic clock.
        request_id: Id that the client sees; later subscribers see the first one's as ``coalesced_with``.
        namespace: Requests coalesce within one namespace.
        cache_namespace: Requests share blocks of the prefix cache within one cache namespace.
        priority: Order among waiting requests.
        media: Images and videos of the prompt, in order; their keys in the prompt follow from their content.
        resumption: State to go on from, if an earlier engine process had queued the request; None for a new request.
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
    media: tuple[MediaSpan, ...] = ()
    resumption: Resumption | None = None

    def __post_init__(self) -> None:
        """Check the scheduler's assumptions on the thread that makes the request."""
        assert self.prompt, "a prompt has at least one token"
        assert self.max_tokens >= 0, "a completion has no fewer than 0 tokens"

    @property
    def generated_token_ids(self) -> tuple[int, ...]:
        """Completion tokens that an earlier engine process generated; empty for a new request."""
        return () if self.resumption is None else self.resumption.generated_token_ids


class Subscriber:
    """One client's view of a sequence; only the scheduler changes it."""

    __slots__ = ("completion_tokens", "is_group_started", "request", "state")

    def __init__(self, request: SequenceRequest) -> None:
        """Begin in the waiting state."""
        self.request = request
        self.state = SubscriberState.WAITING
        self.completion_tokens = len(request.generated_token_ids)
        # Once it or a sibling has been admitted, only the request timeout applies.
        former = request.resumption
        self.is_group_started = former is not None and former.is_group_started

    @property
    def sequence_id(self) -> str:
        """Id in events and aborts."""
        return self.request.sequence_id

    def start(self) -> None:
        """Enter the running state."""
        assert self.state is SubscriberState.WAITING, f"started while {self.state}"
        self.state = SubscriberState.RUNNING

    def suspend(self) -> None:
        """Return to the waiting state, without a queue timeout."""
        assert self.state is SubscriberState.RUNNING, f"suspended while {self.state}"
        self.state = SubscriberState.WAITING
        self.is_group_started = True

    def count_token(self) -> None:
        """Count one more completion token."""
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
        """Enter the finished state; returns the event."""
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
