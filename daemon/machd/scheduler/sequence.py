"""One generation loop: a prompt being computed, and the sequences that read what comes of it."""

from __future__ import annotations

from machd.engine.protocol.blocks import ReusedPrefix
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, PromptLogprob, SampledToken
from machd.scheduler.pacing import Acceptance
from machd.scheduler.subscriber import Priority, SequenceRequest, Subscriber

PRIORITY_DELAY_S = {Priority.INTERACTIVE: 0.0, Priority.NORMAL: 15.0, Priority.BATCH: 60.0}
"""How much later than it did a request counts as having come.

The queue is ordered by that time. A request is overtaken only by those that come less than the
difference after it, so nobody starves however many of a better priority keep coming.
"""

_MAX_REPLAYED_TOKENS = 4096
"""A request that has missed more, in all its sequences, is computed anew: catching up would be too
much at once to send."""


class Sequence:
    """What takes a place in the queue, then a slot. Its subscribers change, its work does not.

    Attributes:
        request: What is computed: that of the sequence which asked first.
        number: In the order of submission; settles who came first at the same instant.
        submitted_s: When it came to the scheduler, on the monotonic clock.
        subscribers: Who is told each token, in the order they came; the first one leads.
        tokens: What has been generated so far, kept only where somebody may still join.
        completion_token_ids: The same as ids alone, kept always.
        settled_tokens: Completion tokens whose keys and values are in the caches: all but the last one
            of the last step. More than there are, if the completion ended among its tokens ahead.
        acceptance: How often its draft tokens have been right lately.
        prefilled_tokens: Tokens of the prompt that are in the row, or will be when it begins.
        reused_tokens: Those of them that were not computed for it.
        prompt_logprobs: Of the prompt tokens computed so far, where they were asked for.
        is_opened: Whether the engine has begun with it.
    """

    __slots__ = (
        "_keeps_tokens",
        "acceptance",
        "admitted_s",
        "completion_token_ids",
        "is_opened",
        "lane",
        "number",
        "prefilled_tokens",
        "prompt_logprobs",
        "request",
        "reused_tokens",
        "settled_tokens",
        "slot_index",
        "submitted_s",
        "subscribers",
        "tokens",
    )

    def __init__(
        self, leader: Subscriber, *, number: int, submitted_s: float, keeps_tokens: bool = False
    ) -> None:
        """Begin in the queue, read by ``leader``."""
        self.request: SequenceRequest = leader.request
        self.number = number
        self.submitted_s = submitted_s
        self.subscribers = [leader]
        self.prefilled_tokens = self.reused_tokens = 0
        self.is_opened = False
        self.prompt_logprobs: list[PromptLogprob] = []
        self.completion_token_ids: list[int] = []
        self.settled_tokens = -1
        self.acceptance = Acceptance()
        self.tokens: list[SampledToken] = []
        self.slot_index: int | None = None
        self.lane: Lane | None = None
        self.admitted_s: float | None = None
        self._keeps_tokens = keeps_tokens

    @property
    def place(self) -> tuple[float, int]:
        """Where it stands in the queue: its most urgent subscriber's, smaller is sooner."""
        assert self.subscribers, "somebody reads a sequence that waits or runs"
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
        """How many tokens of prompt and completion its caches hold.

        What the last step said is not among them: it is what the next one begins with.
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
        """Whether a sequence may still join."""
        return self._keeps_tokens

    @property
    def is_closed_to_subscribers(self) -> bool:
        """Whether it takes no more subscribers because of what they would have missed."""
        return self._keeps_tokens and not self.can_replay(1)

    def can_replay(self, subscribers: int) -> bool:
        """Whether so many sequences of one request may still catch up."""
        return self.completion_tokens * subscribers < _MAX_REPLAYED_TOKENS

    def close_to_subscribers(self) -> None:
        """What was kept for those who might still come is not needed any more."""
        self._keeps_tokens, self.tokens = False, []

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot_index is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.prefilled_tokens == self.prompt_tokens

    @property
    def has_completion(self) -> bool:
        """Whether anything follows the prompt; without it the sequence ends when it is prefilled."""
        return self.request.max_tokens > 0

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether every token of the prompt has to be computed for its log-probability."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def reserved_tokens(self) -> int:
        """Positions that prompt and completion may take together."""
        return self.prompt_tokens + self.request.max_tokens

    def admit(self, slot_index: int, lane: Lane, now_s: float) -> None:
        """Take a slot; its subscribers begin to be answered."""
        assert not self.is_running, "admitted twice"
        self.slot_index, self.lane, self.admitted_s = slot_index, lane, now_s
        for subscriber in self.subscribers:
            subscriber.start()

    def requeue(self) -> None:
        """Give up the slot and all that was computed of the prompt; only before the first token."""
        assert self.is_running, "only a running sequence has a slot to give up"
        self.slot_index = self.lane = self.admitted_s = None
        self.prefilled_tokens = self.reused_tokens = 0
        self.is_opened = False
        self.prompt_logprobs = []
        for subscriber in self.subscribers:
            subscriber.requeue()

    def join(self, subscriber: Subscriber) -> None:
        """Let one more sequence read along; what is already there counts as its own."""
        self.subscribers.append(subscriber)
        if self.is_running:
            assert len(self.tokens) == self.completion_tokens, "what is replayed was kept"
            subscriber.start()
            subscriber.completion_tokens = self.completion_tokens

    def next_chunk(self, stop: int, reused: ReusedPrefix | None = None) -> PrefillChunk:
        """The next piece of the prompt, up to ``stop``; it begins behind what is reused."""
        assert self.slot_index is not None, "prefill needs a slot"
        assert self.lane is not None, "a slot comes with a lane"
        start = self.prefilled_tokens
        token_ids = self.request.prompt[start:stop]
        assert token_ids, "the prompt is already prefilled"
        return PrefillChunk(
            slot_index=self.slot_index,
            token_ids=token_ids,
            start=start,
            is_last=self.has_completion and start + len(token_ids) == self.prompt_tokens,
            sampling=self.request.sampling,
            reserved_tokens=self.reserved_tokens,
            lane=self.lane,
            reused=reused,
        )

    def next_row(self, max_draft_tokens: int = 0) -> DecodeRow:
        """The wish for the next token, and how many may be guessed ahead of it."""
        assert self.slot_index is not None, "a running sequence has a slot"
        assert self.is_prefilled, "the prompt comes first"
        if not max_draft_tokens:
            return DecodeRow(self.slot_index)
        return DecodeRow(self.slot_index, max_draft_tokens, self.acceptance.rate)

    def add_prompt_logprob(self, logprob: PromptLogprob) -> None:
        """Record the log-probability of the prompt's next token."""
        expected = len(self.prompt_logprobs) + 1
        assert logprob.position == expected, "they come in order, without gaps"
        self.prompt_logprobs.append(logprob)

    def settle(self, tokens: int) -> None:
        """Take in that a step gave ``tokens`` more: all but the last one are in the caches."""
        self.settled_tokens += tokens

    def count_token(self, token: SampledToken) -> None:
        """Record one more token, for every subscriber."""
        assert self.is_prefilled, "a token comes after the prompt"
        assert self.completion_tokens < self.request.max_tokens, (
            "a sequence ends with its last token"
        )
        self.completion_token_ids.append(token.token_id)
        if self._keeps_tokens:
            self.tokens.append(token)
        for subscriber in self.subscribers:
            subscriber.count_token()
