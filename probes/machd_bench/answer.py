"""One streamed answer, taken apart after its end: when each of its tokens came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import msgspec
from msgspec import Struct

from machd.errors import EngineFaultError
from machd_bench.connection import Exchange, TimedPiece

_DONE = b"[DONE]"
_LEADER_HEADER = "x-coalesced"


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta = _Delta()

    @property
    def answer(self) -> str:
        return self.text or self.delta.content or ""

    @property
    def has_text(self) -> bool:
        return bool(self.answer or self.delta.reasoning_content or self.delta.reasoning)


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, in seconds of the client's monotonic clock.

    Attributes:
        text_s: When each event with text was here, the first token's among them.
        prompt_tokens: As the server counted them; 0 if it did not.
        completion_tokens: As the server counted them; without its count, the events with text.
        cached_tokens: Of the prompt, taken from the server's prefix cache; None if it does not say.
        text: Without its reasoning.
        first_text: What of it was here at its first moment.
        is_coalesced: Whether this is a copy of another request's answer, as ``X-Coalesced`` says.
    """

    sent_s: float
    ended_s: float
    text_s: tuple[float, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    first_text: str = ""
    is_coalesced: bool = False

    @property
    def ttft_s(self) -> float:
        """From the request's last byte to the first token."""
        return self.text_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """From the request's last byte to the answer's."""
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between events with text."""
        return [after - before for before, after in pairwise(self.text_s)]

    @classmethod
    def read(cls, exchange: Exchange) -> Self:
        """Take a stream apart.

        Raises:
            EngineFaultError: It holds an error, no text, or something else than events.
        """
        text_s: list[float] = []
        texts: list[str] = []
        first_texts: list[str] = []
        usage: _Usage | None = None
        for arrived_s, event in _events(exchange.pieces):
            if any(choice.has_text for choice in event.choices):
                text_s.append(arrived_s)
            texts += [choice.answer for choice in event.choices]
            if text_s and arrived_s == text_s[0]:
                first_texts = texts[:]
            usage = event.usage or usage
        if not text_s:
            raise EngineFaultError("the server answered without any text")
        details = (usage and usage.prompt_tokens_details) or _PromptDetails()
        return cls(
            sent_s=exchange.sent_s,
            ended_s=exchange.ended_s,
            text_s=tuple(text_s),
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=(usage and usage.completion_tokens) or len(text_s),
            cached_tokens=details.cached_tokens,
            text="".join(texts),
            first_text="".join(first_texts),
            is_coalesced=_LEADER_HEADER in exchange.headers,
        )


def text_times(pieces: Iterable[TimedPiece]) -> list[float]:
    """When each event with text came, of a stream that may have been cut off."""
    return [at for at, event in _events(pieces) if any(one.has_text for one in event.choices)]


def wall_s(answers: Sequence[Answer]) -> float:
    """From sending the first of several requests to the last token of all."""
    return max(one.text_s[-1] for one in answers) - min(one.sent_s for one in answers)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Completion tokens of all answers over their ``wall_s``."""
    return sum(one.completion_tokens for one in answers) / wall_s(answers)


def _events(pieces: Iterable[TimedPiece]) -> Iterator[tuple[float, _Event]]:
    """Server-sent events with the time of their last byte; one that never ended is left out.

    Takes LF and CRLF line ends; CR alone, which the specification also allows, no server sends.
    """
    decoder = msgspec.json.Decoder(_Event)
    lines: list[bytes] = []
    rest = b""
    for piece in pieces:
        *ended, rest = (rest + piece.data).split(b"\n")
        for line in (one.removesuffix(b"\r") for one in ended):
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                data, lines = b"\n".join(lines), []
                if data == _DONE:
                    return
                yield piece.arrived_s, _decode(decoder, data)


def _decode(decoder: msgspec.json.Decoder[_Event], data: bytes) -> _Event:
    try:
        event = decoder.decode(data)
    except msgspec.DecodeError as error:
        raise EngineFaultError(f"the server sent an unknown event: {error}") from None
    if event.error is not None:
        words = bytes(event.error).decode("utf-8", "replace")
        raise EngineFaultError(f"the server broke off: {words[:300]}")
    return event
