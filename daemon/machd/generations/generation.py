"""A client's handle on the sequences of one request: yields deltas, and can abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from machd.engine.protocol.step import SampledToken
from machd.errors import ClientDisconnectedError, MachdError
from machd.generations.choice import Choice, ChoiceDelta, ChoiceNews
from machd.generations.fanout import SequenceEvent, Stream
from machd.generations.identity import GenerationIdentity
from machd.generations.record import RequestRecord, finish_reason
from machd.reading.normalised_messages import RemovedText
from machd.reading.output import (
    PLAIN_OUTPUT,
    OutputFormat,
)
from machd.reading.prompt_places import Places, PromptPlace
from machd.reading.text import CompletionText
from machd.request.media import MediaKind
from machd.scheduler.events import (
    CacheDiagnosis,
    OutputGenerated,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceFinished,
    SequenceStarted,
)

AbortSequences = Callable[[tuple[str, ...], MachdError | None], None]


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """The time of a request by phase so far; None for phases that have not begun.

    Attributes:
        queue_s: From arrival to the first admission.
        prefill_s: From admission to the first token.
        decode_s: From the first token to the last, by the engine's clock.
    """

    queue_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationUsage:
    """Tokens that a request took, over all its prompts and choices.

    Attributes:
        prompt_tokens: Each prompt counts once, however many choices it has.
        cached_tokens: Prompt tokens that were cached before the request came, counted for the first choice
            of each prompt: the others reuse what that one has just computed.
        diagnosis: Why the prefix cache had so much of the first prompt and no more; None before that is known, and without
            a prefix cache; not part of equality.
        parted_at: Where in the conversation the prompt parted from the texts that are kept; None unless asked for, and where
            that is not known.
        removed: What rules took out of the first prompt.
        timing: Time of each phase; not part of equality.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    diagnosis: CacheDiagnosis | None = field(default=None, compare=False)
    parted_at: PromptPlace | None = field(default=None, compare=False)
    removed: tuple[RemovedText, ...] = ()
    timing: GenerationTiming = field(default=GenerationTiming(), compare=False)


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """Tokens of one sequence.

    Attributes:
        cached_tokens: Prompt tokens that were cached before it began.
        admitted_s: When it got its slot, on the monotonic clock; None before.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    admitted_s: float | None


class Generation:
    """The completions of one request, on the event loop. The opener must call ``close``."""

    def __init__(  # noqa: PLR0913 - one argument for each party that it stands between
        self,
        identity: GenerationIdentity,
        stream: Stream,
        choices: list[tuple[str, CompletionText]],
        *,
        prompt_tokens: Sequence[int],
        media_kinds: Sequence[MediaKind] = (),
        places: Places | None = None,
        removed: tuple[RemovedText, ...] = (),
        output: OutputFormat = PLAIN_OUTPUT,
        streams: bool = True,
        abort: AbortSequences,
        submit_next: Callable[[], None] = lambda: None,
        on_close: Callable[[Generation], None],
        on_tokens: Callable[[int], None] = lambda _tokens: None,
    ) -> None:
        """Wrap the sequences of one request.

        Args:
            identity: The request's identity.
            stream: Yields the sequences' events.
            choices: Sequence ids, each with an empty text, in the order of the answer's indices.
            prompt_tokens: Number of tokens of each prompt.
            media_kinds: Kind of each image and video in the prompts.
            places: Places of the first prompt's tokens in its conversation; None if no place is to be told.
            removed: What rules took out of the first prompt.
            output: Splits a choice's text into thoughts, content and calls.
            streams: Whether the client sees the answer while it is generated.
            abort: Ends sequences; safe to call for finished ones.
            submit_next: Called once for each choice that has finished, to start one that waits for its turn.
            on_close: Called once, when the generation is closed.
            on_tokens: Called with the number of tokens used since the last call, each time that events
                are taken and when the generation closes: the prompts' once the first sequence has a
                slot, the completions' as the engine generates them, read by the client or not.
        """
        self.identity = identity
        self._stream = stream
        self._choices = {
            sequence_id: Choice(
                index,
                sequence_id,
                text,
                output.parser(streams=streams),
                stops_after_call=output.stops_after_call,
            )
            for index, (sequence_id, text) in enumerate(choices)
        }
        self._prompt_tokens = sum(prompt_tokens)
        self._media_kinds = media_kinds
        self._places = places
        self._removed = removed
        self._tokens_of_prompts = tuple(prompt_tokens)
        self._choices_per_prompt = len(choices) // len(prompt_tokens)
        self._abort_sequences = abort
        self._submit_next = submit_next
        self._on_close = on_close
        self._on_tokens = on_tokens
        self._charged_tokens = 0
        self._admission: SequenceAdmitted | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._unread: list[ChoiceDelta] = []
        self._error: MachdError | None = None
        self._is_closed = False

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        """The sequences behind the choices."""
        return tuple(self._choices)

    @property
    def usage(self) -> GenerationUsage:
        """Tokens so far; final once every choice is finished."""
        choices = self._choices.values()
        return GenerationUsage(
            self._prompt_tokens,
            self._cached_tokens,
            sum(choice.completion_tokens for choice in choices),
            sum(choice.reasoning_tokens for choice in choices),
            self.diagnosis,
            self._parted_at,
            self._removed,
            self._timing,
        )

    def prefilled_tokens(self, running: Mapping[str, int]) -> int:
        """Return how many tokens of its prompts are computed or reused; each prompt counts once.

        Args:
            running: Prefilled tokens of running sequences, by their ids.
        """
        choices = list(self._choices.values())
        count = self._choices_per_prompt
        return sum(
            max(
                prompt_tokens if one.has_begun else self._prefilled_tokens(one, running)
                for one in choices[number * count : (number + 1) * count]
            )
            for number, prompt_tokens in enumerate(self._tokens_of_prompts)
        )

    @staticmethod
    def _prefilled_tokens(choice: Choice, running: Mapping[str, int]) -> int:
        """The count of a snapshot, which may come before the event that says what of it was cached."""
        return 0 if choice.diagnosis is None else running.get(choice.sequence_id, 0)

    def counts_of(self, sequence_id: str) -> SequenceCounts:
        """Return the tokens of one of its sequences."""
        choice = self._choices[sequence_id]
        return SequenceCounts(
            self._tokens_of_prompts[choice.index // self._choices_per_prompt],
            choice.cached_tokens,
            choice.completion_tokens,
            choice.admitted_s,
        )

    @property
    def admission(self) -> SequenceAdmitted | None:
        """Return how the first of its sequences got a slot; None while all of them wait.

        The decode mode is that of the first token, as soon as there is one.
        """
        return self._admission

    @property
    def diagnosis(self) -> CacheDiagnosis | None:
        """Why the prefix cache had so much of the first prompt and no more; None before that is known."""
        return next(iter(self._choices.values())).diagnosis

    @property
    def applied_rules(self) -> tuple[str, ...]:
        """Names of the rules that took something out of the first prompt, each once."""
        return tuple(dict.fromkeys(one.rule for one in self._removed))

    @property
    def first_token_s(self) -> float | None:
        """When the first token came, on the monotonic clock; None before."""
        return self._first_token_s

    @property
    def open_sequences(self) -> tuple[str, ...]:
        """The sequences that the engine has still to end."""
        ended = self._stream.ended_sequences
        return tuple(one for one in self._running() if one not in ended)

    @property
    def generation_tps(self) -> float | None:
        """Tokens a second from the first to the last so far; None before there are two."""
        decode_s, tokens = self._timing.decode_s, self.usage.completion_tokens
        return (tokens - 1) / decode_s if decode_s and tokens > 1 else None

    @property
    def is_finished(self) -> bool:
        """Return whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self._choices.values())

    async def admitted(self) -> SequenceAdmitted:
        """Wait until the first sequence has a slot, so that headers show how it was admitted.

        Raises:
            MachdError: The request was rejected or ended before that.
        """
        while self._admission is None:
            self._unread += await self._take()
            if self._admission is None and self._error is not None:
                raise self._error
        return self._admission

    async def deltas(self, *, idle_s: float) -> AsyncIterator[list[ChoiceDelta]]:
        """Yield new deltas as they come, until every choice is finished.

        Args:
            idle_s: Seconds without events after which an empty list is yielded.

        Raises:
            MachdError: A choice failed, or the server ended the request.
        """
        while True:
            batch, self._unread = self._unread, []
            if batch:
                yield batch
            if self._error is not None:
                raise self._error
            if self.is_finished:
                return
            try:
                async with asyncio.timeout(idle_s):
                    self._unread += await self._take()
            except TimeoutError:
                yield []

    def fail(self, error: MachdError) -> None:
        """End the generation from the server's side; its client gets ``error``."""
        self._stream.fail(error)
        self._abort_sequences(self._running(), error)

    def close(self, error: MachdError | None = None) -> None:
        """Abort the sequences that still run. Idempotent, never blocks, safe in ``finally``.

        Args:
            error: Why the generation ended early; a disconnected client unless given.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._error = self._error or error
        if not self.is_finished:
            self._error = self._error or ClientDisconnectedError("the client has left")
            self._abort_sequences(self._running(), self._error)
        self._charge()
        self._on_close(self)

    def record(self, finished_s: float) -> RequestRecord:
        """The record of the request, at its end."""
        identity = self.identity
        first = next(iter(self._choices.values()))
        admitted_s = self._admission.at_s if self._admission else None
        started_s = finished_s if admitted_s is None else admitted_s
        token_s, timing, diagnosis = self._first_token_s, self._timing, first.diagnosis
        return RequestRecord(
            generation_id=identity.generation_id,
            request_id=identity.request_id,
            endpoint=identity.endpoint,
            decode_mode=self._admission.decode_mode if self._admission else None,
            prompt_tokens=self._prompt_tokens,
            first_prompt_tokens=self._tokens_of_prompts[0],
            cached_tokens=self._cached_tokens,
            first_cached_tokens=first.cached_tokens,
            cache_reason=None if diagnosis is None else diagnosis.reason,
            cache_parted_at_tokens=None if diagnosis is None else diagnosis.parted_at_tokens,
            applied_rules=self.applied_rules,
            completion_tokens=self.usage.completion_tokens,
            queue_s=started_s - identity.arrived_s,
            prefill_s=timing.prefill_s,
            ttft_s=None if token_s is None else token_s - identity.arrived_s,
            decode_s=timing.decode_s,
            duration_s=finished_s - identity.arrived_s,
            finish_reason=finish_reason(first.finish_reason, self._error),
            error_code=self._error.code if self._error else None,
            client=identity.client,
            coalesced_with=self._admission.coalesced_with if self._admission else None,
            model=identity.model,
            adapter=identity.adapter_name,
            trace=identity.trace,
            images=self._media_kinds.count(MediaKind.IMAGE),
            videos=self._media_kinds.count(MediaKind.VIDEO),
        )

    @property
    def _parted_at(self) -> PromptPlace | None:
        if self._places is None or self.diagnosis is None or not self.diagnosis.is_compared:
            return None
        return self._places.at(self.diagnosis.parted_at_tokens)

    @property
    def _timing(self) -> GenerationTiming:
        if self._admission is None:
            return GenerationTiming()
        admitted_s, token_s = self._admission.at_s, self._first_token_s
        queue_s = admitted_s - self.identity.arrived_s
        if token_s is None:
            return GenerationTiming(queue_s)
        return GenerationTiming(queue_s, token_s - admitted_s, self._last_token_s - token_s)

    @property
    def _cached_tokens(self) -> int:
        return sum(
            choice.cached_tokens
            for choice in self._choices.values()
            if choice.index % self._choices_per_prompt == 0
        )

    def _running(self) -> tuple[str, ...]:
        return tuple(
            choice.sequence_id for choice in self._choices.values() if choice.finish_reason is None
        )

    def _charge(self) -> None:
        """Report the tokens used since the last time, unread ones included."""
        prompt_tokens = self._prompt_tokens if self._stream.is_admitted else 0
        used_tokens = prompt_tokens + self._stream.completion_tokens
        if used_tokens > self._charged_tokens:
            self._on_tokens(used_tokens - self._charged_tokens)
            self._charged_tokens = used_tokens

    async def _take(self) -> list[ChoiceDelta]:
        """Wait for events and fold those of each choice into one delta.

        An error is kept until the deltas before it have been yielded.
        """
        try:
            events = await self._stream.take()
        except MachdError as error:
            self._error = self._error or error
            return []
        self._charge()
        news: dict[str, ChoiceNews] = {}
        for event in events:
            self._note(event, news)
        grown = [(self._choices[one], gained) for one, gained in news.items()]
        deltas = [self._grow(*one) for one in grown if one[0].finish_reason is None]
        return [delta for delta in deltas if delta is not None]

    def _note(self, event: SequenceEvent, news: dict[str, ChoiceNews]) -> None:
        """Apply one event to the request's record or to a choice's delta."""
        match event:
            case SequenceAdmitted() | SequenceStarted():
                self._note_admission(event)
            case PromptLookedUp(sequence_id, diagnosis):
                self._choices[sequence_id].diagnosis = diagnosis
                self._choices[sequence_id].cached_tokens = diagnosis.cached_tokens
            case OutputGenerated(sequence_id, output):
                outputs = news.setdefault(sequence_id, ChoiceNews()).outputs
                if isinstance(output, SampledToken):
                    self._note_token(event.at_s)
                elif not self._choices[sequence_id].take_kind(output):
                    return
                outputs.append(output)
            case SequenceFinished(sequence_id):
                if event.stop_token is not None:
                    self._note_token(event.at_s)
                self._choices[sequence_id].cached_tokens = event.cached_tokens
                news.setdefault(sequence_id, ChoiceNews()).finished = event

    def _note_token(self, at_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = at_s
        self._last_token_s = at_s

    def _note_admission(self, event: SequenceAdmitted | SequenceStarted) -> None:
        if isinstance(event, SequenceAdmitted):
            self._choices[event.sequence_id].admitted_s = event.at_s
            self._admission = self._admission or event
        elif self._first_token_s is None and self._admission is not None:
            self._admission = structs.replace(self._admission, decode_mode=event.decode_mode)

    def _grow(self, choice: Choice, news: ChoiceNews) -> ChoiceDelta | None:
        delta = choice.grow(news)
        self._error = self._error or choice.error
        if choice.is_cut:
            self._abort_sequences((choice.sequence_id,), None)
        elif choice.finish_reason is not None and self._error is None and not self._is_closed:
            self._submit_next()
        return delta
