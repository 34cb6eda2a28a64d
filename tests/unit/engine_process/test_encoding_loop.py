"""The thread of an encoder: each question gets its own rows, whatever was computed with it and whatever fails."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import wait_until
from support.engines.fake_encoder import FakeEncoder, numbers_of

from machd.clock import Clock, SystemClock
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.media import PlainArray
from machd.engine_process.encoding_loop import EncodingLoop
from machd.errors import DrainDeadlineError, EngineFaultError, ModelFormatError, OverloadedError

_WAIT_S = 30


@contextmanager
def _running(encoder: FakeEncoder, clock: Clock | None = None) -> Iterator[EncodingLoop]:
    loop = EncodingLoop(lambda: encoder, clock=clock or SystemClock())
    loop.start()
    loop.loaded.result(_WAIT_S)
    try:
        yield loop
    finally:
        loop.stop(DrainDeadlineError("the test is over"))
        assert loop.join(_WAIT_S)


def _inputs(*lengths: int, first: int = 1) -> tuple[EncoderInput, ...]:
    return tuple(EncoderInput((first,) * length) for length in lengths)


def _rows(done: Future[PlainArray]) -> list[list[float]]:
    values = done.result(_WAIT_S)
    count, width = values.shape
    flat = array("f", bytes(values.content)).tolist()
    return [flat[index * width : (index + 1) * width] for index in range(count)]


def _expected(inputs: Sequence[EncoderInput]) -> list[list[float]]:
    return [numbers_of(one) for one in inputs]


@pytest.mark.parametrize("packs", [False, True])
def test_questions_get_their_own_rows_in_their_order(*, packs: bool) -> None:
    """Texts of several questions and lengths are computed together, and each question is answered with its own."""
    with _running(FakeEncoder(packs=packs)) as loop:
        asked = [_inputs(5, 700, 5, 3, first=first) for first in range(1, 9)]
        answers = [loop.encode(one) for one in asked]
        for inputs, answer in zip(asked, answers, strict=True):
            assert _rows(answer) == _expected(inputs)


def test_texts_of_several_questions_share_a_pass() -> None:
    """What has come while a pass was computed is computed in one."""
    encoder = FakeEncoder(is_held=True)
    with _running(encoder) as loop:
        first = loop.encode(_inputs(4))
        encoder.begun.wait(_WAIT_S)
        others = [loop.encode(_inputs(4, first=first)) for first in range(2, 10)]
        encoder.held.set()
        for one in (first, *others):
            one.result(_WAIT_S)
    assert [len(texts) for texts in encoder.passes] == [1, 8]


@pytest.mark.parametrize(
    ("raised", "told"), [(ValueError("bad"), EngineFaultError), (MemoryError(), OverloadedError)]
)
def test_a_text_that_fails_fails_its_own_question(raised: Exception, told: type[Exception]) -> None:
    """The others of its pass are answered; the question that holds it gets the error at once."""
    encoder = FakeEncoder(is_held=True, fails={7: raised})
    with _running(encoder) as loop:
        held = loop.encode(_inputs(4))
        encoder.begun.wait(_WAIT_S)
        good, bad = _inputs(4, 4, first=2), (*_inputs(4, first=3), *_inputs(4, first=7))
        answers = [loop.encode(good), loop.encode(bad), loop.encode(good)]
        encoder.held.set()
        assert _rows(answers[0]) == _rows(answers[2]) == _expected(good)
        with pytest.raises(told):
            answers[1].result(_WAIT_S)
        assert _rows(held) == _expected(_inputs(4))


def test_numbers_that_are_not_finite_are_an_error() -> None:
    """No client gets a NaN, which is no JSON."""
    with _running(FakeEncoder(fails={7: None})) as loop:
        with pytest.raises(EngineFaultError, match="not finite"):
            loop.encode(_inputs(4, first=7)).result(_WAIT_S)
        assert _rows(loop.encode(_inputs(4))) == _expected(_inputs(4))


def test_a_suspect_is_computed_alone_and_first() -> None:
    """Texts over which a process has ended take no others with them."""
    encoder = FakeEncoder(is_held=True)
    with _running(encoder) as loop:
        first = loop.encode(_inputs(4))
        encoder.begun.wait(_WAIT_S)
        others = [
            loop.encode(_inputs(4, first=2)),
            loop.encode(_inputs(4, 4, first=3), is_suspect=True),
        ]
        encoder.held.set()
        for one in (first, *others):
            one.result(_WAIT_S)
    assert [{text.token_ids[0] for text in texts} for texts in encoder.passes] == [{1}, {3}, {2}]


def test_dropped_texts_are_not_computed() -> None:
    """A client that has left costs no pass."""
    encoder = FakeEncoder(is_held=True)
    with _running(encoder) as loop:
        loop.encode(_inputs(4))
        encoder.begun.wait(_WAIT_S)
        dropped = _inputs(4, first=2)
        loop.encode(dropped)
        loop.drop_inputs(dropped)
        last = loop.encode(_inputs(4, first=3))
        encoder.held.set()
        last.result(_WAIT_S)
    assert [{text.token_ids[0] for text in texts} for texts in encoder.passes] == [{1}, {3}]


def test_memory_is_read_once_in_a_while() -> None:
    """Texts one after another do not pay for a reading each; an idle thread goes on reading."""
    encoder, clock = FakeEncoder(), ManualClock()
    with _running(encoder, clock) as loop:
        for _ in range(20):
            loop.encode(_inputs(4)).result(_WAIT_S)
        assert encoder.memory_readings == 1
        clock.advance(1)
        wait_until(lambda: loop.snapshot.taken_unix_s == clock.unix_s(), "a reading while idle")
        assert encoder.memory_readings == 2


def test_a_stop_answers_what_is_open() -> None:
    """Texts that wait get the error of the stop, and the weights are given back."""
    encoder = FakeEncoder(is_held=True)
    with _running(encoder) as loop:
        loop.encode(_inputs(4))
        encoder.begun.wait(_WAIT_S)
        waiting = loop.encode(_inputs(4, first=2))
        loop.stop(DrainDeadlineError("stopped"))
        encoder.held.set()
        with pytest.raises(DrainDeadlineError):
            waiting.result(_WAIT_S)
        assert loop.finished.result(_WAIT_S) is None
    assert encoder.is_closed


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    """Whoever waits for it gets the error of loading."""

    def load() -> FakeEncoder:
        raise ModelFormatError("no weights")

    loop = EncodingLoop(load, clock=SystemClock())
    loop.start()
    with pytest.raises(ModelFormatError):
        loop.loaded.result(_WAIT_S)
    assert loop.finished.result(_WAIT_S) is None
