"""What engine processes are told: everything once, in order, and again when another one serves."""

from __future__ import annotations

from concurrent.futures import Future

from support.clocks.manual_clock import ManualClock
from support.daemon.serving_parts import admitted, finished, token

from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.media import PlainArray
from machd.errors import DrainDeadlineError, EngineFaultError
from machd.link.messages import (
    Abort,
    Answered,
    ClearPrefixes,
    CompileGrammar,
    Drop,
    Encode,
    Encoded,
    SetLimits,
    Stop,
    Submit,
    ToEngine,
)
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import SamplingParams
from machd.scheduler.events import SequenceFinished
from machd.scheduler.subscriber import SequenceRequest
from machd.served.engine_process import EngineProcess
from machd.served.open_work import ModelSuspendedError, OpenWork
from machd.settings.model import Settings


class _Process(EngineProcess):
    """Takes messages and does nothing."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    @property
    def sequence_ids(self) -> list[list[str]]:
        """Those of each message that starts some."""
        submits = [one for one in self.sent if isinstance(one, Submit)]
        return [[request.sequence_id for request in one.requests] for one in submits]


def _request(sequence_id: str) -> SequenceRequest:
    prompt, sampling = (1, 2), SamplingParams()
    return SequenceRequest(sequence_id, sequence_id, prompt, sampling, 9, frozenset(), 0.0)


def _work(*, is_isolating: bool = False) -> tuple[OpenWork, _Process]:
    """Two sequences that a process serves."""
    work, process = OpenWork(Settings(), ManualClock(0.0)), _Process()
    for one in "ab":
        work.submit((_request(one),))
    work.begin(process, is_isolating=is_isolating)
    return work, process


def test_what_came_before_a_process_serves_is_sent_when_it_does() -> None:
    """After the limits; what comes later is sent at once."""
    work, process = _work()
    work.submit((_request("c"),))

    assert isinstance(process.sent[0], SetLimits)
    assert process.sequence_ids == [["a"], ["b"], ["c"]]


def test_another_process_is_told_of_what_is_open() -> None:
    """No sequence that has ended, no question that has its answer, and the tokens so far."""
    work, first = _work()
    asked = work.clear_prefixes(is_disk_included=False)
    answered = work.clear_prefixes(is_disk_included=True)
    work.answer(Answered(2, None, 5))
    work.follow([finished("a"), admitted("b"), token("b", 7)])
    work.forget_process()
    work.submit((_request("c"),))

    second = _Process()
    work.begin(second, is_isolating=False)

    assert first.sequence_ids == [["a"], ["b"]]
    assert second.sequence_ids == [["b"], ["c"]]
    submit = second.sent[1]
    assert isinstance(submit, Submit)
    assert submit.requests[0].generated_token_ids == (7,)
    assert second.sent[-1] == ClearPrefixes(1, is_disk_included=False)
    assert (asked.done(), answered.result(0)) == (False, 5)


def test_isolated_sequences_are_sent_one_at_a_time() -> None:
    """New ones behind those that are open."""
    work, process = _work(is_isolating=True)
    work.submit((_request("c"),))
    sent = [list(process.sequence_ids)]
    for one in "ab":
        work.follow([finished(one)])
        sent.append(list(process.sequence_ids))

    assert sent == [[["a"]], [["a"], ["b"]], [["a"], ["b"], ["c"]]]


def test_a_held_sequence_is_aborted_here() -> None:
    """The process does not know it; another one is ended by the process."""
    work, process = _work(is_isolating=True)

    (end,) = work.abort(("a", "b", "unknown"), None)

    assert getattr(end, "sequence_id", None) == "b"
    assert process.sent[-1] == Abort(("a",), None)


def test_a_stop_refuses_questions() -> None:
    """A change of config at once, others when they are asked later."""
    work, process = _work()
    change = work.change_config(Settings(), measure=False)
    error = DrainDeadlineError("it stops")

    assert work.stop(error)

    assert process.sent[-1] == Stop(error)
    assert work.stopping.is_set()
    assert change.exception(0) is error
    assert work.clear_prefixes(is_disk_included=True).exception(0) is error


def test_a_suspended_model_holds_no_thread_that_waits_for_a_grammar() -> None:
    """What it was asked fails, so that it is asked again; other questions wait for the next process."""
    work, _ = _work()
    constraint = Constraint(ConstraintKind.REGEX, "a", "p")
    grammar = work.ask(lambda number: CompileGrammar(number, constraint))
    cleared = work.clear_prefixes(is_disk_included=True)

    assert work.suspend(DrainDeadlineError("it is suspended"))
    later = work.ask(lambda number: CompileGrammar(number, constraint))

    assert isinstance(grammar.exception(0), ModelSuspendedError)
    assert isinstance(later.exception(0), ModelSuspendedError)
    assert not cleared.done()
    another = _Process()
    work.begin(another, is_isolating=False)
    work.ask(lambda number: CompileGrammar(number, constraint))
    kinds = [type(one) for one in another.sent if not isinstance(one, SetLimits | Submit)]
    assert kinds == [ClearPrefixes, CompileGrammar]


def test_all_that_is_open_ends_with_the_engine() -> None:
    """With a fault, if it was not told to stop."""
    work, _ = _work()
    asked = work.clear_prefixes(is_disk_included=True)

    ends = work.end()

    assert [getattr(one, "sequence_id", None) for one in ends] == ["a", "b"]
    assert {type(getattr(one, "error", None)) for one in ends} == {EngineFaultError}
    assert isinstance(asked.exception(0), EngineFaultError)
    assert (work.is_served, work.sequence_count) == (False, 0)


def test_a_sequence_that_comes_after_the_end_ends_at_once() -> None:
    """Its request was being prepared when the engine failed for good, and would wait for ever."""
    work, _ = _work()
    work.end()

    (ended,) = work.submit((_request("late"),))

    assert isinstance(ended, SequenceFinished)
    assert isinstance(ended.error, EngineFaultError)
    assert work.sequence_count == 0


def _encode(work: OpenWork, *texts: int) -> Future[PlainArray]:
    return work.encode(tuple(EncoderInput((one,)) for one in texts), is_suspect=False)


def _encodings(process: _Process) -> list[tuple[int, bool]]:
    """The first token and the suspicion of each question about texts."""
    asked = [one for one in process.sent if isinstance(one, Encode)]
    return [(one.inputs[0].token_ids[0], one.is_suspect) for one in asked]


def test_texts_are_sent_again_and_the_oldest_suspect_is_blamed_for_a_second_end() -> None:
    """A process that ends costs no answer; texts that end two of them fail, and the others go on."""
    work, process = _work()
    first, second = _encode(work, 1), _encode(work, 2)
    assert _encodings(process) == [(1, False), (2, False)]
    fault = EngineFaultError("it crashed")
    for open_texts in ([(1, True), (2, True)], [(2, True)]):
        work.forget_process()
        work.survive(fault)
        process = _Process()
        work.begin(process, is_isolating=False)
        assert _encodings(process) == open_texts
    assert first.exception() is fault
    work.answer(Encoded(_number(process), _ROW))
    assert second.result() is _ROW


def test_texts_survive_ends_that_accuse_nobody_and_suspensions() -> None:
    """An operator's kill and a model that gives way leave texts unanswered and unsuspected."""
    work, process = _work()
    asked = _encode(work, 1)
    work.forget_process()
    work.survive(None)
    work.begin(process := _Process(), is_isolating=False)
    work.suspend(DrainDeadlineError("suspended"))
    later = _encode(work, 2)
    work.begin(process := _Process(), is_isolating=False)
    assert _encodings(process) == [(1, False), (2, False)]
    work.end()
    assert asked.exception() is not None
    assert later.exception() is not None


def test_dropped_texts_are_forgotten() -> None:
    """The process is told, and no later one is sent them."""
    work, process = _work()
    inputs = (EncoderInput((1,)),)
    work.encode(inputs, is_suspect=False)
    number = _number(process)
    work.drop_inputs(inputs)
    assert process.sent[-1] == Drop(number)
    work.answer(Encoded(number, _ROW))
    work.forget_process()
    work.begin(process := _Process(), is_isolating=False)
    assert not _encodings(process)


_ROW = PlainArray((1, 1), "float32", memoryview(bytes(4)))


def _number(process: _Process) -> int:
    return next(one.number for one in process.sent if isinstance(one, Encode))
