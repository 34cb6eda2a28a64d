"""One decode and its readers: what it holds, and what each of them is owed."""

from __future__ import annotations

import pytest
from sequence_samples import decode_of, running_decode_of, sequence_of

from machd.engine.protocol.step import DecodeRow, Lane, SampledToken
from machd.scheduler.decode import PRIORITY_DELAY_S
from machd.scheduler.sequence import Priority, SequenceState


def test_a_decode_is_admitted_once() -> None:
    """A slot is taken once, and with it every reader begins to be answered."""
    decode = decode_of()
    decode.join(sequence_of("b"))
    decode.admit(2, Lane.BATCH, now_s=1.0)

    assert (decode.slot_index, decode.lane, decode.admitted_s) == (2, Lane.BATCH, 1.0)
    assert {reader.state for reader in decode.readers} == {SequenceState.RUNNING}
    with pytest.raises(AssertionError, match="admitted twice"):
        decode.admit(1, Lane.BATCH, now_s=1.0)


def test_prefill_needs_a_slot_and_an_unfinished_prompt() -> None:
    """No chunk exists before admission or after the prompt's end, no row before it."""
    with pytest.raises(AssertionError, match="needs a slot"):
        decode_of().next_chunk(8)
    decode = running_decode_of(prompt_tokens=2)
    with pytest.raises(AssertionError, match="the prompt comes first"):
        decode.next_row()
    decode.prefilled_tokens = 2
    with pytest.raises(AssertionError, match="already prefilled"):
        decode.next_chunk(8)
    assert decode.next_row() == DecodeRow(0)


def test_reservation_is_prompt_and_completion_together() -> None:
    """What a row may come to hold is known when it opens."""
    assert decode_of(prompt_tokens=7, max_tokens=5).reserved_tokens == 12


def test_who_joins_late_has_what_was_already_there() -> None:
    """The tokens so far count as the newcomer's own, and the next one counts for both."""
    decode = running_decode_of()
    decode.prefilled_tokens = 4
    decode.count_token(SampledToken(0, 7))
    late = sequence_of("late")
    decode.join(late)
    decode.count_token(SampledToken(0, 8))

    assert [token.token_id for token in decode.tokens] == [7, 8]
    assert [reader.completion_tokens for reader in decode.readers] == [2, 2]


def test_the_place_is_the_most_urgent_readers() -> None:
    """An interactive reader pulls the decode it shares forward; nobody pushes it back."""
    decode = decode_of("a", number=3, arrived_s=10.0, priority=Priority.BATCH)
    places = [decode.place]
    for name, priority in [("b", Priority.INTERACTIVE), ("c", Priority.NORMAL)]:
        decode.join(decode_of(name, arrived_s=20.0, priority=priority).readers[0])
        places.append(decode.place)
    assert places == [(70.0, 3), (20.0, 3), (20.0, 3)]


def test_priorities_are_ordered_by_what_they_cost() -> None:
    """The better the priority, the smaller the delay, and the best has none."""
    delays_s = [PRIORITY_DELAY_S[one] for one in Priority]
    assert delays_s == sorted(delays_s)
    assert delays_s[0] == 0.0
