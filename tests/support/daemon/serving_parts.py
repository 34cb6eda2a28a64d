"""Pieces of serving for its tests: events without an engine, generations without a daemon."""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.step import SampledToken
from machd.errors import MachdError
from machd.generations.choice import ChoiceDelta
from machd.generations.fanout import SequenceEvent, Stream
from machd.generations.generation import Generation
from machd.generations.identity import GenerationIdentity
from machd.reading.text import CompletionText
from machd.scheduler.events import (
    CacheDiagnosis,
    CacheReason,
    DecodeMode,
    Event,
    FinishReason,
    OutputGenerated,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceFinished,
)


def identity_of(generation_id: str = "gen", *, arrived_s: float = 100.0) -> GenerationIdentity:
    """A request that arrived at ``arrived_s``."""
    return GenerationIdentity(generation_id, "req", "chat_completions", "anonymous", arrived_s, 1)


def looked_up(sequence_id: str, cached_tokens: int) -> PromptLookedUp:
    """The event of a prompt of which so many tokens were reused."""
    reason = CacheReason.CONTINUED
    return PromptLookedUp(sequence_id, CacheDiagnosis(cached_tokens, cached_tokens, reason, reason))


def admitted(sequence_id: str, at_s: float = 101.0) -> SequenceAdmitted:
    """A sequence got the slot."""
    return SequenceAdmitted(sequence_id, 0, DecodeMode.SINGLE, 1, at_s)


def token(sequence_id: str, token_id: int, at_s: float = 102.0) -> OutputGenerated:
    """A sequence got a token."""
    return OutputGenerated(sequence_id, SampledToken(0, token_id), at_s)


def tokens(sequence_id: str, text: str, at_s: float = 102.0) -> list[OutputGenerated]:
    """A sequence got a token for each byte of a text."""
    return [token(sequence_id, byte, at_s) for byte in text.encode()]


def finished(
    sequence_id: str,
    reason: FinishReason = FinishReason.STOP,
    error: MachdError | None = None,
    *,
    completion_tokens: int = 0,
    cached_tokens: int = 0,
) -> SequenceFinished:
    """A sequence ended."""
    return SequenceFinished(sequence_id, reason, error, 4, cached_tokens, completion_tokens, 103.0)


class OpenGeneration:
    """A generation with one choice for each id, its stream, and everything it said outwards."""

    def __init__(
        self,
        *sequence_ids: str,
        stop: Sequence[str] = (),
        prompt_tokens: int | Sequence[int] = 4,
        arrived_s: float = 100.0,
    ) -> None:
        """Open it."""
        self.stream = Stream()
        self.aborts: list[tuple[tuple[str, ...], MachdError | None]] = []
        self.closed: list[Generation] = []
        tokenizer = FakeTokenizer()
        self.generation = Generation(
            identity_of(arrived_s=arrived_s),
            self.stream,
            [(one, CompletionText(tokenizer.detokenizer(), stop)) for one in sequence_ids],
            prompt_tokens=[prompt_tokens] if isinstance(prompt_tokens, int) else prompt_tokens,
            abort=lambda ids, error: self.aborts.append((ids, error)),
            on_close=self.closed.append,
        )

    def push(self, *events: Event | Sequence[Event]) -> None:
        """Events of its stream, in order."""
        for one in events:
            for event in one if isinstance(one, Sequence) else (one,):
                assert isinstance(event, SequenceEvent)
                self.stream.push(event)

    async def read(self) -> list[ChoiceDelta]:
        """Every delta until the end."""
        return [delta async for batch in self.generation.deltas(idle_s=30.0) for delta in batch]
