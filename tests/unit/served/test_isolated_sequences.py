"""Sequences go to an engine process one at a time, in order."""

from __future__ import annotations

from support.daemon.serving_parts import finished

from machd.request.generation import SamplingParams
from machd.scheduler.events import FinishReason
from machd.scheduler.subscriber import SequenceRequest
from machd.served.isolated_sequences import IsolatedSequences
from machd.served.open_sequences import OpenSequences

_REQUESTS = [
    SequenceRequest(one, one, (1, 2), SamplingParams(), 9, frozenset(), 0.0) for one in "abc"
]


def _held(requests: list[SequenceRequest]) -> tuple[OpenSequences, IsolatedSequences]:
    sequences = OpenSequences()
    sequences.add(requests)
    isolated = IsolatedSequences(sequences)
    isolated.hold(requests)
    return sequences, isolated


def test_a_sequence_is_sent_once_the_one_before_has_ended() -> None:
    """However often the next one is asked for."""
    sequences, isolated = _held(_REQUESTS[:2])
    assert [isolated.take_next(), isolated.take_next()] == [_REQUESTS[0], None]
    assert isolated.held_ids == {"b"}

    sequences.follow([finished("a")])

    assert [isolated.take_next(), isolated.take_next()] == [_REQUESTS[1], None]


def test_an_aborted_sequence_is_left_out_when_it_is_held() -> None:
    """It has ended before it was sent."""
    sequences, isolated = _held(_REQUESTS)
    isolated.take_next()
    sequences.end(["b"], FinishReason.ABORT, None, 1.0)
    sequences.follow([finished("a")])

    assert isolated.take_next() == _REQUESTS[2]


def test_new_sequences_queue_until_all_have_ended() -> None:
    """From then on they are sent at once, beside others."""
    sequences, isolated = _held(_REQUESTS[:1])
    seen = [isolated.is_active]
    for _ in range(2):
        isolated.take_next()
        seen.append(isolated.is_active)
        sequences.follow([finished("a")])

    assert seen == [False, True, False]


def test_nothing_is_left_when_the_process_ends() -> None:
    """A next process is told of all that is open."""
    _, isolated = _held(_REQUESTS)
    isolated.take_next()

    isolated.clear()

    assert (isolated.is_active, isolated.held_ids) == (False, frozenset())
    assert isolated.take_next() is None
