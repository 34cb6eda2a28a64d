"""One streamed answer, taken apart: when each of its tokens came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import msgspec
from msgspec import Struct

from machd.bench.sse import TimedPiece, timed_events
from machd.errors import EngineFaultError

_DONE = b"[DONE]"
_EXCERPT_CHARACTERS = 300


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def answer(self) -> str:
        return self.text or (self.delta or _Delta()).content or ""

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.answer or delta.reasoning_content or delta.reasoning)


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return (self.prompt_tokens_details or _PromptDetails()).cached_tokens


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request, in seconds of the client's monotonic clock.

    Attributes:
        text_s: When each event with text was here, the first token's among them.
        prompt_tokens: As the server counted them; 0 if it did not.
        completion_tokens: As the server counted them; without its count, the events with text.
        leader_id: Whose answer this is a copy of, as machd's ``X-Coalesced`` says; None for one
            that was computed for this request.
        text: The answer, its reasoning left out.
        cached_tokens: Of the prompt, taken from the server's prefix cache as it says; None if it
            does not.
        first_text: Of the answer, what was here at its first moment.
    """

    sent_s: float
    ended_s: float
    text_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    leader_id: str | None = None
    text: str = ""
    cached_tokens: int | None = None
    first_text: str = ""

    @property
    def ttft_s(self) -> float:
        """From the request's last byte to the first token."""
        return self.text_s[0] - self.sent_s

    @property
    def last_token_s(self) -> float:
        """When the last text was here; usage and the end of the stream may come later."""
        return self.text_s[-1]

    @property
    def latency_s(self) -> float:
        """From the request's last byte to the answer's."""
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between events with text, the first token's wait not among them."""
        return tuple(after - before for before, after in pairwise(self.text_s))

    @classmethod
    def read(cls, sent_s: float, ended_s: float, pieces: Sequence[TimedPiece]) -> Self:
        """Take a stream apart.

        Raises:
            EngineFaultError: The stream holds an error, no text, or something else than events.
        """
        decoder = msgspec.json.Decoder(_Event)
        text_s: list[float] = []
        answer: list[str] = []
        first: list[str] = []
        usage: _Usage | None = None
        for event in timed_events(pieces):
            if event.data == _DONE:
                break
            try:
                content = decoder.decode(event.data)
            except msgspec.DecodeError as error:
                raise EngineFaultError(
                    f"the server sent an event that is not ours: {error}"
                ) from None
            if content.error is not None:
                raise EngineFaultError(f"the server broke off: {excerpt(bytes(content.error))}")
            if any(choice.has_text for choice in content.choices):
                text_s.append(event.arrived_s)
            answer.extend(choice.answer for choice in content.choices)
            if text_s and event.arrived_s == text_s[0]:
                first.extend(choice.answer for choice in content.choices)
            usage = content.usage or usage
        if not text_s:
            raise EngineFaultError("the server answered without any text")
        return cls(
            sent_s=sent_s,
            ended_s=ended_s,
            text_s=tuple(text_s),
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=(usage and usage.completion_tokens) or len(text_s),
            text="".join(answer),
            cached_tokens=usage.cached_tokens if usage else None,
            first_text="".join(first),
        )


def wall_s(timings: Sequence[RequestTiming]) -> float:
    """From sending the first of several requests to the last token of all."""
    return max(one.last_token_s for one in timings) - min(one.sent_s for one in timings)


def excerpt(body: bytes) -> str:
    """The beginning of what a server said, on one line."""
    return " ".join(body.decode("utf-8", "replace").split())[:_EXCERPT_CHARACTERS]
