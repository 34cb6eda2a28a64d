"""Answers out of timed pieces of a stream."""

from __future__ import annotations

import pytest

from machd.errors import EngineFaultError
from machd_bench.answer import Answer
from machd_bench.connection import Exchange, TimedPiece

STREAM = (
    b'data: {"choices":[{"index":0,"text":"caf\xc3\xa9"}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[{"index":0,"delta":{"content":"two"}}]}\r\n\r\n'
    b'event: more\ndata:{"choices":[],\ndata: "usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


def read(*parts: bytes) -> Answer:
    """An answer whose pieces come a second apart."""
    pieces = [TimedPiece(float(second), part) for second, part in enumerate(parts)]
    return Answer.read(Exchange(-1.0, 9.0, 200, {}, pieces))


def test_an_answer_does_not_depend_on_where_the_stream_was_cut() -> None:
    """Cut in two anywhere, or into single bytes, a stream holds the same text and counts."""
    for cut in range(len(STREAM) + 1):
        answer = read(STREAM[:cut], STREAM[cut:])
        assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("cafétwo", 7, 3)
    single = read(*(STREAM[at : at + 1] for at in range(len(STREAM))))
    assert (single.text, len(single.text_s)) == ("cafétwo", 2)


def test_an_event_comes_when_its_last_byte_does() -> None:
    """Texts and chat deltas are tokens, usage and comments are not, and their line ends date them."""
    answer = read(*STREAM.splitlines(keepends=True))

    assert answer.text_s == (1.0, 5.0)
    assert (answer.ttft_s, answer.gaps_s, answer.latency_s) == (2.0, [4.0], 10.0)
    assert answer.first_text == "café"


def test_an_event_without_an_end_is_none() -> None:
    """A stream that breaks off in the middle of an event does not count it."""
    assert read(STREAM[:54] + b"\n" + STREAM[54:100]).text == "café"


def test_reasoning_counts_and_is_no_part_of_the_text() -> None:
    """A server that sends no usage still gets a number of tokens: the events with text."""
    answer = read(
        b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"["}}]}\n\n'
    )

    assert (answer.text, answer.completion_tokens) == ("[", 2)


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"data: [DONE]\n\n",
        b"data: {}\n\n",
        b'data: {"error":{"message":"out of memory"}}\n\n',
        b"data: not JSON\n\n",
        b'data: {"choices":[{"text":3}]}\n\n',
    ],
)
def test_a_stream_that_failed_is_an_error(stream: bytes) -> None:
    """Silence, an error event and nonsense end the bench instead of looking fast."""
    with pytest.raises(EngineFaultError):
        read(stream)
