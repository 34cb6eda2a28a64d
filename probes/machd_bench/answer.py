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


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None


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

    @property
    def text(self) -> str:
        deltas = [one.delta or _Delta() for one in self.choices]
        pairs = zip(self.choices, deltas, strict=True)
        return "".join(one.text or delta.content or "" for one, delta in pairs)

    @property
    def has_text(self) -> bool:
        deltas = [one.delta for one in self.choices if one.delta]
        return bool(self.text) or any(one.reasoning_content or one.reasoning for one in deltas)


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
        is_counted: Whether ``completion_tokens`` is the server's own count.
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
    is_counted: bool = False

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
        events = list(_events(exchange.pieces))
        text_s = tuple(at for at, event in events if event.has_text)
        if not text_s:
            raise EngineFaultError("the server answered without any text")
        usage = next((event.usage for _, event in reversed(events) if event.usage), _Usage())
        return cls(
            sent_s=exchange.sent_s,
            ended_s=exchange.ended_s,
            text_s=text_s,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens or len(text_s),
            cached_tokens=(usage.prompt_tokens_details or _PromptDetails()).cached_tokens,
            text="".join(event.text for _, event in events),
            first_text="".join(event.text for at, event in events if at <= text_s[0]),
            is_coalesced="x-coalesced" in exchange.headers,
            is_counted=usage.completion_tokens > 0,
        )


def text_times(pieces: Iterable[TimedPiece]) -> list[float]:
    """When each event with text came, of a stream that may have been cut off."""
    return [at for at, event in _events(pieces) if event.has_text]


def wall_s(answers: Sequence[Answer]) -> float:
    """From sending the first of several requests to the last token of all."""
    return max(one.text_s[-1] for one in answers) - min(one.sent_s for one in answers)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Completion tokens of all answers over their ``wall_s``."""
    return sum(one.completion_tokens for one in answers) / wall_s(answers)


def all_gaps_s(answers: Iterable[Answer]) -> list[float]:
    """The gaps of all answers."""
    return [gap for one in answers for gap in one.gaps_s]


def _events(pieces: Iterable[TimedPiece]) -> Iterator[tuple[float, _Event]]:
    """Server-sent events with the time of their last byte; one that never ended is left out.

    Takes LF and CRLF line ends; CR alone, which the specification also allows, no server sends.
    """
    lines: list[bytes] = []
    rest = b""
    for piece in pieces:
        *ended, rest = (rest + piece.data).split(b"\n")
        for line in (one.removesuffix(b"\r") for one in ended):
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                data, lines = b"\n".join(lines), []
                if data == b"[DONE]":
                    return
                yield piece.arrived_s, _decode(data)


def _decode(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise EngineFaultError(f"the server sent an unknown event: {error}") from None
    if event.error is not None:
        raise EngineFaultError(f"the server broke off: {excerpt(bytes(event.error))}")
    return event


def excerpt(body: bytes) -> str:
    """The beginning of what a server said, on one line."""
    return " ".join(body[:1000].decode("utf-8", "replace").split())[:300]
