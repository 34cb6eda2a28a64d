"""A choice of an answer: the text of one sequence, which grows by the sequence's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machd.engine.protocol.step import RowOutput, SampledToken
from machd.errors import MachdError
from machd.reading.output import (
    OutputParser,
    OutputPiece,
    ToolCallEnd,
    ToolCallStart,
    joined_pieces,
)
from machd.reading.text import CompletionText
from machd.scheduler.events import CacheDiagnosis, FinishReason, SequenceFinished

TOOL_CALLS = "tool_calls"
"""The finish reason of a choice that ended by itself with a tool call."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The text and outputs that one choice gained since the last read.

    Attributes:
        outputs: The row's outputs in order: tokens, and at most one of every other kind, in or before the
            choice's first delta.
        text: Text as generated, markers of thoughts and calls included.
        finish_reason: With the last delta of a choice: ``stop``, ``length``, or ``tool_calls``
            where it called something.
        pieces: The text split into thoughts, content and calls.
        stop: The stop text that ended the choice, with its last delta.
        stop_token: The token that ended it and is not part of its text, with its last delta.
    """

    index: int
    text: str
    outputs: tuple[RowOutput, ...]
    finish_reason: str | None
    pieces: tuple[OutputPiece, ...] = ()
    stop: str | None = None
    stop_token: SampledToken | None = None

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The tokens among the outputs."""
        return tuple([one for one in self.outputs if isinstance(one, SampledToken)])


@dataclass(slots=True)
class ChoiceNews:
    """The new events of one choice."""

    outputs: list[RowOutput] = field(default_factory=list)
    finished: SequenceFinished | None = None


class Choice:
    """A choice of the answer, and the text of its sequence.

    Attributes:
        admitted_s: When its sequence got a slot, on the monotonic clock; None before.
        error: The error with which its sequence ended.
        is_cut: It has ended by a stop text or a call, which its sequence does not know.
    """

    __slots__ = (
        "_stops_after_call",
        "admitted_s",
        "cached_tokens",
        "completion_tokens",
        "diagnosis",
        "error",
        "finish_reason",
        "has_called",
        "index",
        "is_cut",
        "known_kinds",
        "parser",
        "reasoning_tokens",
        "sequence_id",
        "text",
    )

    def __init__(
        self,
        index: int,
        sequence_id: str,
        text: CompletionText,
        parser: OutputParser,
        *,
        stops_after_call: bool,
    ) -> None:
        """Begin without text; ``stops_after_call`` allows one call."""
        self._stops_after_call = stops_after_call
        self.index = index
        self.sequence_id = sequence_id
        self.text = text
        self.parser = parser
        self.admitted_s: float | None = None
        self.cached_tokens = 0
        self.diagnosis: CacheDiagnosis | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.has_called = False
        self.error: MachdError | None = None
        self.is_cut = False
        self.known_kinds: set[type[RowOutput]] = set()

    @property
    def has_begun(self) -> bool:
        """True once its prompt is computed."""
        return self.completion_tokens > 0 or self.finish_reason is not None

    def take_kind(self, output: RowOutput) -> bool:
        """Note an output that is no token; return False for a repetition by a resumed sequence."""
        is_new = type(output) not in self.known_kinds
        self.known_kinds.add(type(output))
        return is_new

    def grow(self, news: ChoiceNews) -> ChoiceDelta | None:
        """Take the new events of a choice that goes on; returns what they add, None for nothing."""
        texts: list[str] = []
        pieces: list[OutputPiece] = []
        stop_token: SampledToken | None = None
        used = 0
        for output in news.outputs:
            used += 1
            if not isinstance(output, SampledToken):
                continue
            texts.append(self.text.push(output.token_id))
            self.completion_tokens += 1
            was_thinking = self.parser.is_thinking
            pieces += self.parser.push(texts[-1])
            self.reasoning_tokens += was_thinking or self.parser.is_thinking
            if self.text.is_stopped or self._has_enough(pieces):
                break
        if self.text.is_stopped or self._has_enough(pieces):
            self.finish_reason = FinishReason.STOP.value
            self.is_cut = True
        elif news.finished is not None:
            stop_token = news.finished.stop_token
            texts.append(self._settle(news.finished))
            pieces += self.parser.push(texts[-1])
        self._end(pieces)
        text = "".join(texts)
        if not used and not text and self.finish_reason is None:
            return None
        return ChoiceDelta(
            self.index,
            text,
            tuple(news.outputs[:used]),
            self.finish_reason,
            joined_pieces(pieces),
            self.text.stopped_by,
            stop_token,
        )

    def _has_enough(self, pieces: Sequence[OutputPiece]) -> bool:
        """Return whether it has made its only call, if the client allows one."""
        return self._stops_after_call and any(isinstance(one, ToolCallEnd) for one in pieces)

    def _end(self, pieces: list[OutputPiece]) -> None:
        """Read a finished choice to its end, and note whether it called something."""
        if self.finish_reason is not None:
            has_ended_itself = self.finish_reason == FinishReason.STOP.value
            pieces += self.parser.finish(is_cut=self.text.is_stopped or not has_ended_itself)
        if self._has_enough(pieces):
            first = next(i for i, one in enumerate(pieces) if isinstance(one, ToolCallEnd))
            del pieces[first + 1 :]
        for piece in pieces:
            if isinstance(piece, ToolCallStart | ToolCallEnd):
                # An incomplete call does not count.
                self.has_called = isinstance(piece, ToolCallEnd)
        if self.has_called and self.finish_reason == FinishReason.STOP.value:
            self.finish_reason = TOOL_CALLS

    def _settle(self, finished: SequenceFinished) -> str:
        """Note how the sequence ended, and return the text that was held back for stop strings."""
        if finished.error is not None:
            self.error = finished.error
            return ""
        self.completion_tokens = finished.completion_tokens
        rest = self.text.finish()
        # Text that was held back may complete a stop string once no more bytes can come.
        is_stopped = self.text.is_stopped
        self.finish_reason = FinishReason.STOP.value if is_stopped else finished.reason.value
        return rest
