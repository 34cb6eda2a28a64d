"""One sequence's life: waiting, running, finished, and never back."""

from __future__ import annotations

import pytest
from sequence_samples import request_of, sequence_of

from machd.errors import RequestTimeoutError
from machd.scheduler.events import FinishReason, SequenceFinished
from machd.scheduler.sequence import Sequence, SequenceState


def test_a_sequence_is_waiting_running_finished() -> None:
    """The three states come in this order, and the slot is held only in the second."""
    sequence = sequence_of()
    assert (sequence.state, sequence.slot_index) == (SequenceState.WAITING, None)

    sequence.admit(2, now_s=1.0)
    assert (sequence.state, sequence.slot_index) == (SequenceState.RUNNING, 2)

    sequence.finish(FinishReason.STOP, now_s=2.0)
    assert (sequence.state, sequence.slot_index) == (SequenceState.FINISHED, None)


def test_the_end_tells_what_was_done() -> None:
    """The event carries the reason, the error, both token counts and the time."""
    sequence = sequence_of("s", prompt_tokens=7)
    sequence.admit(0, now_s=1.0)
    sequence.count_token()
    sequence.count_token()
    error = RequestTimeoutError("too long")

    assert sequence.finish(FinishReason.ERROR, 5.0, error) == SequenceFinished(
        sequence_id="s",
        reason=FinishReason.ERROR,
        error=error,
        prompt_tokens=7,
        cached_tokens=0,
        completion_tokens=2,
        at_s=5.0,
    )


def test_a_sequence_is_admitted_once() -> None:
    """Neither a running nor a finished sequence takes a slot."""
    sequence = sequence_of()
    sequence.admit(0, now_s=1.0)
    with pytest.raises(AssertionError, match="admitted while running"):
        sequence.admit(1, now_s=1.0)

    sequence.finish(FinishReason.STOP, now_s=2.0)
    with pytest.raises(AssertionError, match="admitted while finished"):
        sequence.admit(0, now_s=3.0)


def test_a_sequence_finishes_once() -> None:
    """A second end would be a second answer to one client."""
    sequence = sequence_of()
    sequence.finish(FinishReason.ABORT, now_s=1.0)
    with pytest.raises(AssertionError, match="finished twice"):
        sequence.finish(FinishReason.ABORT, now_s=1.0)


def test_only_a_running_sequence_gets_tokens() -> None:
    """No token before the slot, none after the end."""
    sequence = sequence_of()
    with pytest.raises(AssertionError, match="token while waiting"):
        sequence.count_token()
    sequence.admit(0, now_s=1.0)
    sequence.finish(FinishReason.STOP, now_s=1.0)
    with pytest.raises(AssertionError, match="token while finished"):
        sequence.count_token()


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(0, 1), (1, 0), (1, -1)])
def test_an_empty_sequence_is_refused(prompt_tokens: int, max_tokens: int) -> None:
    """A sequence has a prompt and room for an answer, or it would never end."""
    with pytest.raises(AssertionError, match="at least one token"):
        Sequence(request_of(prompt_tokens=prompt_tokens, max_tokens=max_tokens))


def test_prefill_needs_a_slot_and_an_unfinished_prompt() -> None:
    """No chunk exists before admission or after the prompt's end."""
    sequence = sequence_of(prompt_tokens=2)
    with pytest.raises(AssertionError, match="needs a slot"):
        sequence.next_chunk(8)
    sequence.admit(0, now_s=1.0)
    sequence.prefilled_tokens = 2
    with pytest.raises(AssertionError, match="already prefilled"):
        sequence.next_chunk(8)


def test_reservation_is_prompt_and_completion_together() -> None:
    """What a row may come to hold is known when it opens."""
    assert sequence_of(prompt_tokens=7, max_tokens=5).reserved_tokens == 12
