"""Events out of timed pieces."""

from __future__ import annotations

import itertools

import pytest

from machd.bench.sse import TimedPiece, timed_events
from machd.bench.timing import RequestTiming
from machd.errors import EngineFaultError

STREAM = (
    b'data: {"choices":[{"index":0,"text":"caf\xc3\xa9"}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[{"index":0,"delta":{"content":"two"}}]}\r\n\r\n'
    b'event: more\ndata:{"choices":[],\ndata: "usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


def pieces_of(*parts: bytes) -> list[TimedPiece]:
    """Pieces that come a second apart."""
    return [TimedPiece(float(second), part) for second, part in enumerate(parts)]


def test_events_do_not_depend_on_where_the_stream_was_cut() -> None:
    """Cut in two anywhere, or into single bytes, a stream holds the same events."""
    whole = [event.data for event in timed_events(pieces_of(STREAM))]

    for cut in range(len(STREAM) + 1):
        halves = timed_events(pieces_of(STREAM[:cut], STREAM[cut:]))
        assert [event.data for event in halves] == whole
    single = pieces_of(*(STREAM[at : at + 1] for at in range(len(STREAM))))
    assert [event.data for event in timed_events(single)] == whole
    assert len(whole) == 4
    assert whole[-1] == b"[DONE]"


def test_an_event_comes_when_its_last_byte_does() -> None:
    """Each event carries the time of the piece that ended it, not of the one that began it."""
    events = timed_events(pieces_of(b"data: a\n", b"\ndata: b\n\nda", b"", b"ta: c\n\n"))

    assert [(event.arrived_s, event.data) for event in events] == [
        (1.0, b"a"),
        (1.0, b"b"),
        (3.0, b"c"),
    ]


def test_an_event_without_an_end_is_none() -> None:
    """A stream that breaks off in the middle of an event does not count it."""
    assert timed_events(pieces_of(b"data: a\n\ndata: b\n")) == timed_events(
        pieces_of(b"data: a\n\n")
    )


def test_a_timing_counts_events_with_text_in_either_dialect() -> None:
    """Texts and chat deltas are tokens, usage and comments are not, and the server's count wins."""
    timing = RequestTiming.read(-1.0, 9.0, pieces_of(*STREAM.splitlines(keepends=True)))

    assert len(timing.text_s) == 2
    assert timing.ttft_s == 2.0
    assert timing.gaps_s == (4.0,)
    assert timing.latency_s == 10.0
    assert (timing.prompt_tokens, timing.completion_tokens) == (7, 3)
    assert timing.text == "cafétwo"


def test_an_answer_is_what_is_not_reasoning() -> None:
    """Reasoning counts as tokens, and is no part of the text."""
    stream = (
        b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"["}}]}\n\n'
    )
    timing = RequestTiming.read(0, 1, pieces_of(stream))

    assert (timing.text, timing.completion_tokens) == ("[", 2)


def test_without_usage_events_are_counted() -> None:
    """A server that counts nothing still gets a number of tokens."""
    event = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'

    assert RequestTiming.read(0, 1, pieces_of(event * 5)).completion_tokens == 5


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
        RequestTiming.read(0, 1, pieces_of(stream))


def test_times_never_run_backwards() -> None:
    """Whatever the cuts, events are in the order of their arrival."""
    parts = [STREAM[start : start + 11] for start in range(0, len(STREAM), 11)]
    events = timed_events(pieces_of(*parts))

    assert all(a.arrived_s <= b.arrived_s for a, b in itertools.pairwise(events))
