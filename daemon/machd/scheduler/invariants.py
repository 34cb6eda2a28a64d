"""What must hold between any two verbs of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from machd.scheduler.decode import Decode
from machd.scheduler.sequence import Sequence, SequenceState
from machd.scheduler.slots import Slots
from machd.scheduler.waiting import WaitingQueue


def check_sequences(slots: Slots, waiting: WaitingQueue, is_open: Mapping[str, Decode]) -> None:
    """Assert that slots, queue and sequences agree."""
    for decode in slots:
        assert slots.at(-1 if decode.slot_index is None else decode.slot_index) is decode, (
            "a decode does not know its slot"
        )
        _check_readers(decode.readers, SequenceState.RUNNING)
    for decode in waiting:
        assert not decode.is_running, "a running decode waits"
        _check_readers(decode.readers, SequenceState.WAITING)
    expected = {one.sequence_id: decode for decode in (*slots, *waiting) for one in decode.readers}
    assert is_open == expected, "the open sequences are not those that slots and queue serve"
    prompt_tokens = sum(decode.prompt_tokens for decode in waiting)
    assert prompt_tokens == waiting.prompt_tokens, "queued tokens do not add up"


def _check_readers(readers: list[Sequence], state: SequenceState) -> None:
    assert readers, f"nobody reads a {state} decode"
    assert {one.state for one in readers} == {state}, f"a reader of a {state} decode is not {state}"
