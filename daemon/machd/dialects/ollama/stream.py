"""A generation in Ollama's words: as lines of JSON, and whole as all of them in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw

from machd.dialects.chat.answer import ContentGaps
from machd.dialects.logprobs import ChatTokenLogprob, GrowingLogprobs
from machd.dialects.ollama import answer
from machd.dialects.usage import CacheDiagnosisDetails, wire_finish_reason
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import MachdError
from machd.generations.choice import ChoiceDelta
from machd.generations.generation import GenerationUsage
from machd.http.sse import JSON_LINES
from machd.reading import output

_NANOSECONDS = 1_000_000_000
_NO_ARGUMENTS = Raw(b"{}")


@dataclass(frozen=True, slots=True)
class Said:
    """Text, thoughts and whole calls of one line."""

    content: str = ""
    thinking: str = ""
    calls: tuple[answer.OllamaAnswerToolCall, ...] = ()


class OllamaDialect(ABC):
    """Lines of one choice: Ollama's API has no more."""

    media_type = JSON_LINES

    def __init__(
        self,
        model_id: str,
        created_at: str,
        logprobs_of: Tokenizer | None,
        *,
        tells_cache: bool = False,
    ) -> None:
        """Begin an answer; ``created_at`` is in RFC 3339, ``logprobs_of`` None where none are wanted.

        With ``tells_cache`` the last line has the cache's diagnosis.
        """
        self._tells_cache = tells_cache
        self._model_id = model_id
        self._created_at = created_at
        self._logprobs = GrowingLogprobs(logprobs_of)
        self._encoder = msgspec.json.Encoder()
        self._reader = _Reader()
        self._said: list[Said] = []
        self._done_reason: answer.DoneReason = "stop"
        # Not an empty line, at which Ollama's own client fails.
        self.keep_alive = self._encoded(Said(), []) + b"\n"

    def opening(self, _usage: GenerationUsage) -> bytes:
        """Return nothing: every line names its role."""
        return b""

    def push(self, delta: ChoiceDelta) -> bytes:
        """A line for each text, thought and whole call."""
        self._logprobs.push(delta.tokens)
        self._done_reason = wire_finish_reason(delta.finish_reason) or "stop"
        said = list(self._reader.push(delta.pieces))
        self._said += said
        return b"".join(self._encoded(one, self._logprobs.unframed()) + b"\n" for one in said)

    def closing(self, usage: GenerationUsage) -> bytes:
        """The last line, with what the answer took."""
        return self._last(Said(), self._logprobs.unframed(), usage) + b"\n"

    def failure(self, error: MachdError) -> bytes:
        """A line that ends the stream."""
        return answer.ollama_error_json(error) + b"\n"

    def finish(self, usage: GenerationUsage) -> bytes:
        """The answer."""
        said = Said(
            content="".join(one.content for one in self._said),
            thinking="".join(one.thinking for one in self._said),
            calls=tuple(call for one in self._said for call in one.calls),
        )
        return self._last(said, self._logprobs.finish(), usage)

    def loaded(self, reason: answer.DoneReason) -> bytes:
        """The answer to a request that asks for no text: the model is loaded, or is to be unloaded."""
        return self._encoded(Said(), [], done=True, done_reason=reason)

    @abstractmethod
    def _line(self, said: Said) -> answer.OllamaLine: ...

    def _encoded(self, said: Said, logprobs: list[ChatTokenLogprob], **fields: object) -> bytes:
        """A line, with fields of the last line."""
        line = msgspec.structs.replace(self._line(said), logprobs=logprobs or UNSET, **fields)
        return self._encoder.encode(line)

    def _last(self, said: Said, logprobs: list[ChatTokenLogprob], usage: GenerationUsage) -> bytes:
        time = usage.timing
        prefill_s, decode_s = time.prefill_s or 0.0, time.decode_s or 0.0
        return self._encoded(
            said,
            logprobs,
            done=True,
            done_reason=self._done_reason,
            total_duration=_nanoseconds(time.queue_s + prefill_s + decode_s),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_nanoseconds(prefill_s),
            eval_count=usage.completion_tokens,
            eval_duration=_nanoseconds(decode_s),
            cache_diagnosis=CacheDiagnosisDetails.of(usage, is_asked=self._tells_cache),
        )


class OllamaChatDialect(OllamaDialect):
    """Answers of ``/api/chat``."""

    def _line(self, said: Said) -> answer.OllamaLine:
        message = answer.OllamaAnswerMessage(
            content=said.content,
            thinking=said.thinking or UNSET,
            tool_calls=list(said.calls) or UNSET,
        )
        return answer.OllamaChatLine(
            model=self._model_id, created_at=self._created_at, message=message
        )


class OllamaGenerateDialect(OllamaDialect):
    """Answers of ``/api/generate``."""

    def _line(self, said: Said) -> answer.OllamaLine:
        return answer.OllamaGenerateLine(
            model=self._model_id,
            created_at=self._created_at,
            response=said.content,
            thinking=said.thinking or UNSET,
        )


class _Reader:
    """Turns pieces into lines; a call waits until it is whole, as its arguments are an object."""

    def __init__(self) -> None:
        self._gaps = ContentGaps()
        self._call: output.ToolCallStart | None = None
        self._arguments: list[str] = []

    def push(self, pieces: Iterable[output.OutputPiece]) -> Iterator[Said]:
        """Yield texts and thoughts as they come, and calls once they are whole."""
        for piece in self._gaps.push(pieces):
            match piece:
                case output.Content(text):
                    yield Said(content=text)
                case output.Reasoning(text):
                    yield Said(thinking=text)
                case output.ToolCallStart():
                    self._call, self._arguments = piece, []
                case output.ToolCallArguments(text=text):
                    self._arguments.append(text)
                case output.ToolCallEnd():
                    assert self._call is not None, "a call ends that has begun"
                    yield Said(calls=(_called(self._call, "".join(self._arguments)),))


def _called(call: output.ToolCallStart, arguments: str) -> answer.OllamaAnswerToolCall:
    function = answer.OllamaFunctionCall(
        index=call.index, name=call.name, arguments=_one_line_object(arguments)
    )
    return answer.OllamaAnswerToolCall(id=call.call_id, function=function)


def _one_line_object(arguments: str) -> Raw:
    """The arguments as an object without white space around it; a line feed would end the line."""
    try:
        msgspec.json.decode(arguments, type=dict[str, object])
        return Raw(msgspec.json.format(arguments, indent=-1).encode())
    except (msgspec.DecodeError, RecursionError):
        return _NO_ARGUMENTS


def _nanoseconds(duration_s: float) -> int:
    return round(duration_s * _NANOSECONDS)
