"""What a new engine process is told of the sequences of the former one."""

from __future__ import annotations

from support.daemon.serving_parts import admitted, finished, looked_up, token

from machd.errors import EngineFaultError
from machd.request.generation import SamplingParams
from machd.scheduler.events import FinishReason, SequenceFinished, SequenceQueued
from machd.scheduler.subscriber import Resumption, SequenceRequest
from machd.served.open_sequences import OpenSequences

_FAULT = EngineFaultError("it failed")


def _request(sequence_id: str, group_id: str = "g") -> SequenceRequest:
    return SequenceRequest(sequence_id, group_id, (1, 2), SamplingParams(), 9, frozenset(), 0.0)


def _resumptions(sequences: OpenSequences) -> dict[str, Resumption | None]:
    return {one.sequence_id: one.resumption for group in sequences.resumed() for one in group}


def test_a_sequence_goes_on_behind_its_tokens() -> None:
    """With what was told of its prompt, and as a suspect."""
    sequences = OpenSequences()
    sequences.add([_request("a"), _request("b", "other")])
    sequences.follow([admitted("a"), looked_up("a", 1), token("a", 7), token("a", 8)])
    sequences.survive(_FAULT, 5.0)

    assert _resumptions(sequences) == {
        "a": Resumption((7, 8), reused_tokens=1, is_group_started=True, is_suspect=True),
        "b": Resumption(),
    }


def test_siblings_of_a_sequence_that_had_a_slot_have_started() -> None:
    """Their queue timeout is behind them; they are sent as one request again."""
    sequences = OpenSequences()
    sequences.add([_request("a"), _request("b")])
    sequences.follow([admitted("a"), finished("a")])
    sequences.add([_request("c", "later")])

    (first,), (second,) = sequences.resumed()

    assert (first.sequence_id, second.sequence_id) == ("b", "c")
    assert first.resumption == Resumption(is_group_started=True)


def test_a_sequence_without_a_token_between_two_ends_is_to_blame() -> None:
    """Others have had one."""
    sequences = OpenSequences()
    sequences.add([_request("a", "a"), _request("b", "b")])
    sequences.follow([admitted("a"), admitted("b")])
    assert sequences.survive(_FAULT, 5.0) == []
    sequences.follow([admitted("a"), token("a", 7), admitted("b")])

    (end,) = sequences.survive(_FAULT, 6.0)

    assert isinstance(end, SequenceFinished)
    assert (end.sequence_id, end.reason, end.error) == ("b", FinishReason.ERROR, _FAULT)
    assert list(sequences) == ["a"]


def test_a_sequence_that_ran_alone_at_two_ends_is_to_blame() -> None:
    """However many tokens it had between them."""
    sequences = OpenSequences()
    sequences.add([_request("a")])
    ends = []
    for _ in range(2):
        sequences.follow([admitted("a"), token("a", 7)])
        ends.append(len(sequences.survive(_FAULT, 5.0)))

    assert ends == [0, 1]


def test_sequences_that_run_together_are_not_to_blame() -> None:
    """None can be told from the others."""
    sequences = OpenSequences()
    sequences.add([_request("a", "a"), _request("b", "b")])
    for _ in range(5):
        sequences.follow([admitted("a"), token("a", 7), admitted("b"), token("b", 7)])
        assert sequences.survive(_FAULT, 5.0) == []


def test_a_whole_answer_is_noticed() -> None:
    """One that ended with an error is none."""
    sequences = OpenSequences()
    sequences.add([_request("a"), _request("b")])

    assert not sequences.follow([admitted("a"), token("a", 7)])
    assert not sequences.follow([finished("a", FinishReason.ERROR, _FAULT, completion_tokens=1)])
    assert sequences.follow([finished("b", completion_tokens=1)])
    assert len(sequences) == 0


def test_sequences_that_are_ended_here_have_their_tokens_counted() -> None:
    """As those that an engine ends."""
    sequences = OpenSequences()
    sequences.add([_request("a")])
    sequences.follow([token("a", 7), token("a", 8)])

    (end,) = sequences.end(["a"], FinishReason.ABORT, None, 4.0)

    assert isinstance(end, SequenceFinished)
    assert (end.completion_tokens, end.prompt_tokens, end.at_s) == (2, 2, 4.0)
    assert "a" not in sequences


def test_a_sequence_that_two_processes_could_not_take_in_is_to_blame() -> None:
    """One that waits there is not."""
    sequences, requests = OpenSequences(), [_request("a", "a"), _request("b", "b")]
    sequences.add(requests)
    ends = []
    for _ in range(2):
        sequences.note_sent(requests)
        sequences.follow([SequenceQueued("b", 0)])
        ends = sequences.survive(_FAULT, 5.0)

    assert [getattr(one, "sequence_id", None) for one in ends] == ["a"]
    assert list(sequences) == ["b"]
