"""A sequence: one prompt with its growing completion, computed once for all its subscribers."""

from __future__ import annotations

from dataclasses import replace

from machd.engine.protocol.blocks import ReusedPrefix
from machd.engine.protocol.media import MediaSpan
from machd.engine.protocol.step import (
    DecodeRow,
    Lane,
    PrefillChunk,
    SampledToken,
    SharedPrefix,
)
from machd.scheduler.draft_balance import Acceptance
from machd.scheduler.events import (
    CacheDiagnosis,
    DecodeMode,
    FinishReason,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceResumed,
    SuspendReason,
)
from machd.scheduler.subscriber import Priority, SequenceRequest, Subscriber, SubscriberState

PRIORITY_DELAY_S = {Priority.INTERACTIVE: 0.0, Priority.NORMAL: 15.0, Priority.BATCH: 60.0}
"""Delay added to a request's arrival; the queue is ordered by the sum.

A request is overtaken only by requests that arrive less than the difference of delays after it, so
none starves.
"""

_MAX_REPLAYED_TOKENS = 4096
"""A request that has missed more tokens gets a sequence of its own: a replay would be too much to send
at once."""


class Sequence:
    """One prompt with its growing completion, and its subscribers.

    Attributes:
        request: The first subscriber's.
        number: Order of submission, which breaks ties in the queue.
        submitted_s: Submission on the monotonic clock.
        subscribers: In the order in which they joined.
        tokens: Completion so far, to replay; empty once closed to subscribers.
        completion_token_ids: Ids of the completion so far, always kept.
        prefill_token_ids: Tokens that its row computes before it decodes: the prompt and, if it was suspended or
            comes from an earlier engine process, the completion up to then.
        settled_tokens: Completion tokens with KV: all but the last of each step. More than the
            completion has, if it ended within a step's tokens.
        acceptance: Recent acceptance of its draft tokens.
        prefilled_tokens: Of these, tokens in the row, or reused when the row opens.
        reused_tokens: Prompt tokens taken from the prefix cache when it ran first.
        diagnosis: Why these and no more; None before it began, without a prefix cache, or if an earlier engine process has told it.
        is_opened: The engine has a row for it.
        shared: Beginning of the prompt that its row shares with other rows.
        suspended_for: Reason of its last suspension, in this engine process or an earlier one; None without one.
        is_suspect: It ran in a failed step, or when the engine process died, and has not run alone since.
        needs_serial_lane: It did not fit into memory although it ran alone: joining the batch copies a prompt's KV,
            so that memory holds it twice; a serial row is not copied.
        encoded: Digests of the prompt's images and videos that the engine has encoded.
    """

    __slots__ = (
        "_keeps_tokens",
        "acceptance",
        "admitted_s",
        "completion_token_ids",
        "diagnosis",
        "encoded",
        "is_opened",
        "is_suspect",
        "lane",
        "needs_serial_lane",
        "number",
        "prefill_token_ids",
        "prefilled_tokens",
        "request",
        "reused_tokens",
        "settled_tokens",
        "shared",
        "slot_index",
        "submitted_s",
        "subscribers",
        "suspended_for",
        "tokens",
    )

    def __init__(
        self, leader: Subscriber, *, number: int, submitted_s: float, keeps_tokens: bool = False
    ) -> None:
        """Start waiting, with ``leader`` as first subscriber."""
        self.request: SequenceRequest = leader.request
        self.number = number
        self.submitted_s = submitted_s
        self.subscribers = [leader]
        self.completion_token_ids = list(self.request.generated_token_ids)
        self.prefill_token_ids = self.text
        self.prefilled_tokens = self.reused_tokens = 0
        self.diagnosis: CacheDiagnosis | None = None
        self.is_opened = False
        self.encoded: frozenset[bytes] = frozenset()
        self.settled_tokens = self.completion_tokens - 1
        self.acceptance = Acceptance()
        self.tokens: list[SampledToken] = []
        self.slot_index: int | None = None
        self.lane: Lane | None = None
        self.shared: SharedPrefix | None = None
        self.admitted_s: float | None = None
        self.suspended_for: SuspendReason | None = None
        self.is_suspect = False
        if (former := self.request.resumption) is not None:
            self.is_suspect = former.is_suspect
            if former.generated_token_ids:
                self.suspended_for, self.reused_tokens = SuspendReason.RESTART, former.reused_tokens
        self.needs_serial_lane = False
        self._keeps_tokens = keeps_tokens

    @property
    def place(self) -> tuple[float, int]:
        """Place in the queue, by the most urgent subscriber; smaller is sooner."""
        assert self.subscribers, "a waiting or running sequence has subscribers"
        due_s = min(
            subscriber.request.arrived_s + PRIORITY_DELAY_S[subscriber.request.priority]
            for subscriber in self.subscribers
        )
        return due_s, self.number

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Length of the completion so far."""
        return len(self.completion_token_ids)

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompt and completion with KV.

        The last sampled token is not among them: the next step begins with it.
        """
        if not (self.is_prefilled and self.has_completion):
            return self.prefilled_tokens
        return self.prompt_tokens + self.settled_tokens

    @property
    def text(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.request.prompt, *self.completion_token_ids)

    @property
    def takes_subscribers(self) -> bool:
        """True if identical requests may still join."""
        return self._keeps_tokens

    @property
    def is_closed_to_subscribers(self) -> bool:
        """True if a new subscriber would miss too much to be replayed."""
        return self._keeps_tokens and not self.can_replay(1)

    def can_replay(self, subscribers: int) -> bool:
        """Return True if the completion is short enough to replay to so many new subscribers."""
        return self.completion_tokens * subscribers < _MAX_REPLAYED_TOKENS

    def close_to_subscribers(self) -> None:
        """Take no more subscribers, and drop the tokens kept for replay."""
        self._keeps_tokens, self.tokens = False, []

    @property
    def is_running(self) -> bool:
        """True while it has a slot."""
        return self.slot_index is not None

    @property
    def is_prefilled(self) -> bool:
        """True once the whole prompt is computed, and of a resumed sequence what it had generated."""
        return not self.unprefilled_tokens

    @property
    def unprefilled_tokens(self) -> int:
        """Tokens that its row has still to compute before it decodes."""
        return len(self.prefill_token_ids) - self.prefilled_tokens

    @property
    def resumed_tokens(self) -> int:
        """Tokens that it had generated at its last suspension; 0 without one."""
        return len(self.prefill_token_ids) - self.prompt_tokens

    @property
    def next_unencoded(self) -> MediaSpan | None:
        """The first image or video of the prompt's rest that is not encoded yet."""
        rest = (one for one in self.request.media if one.stop > self.prefilled_tokens)
        return next((one for one in rest if one.media.digest not in self.encoded), None)

    @property
    def has_completion(self) -> bool:
        """False if the sequence ends after its prompt."""
        return self.request.max_tokens > 0

    @property
    def end_reason(self) -> FinishReason | None:
        """Why the completion ends with its last token; None if it goes on."""
        completion, request = self.completion_token_ids, self.request
        if completion and completion[-1] in request.stop_token_ids:
            return FinishReason.STOP
        is_whole = completion and len(completion) >= request.max_tokens
        return FinishReason.LENGTH if is_whole else None

    @property
    def asks_prompt_logprobs(self) -> bool:
        """True if the whole prompt has to be computed for its log-probabilities; they come before the first token."""
        return self.request.sampling.prompt_logprobs is not None and not self.resumed_tokens

    @property
    def reserved_tokens(self) -> int:
        """Most positions of prompt and completion together."""
        return self.prompt_tokens + self.request.max_tokens

    def admit(self, slot_index: int, lane: Lane, now_s: float) -> None:
        """Take a slot and start the subscribers."""
        assert not self.is_running, "admitted twice"
        self.slot_index, self.lane, self.admitted_s = slot_index, lane, now_s
        for subscriber in self.subscribers:
            subscriber.start()

    def suspend(self, reason: SuspendReason) -> None:
        """Leave the slot, to be resumed later from the tokens so far; their KV is dropped."""
        assert self.is_running, "only a running sequence has a slot to give up"
        self.suspended_for = reason
        self.slot_index = self.lane = self.admitted_s = self.shared = None
        self.prefill_token_ids = self.text
        self.settled_tokens = self.completion_tokens - 1
        self.prefilled_tokens = 0
        if not self.completion_tokens:
            self.reused_tokens, self.diagnosis = 0, None
        self.is_opened = False
        self.encoded = frozenset()
        for subscriber in self.subscribers:
            subscriber.suspend()

    def join(self, subscriber: Subscriber) -> None:
        """Add a subscriber; the completion so far counts as its own."""
        self.subscribers.append(subscriber)
        if self.is_running:
            assert len(self.tokens) == self.completion_tokens, "tokens to replay were kept"
            subscriber.start()
            subscriber.completion_tokens = self.completion_tokens

    def next_chunk(self, stop: int, reused: ReusedPrefix | None = None) -> PrefillChunk:
        """Return the next chunk of the prompt, up to ``stop``, behind the ``reused`` prefix."""
        assert self.slot_index is not None, "prefill needs a slot"
        assert self.lane is not None, "a slot comes with a lane"
        start = self.prefilled_tokens
        token_ids = self.prefill_token_ids[start:stop]
        assert token_ids, "the prompt is already prefilled"
        is_last = self.has_completion and start + len(token_ids) == len(self.prefill_token_ids)
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and not self.asks_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        return PrefillChunk(
            slot_index=self.slot_index,
            token_ids=token_ids,
            start=start,
            is_last=is_last,
            sampling=sampling,
            reserved_tokens=self.reserved_tokens,
            lane=self.lane,
            reused=reused,
            media=() if self.is_opened else self.request.media,
            shared=self.shared if is_last else None,
            resumed_tokens=self.resumed_tokens,
            prompt_tokens=0 if self.is_opened else len(self.prefill_token_ids),
        )

    def next_row(self, max_draft_tokens: int = 0) -> DecodeRow:
        """Return the row of the next decode step, with at most so many draft tokens."""
        assert self.slot_index is not None, "a running sequence has a slot"
        assert self.is_prefilled, "the prompt comes first"
        if not max_draft_tokens:
            return DecodeRow(self.slot_index)
        return DecodeRow(self.slot_index, max_draft_tokens, self.acceptance.rate)

    def settle(self, tokens: int) -> None:
        """Add a step's ``tokens``, of which all but the last have KV."""
        self.settled_tokens += tokens

    def count_token(self, token: SampledToken) -> None:
        """Append a completion token, and count it for every subscriber."""
        assert self.is_prefilled, "a token comes after the prompt"
        assert self.completion_tokens < self.request.max_tokens, (
            "a sequence ends with its last token"
        )
        self.completion_token_ids.append(token.token_id)
        if self._keeps_tokens:
            self.tokens.append(token)
        for subscriber in self.subscribers:
            subscriber.count_token()

    def admitted_event(
        self,
        subscriber: Subscriber,
        mode: DecodeMode,
        now_s: float,
        *,
        active_loops: int,
        active_limit: int,
    ) -> SequenceAdmitted:
        """Return a subscriber's event of admission."""
        assert self.slot_index is not None, "it has a slot"
        leader, request = self.subscribers[0].request, subscriber.request
        return SequenceAdmitted(
            subscriber.sequence_id,
            self.slot_index,
            mode,
            active_loops,
            now_s,
            coalesced_with=leader.request_id if leader.group_id != request.group_id else None,
            request_id=request.request_id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            active_limit=active_limit,
            fanout=len(self.subscribers),
        )

    def resumed_event(self, subscriber: Subscriber, now_s: float) -> SequenceResumed:
        """Return a subscriber's event of a resumed sequence."""
        assert self.slot_index is not None, "it has a slot"
        assert self.suspended_for is not None, "it was suspended"
        return SequenceResumed(
            subscriber.sequence_id,
            self.slot_index,
            self.suspended_for,
            self.resumed_tokens,
            now_s,
            subscriber.request.request_id,
        )

    def look_up_events(self, subscriber: Subscriber | None = None) -> list[PromptLookedUp]:
        """Return the events of the prompt's lookup for all subscribers, or for one; none before it began."""
        if self.diagnosis is None:
            return []
        subscribers = self.subscribers if subscriber is None else [subscriber]
        return [PromptLookedUp(one.sequence_id, self.diagnosis) for one in subscribers]

    def check_subscribers(self, state: SubscriberState) -> None:
        """Assert that there are subscribers, all in ``state``."""
        assert self.subscribers, f"a {state} sequence has no subscriber"
        assert {one.state for one in self.subscribers} == {state}, (
            f"a subscriber of a {state} sequence is not {state}"
        )
